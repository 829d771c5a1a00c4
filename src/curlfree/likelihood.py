r"""Likelihood by the instantaneous change of variables along the probability-flow ODE.

Along ``dx/dt = -sigma sigma' s(x, sigma)`` the log-density changes by the divergence of the drift, so that

    log p(x) = log p_prior(x(t_max)) - integral_{t_min}^{t_max} sigma sigma' tr J(x(t), sigma(t)) dt

(Chen et al. 2018, arXiv:1806.07366; Song et al. 2021, arXiv:2011.13456, Section D.2). This is the density of
data with noise sigma_min. The prior is the process' own; its mismatch with the data blurred by sigma_max
belongs to the result, and `data_std` makes it small.

tr J is exact by D transposed products, or Hutchinson's ``v^T J v`` with probes of random signs, drawn once
per sample and kept along its trajectory. Each evaluation is one pass of the network, shared by drift and
divergence, and one transposed product per probe. tr K = v^T K v = 0: the skew part of J, all that is wrong
with a field that is not conservative, is invisible to both.

Three errors, kept apart in `Likelihood`: the spread over data (with the probes' noise, as `se`), the probes'
noise alone (`probe_se`, from at least two probes of the same trajectory), and the solver's (`solver_error`,
from a second run of some points at a tenth of the tolerances).

Images: `dequantise` spreads bytes over [0, 1] and `bits_per_dim` refers the density to bytes, the bound of
Theis et al. 2016 (arXiv:1511.01844): ``-log p / (D log 2) + 8``, since a byte is a cell of side 1/256.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curlfree.estimators import rademacher
from curlfree.ode import Solver, rk45
from curlfree.operators import Condition, Field, Operator, inner, jacobian
from curlfree.processes import Process
from curlfree.samplers import Evaluator, Progress

# The tolerances of the run that measures the solver's error, relative to the others. A tenth shows nine
# tenths of an error proportional to the tolerance; a hundredth of 1e-5 would ask RK45 to resolve the rounding
# of a float32 network.
TIGHTER = 0.1


@dataclass(frozen=True, eq=False)
class LogProb:
    """Log-densities along one set of trajectories.

    Args:
        draws: log p in nats by each probe, shape (B, probes), or (B, 1) with the exact divergence.
        x: the points at sigma_max that the data flowed to.
        nfe: how many times the field was called with the batch.
        evaluations: how many evaluations each sample needed, shape (B,).
    """

    draws: Tensor
    x: Tensor
    nfe: int
    evaluations: Tensor

    @property
    def value(self) -> Tensor:
        """The mean over probes, shape (B,), float64."""
        return self.draws.mean(1)


@dataclass(frozen=True)
class Likelihood:
    """A mean negative log-likelihood with its errors, all in the same `unit`.

    Args:
        value: the mean over the data.
        se: its standard error over the data; contains the probes' noise.
        n: how many points.
        probe_se: the standard error from the probes alone; 0 for exact divergence, NaN with one probe.
        solver_error: the mean change at a tenth of the tolerances; NaN when not asked for.
        nfe: the mean number of evaluations per point.
        unit: "nats" or "bits/dim".
    """

    value: float
    se: float
    n: int
    probe_se: float
    solver_error: float
    nfe: float
    unit: str = "nats"

    def bits_per_dim(self, dim: int) -> "Likelihood":
        """The same for images in [0, 1] made by `dequantise`, with D = dim, in bits per dimension."""
        scale = 1 / (dim * math.log(2))
        return Likelihood(
            value=self.value * scale + 8,
            se=self.se * scale,
            n=self.n,
            probe_se=self.probe_se * scale,
            solver_error=self.solver_error * scale,
            nfe=self.nfe,
            unit="bits/dim",
        )


def log_prob(
    field: Field,
    x: Tensor,
    process: Process,
    *,
    probes: int | None = None,
    generator: torch.Generator | None = None,
    solver: Solver = rk45,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    condition: Condition | None = None,
    progress: Progress | None = None,
) -> LogProb:
    """The log-density of the field's probability flow at x.

    Args:
        field: the score.
        x: points, of shape (B, *event), taken as data with noise sigma_min.
        process: the schedule and the prior.
        probes: number of Hutchinson probes per trajectory; None for the exact divergence, by D products.
        generator: the source of the probes.
        solver: one of `curlfree.ode`; `rk45_per_sample` makes a result independent of its batch.
        rtol: tolerance relative to the size of each component of the points and log-densities.
        atol: absolute tolerance.
        condition: keyword arguments for the field.
        progress: called after every evaluation with the thousandths of the time covered.

    Returns:
        The log-densities in nats.

    Raises:
        ValueError: probes without a generator, or fewer than one.
    """
    if probes is not None and (probes < 1 or generator is None):
        raise ValueError(f"Hutchinson's estimate needs probes >= 1 and a generator, got probes={probes}")
    run = Evaluator(field, x, process, condition, progress=progress)
    v = [rademacher(x, generator) for _ in range(probes or 0)]
    size, span = x[0].numel(), process.t_max - process.t_min

    @torch.no_grad()
    def drift(t: Tensor, y: Tensor) -> Tensor:
        sigma = process.sigma(t)
        point, level = run.inputs(y[:, :size].reshape(x.shape), sigma)
        s, jac = jacobian(field, point, level, condition=condition)
        run.check(s, point, sigma)
        trace = torch.stack([inner(p, jac.T @ p) for p in v], 1) if v else _trace(jac)
        run.reach((float(t.max()) - process.t_min) / span)
        return -(sigma * process.sigma_prime(t))[:, None] * torch.cat([s.flatten(1), trace], 1).double()

    start = torch.cat([x.flatten(1).double(), x.new_zeros(len(x), max(1, len(v)), dtype=torch.float64)], 1)
    y, evaluations = solver(drift, start, process.t_min, process.t_max, rtol, atol)
    end = y[:, :size].view(x.shape)
    draws = process.prior_log_prob(end)[:, None] + y[:, size:]
    return LogProb(draws, end.to(x.dtype), run.nfe, evaluations)


def _trace(jac: Operator) -> Tensor:
    """The exact trace by D transposed products, shape (B, 1)."""
    return sum(row[:, i] for i, row in enumerate(jac.rows()))[:, None]  # type: ignore[index]


def nll(
    field: Field,
    x: Tensor,
    process: Process,
    *,
    probes: int | None = None,
    generator: torch.Generator | None = None,
    batch_size: int = 10_000,
    solver_check: int = 0,
    solver: Solver = rk45,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    condition: Condition | None = None,
    progress: Progress | None = None,
) -> Likelihood:
    """The mean negative log-likelihood of data in nats, with error bars.

    Args:
        field: the score.
        x: points, of shape (N, *event), taken as data with noise sigma_min.
        process: the schedule and the prior.
        probes: number of Hutchinson probes per point; None for the exact divergence. At least two are needed
            to tell the probes' noise from the data's spread.
        generator: the source of the probes.
        batch_size: how many points are integrated together.
        solver_check: with how many of the first points, at most one batch, the solver's error is measured.
        solver: one of `curlfree.ode`.
        rtol: relative tolerance.
        atol: absolute tolerance.
        condition: keyword arguments for the field, tensors with one row per point.
        progress: called after every batch with the number of points done and in all.

    Returns:
        The estimate; `Likelihood.bits_per_dim` converts it.
    """

    def part(rows: slice, tolerance: float, source: torch.Generator | None) -> LogProb:
        return log_prob(
            field,
            x[rows],
            process,
            probes=probes,
            generator=source,
            solver=solver,
            rtol=tolerance * rtol,
            atol=tolerance * atol,
            condition={name: value[rows] for name, value in (condition or {}).items()},
        )

    replay = generator.clone_state() if generator else None
    draws, evaluations = [], []
    for begin in range(0, len(x), batch_size):
        found = part(slice(begin, begin + batch_size), 1.0, generator)
        draws.append(found.draws)
        evaluations.append(found.evaluations)
        if progress:
            progress(min(begin + batch_size, len(x)), len(x))
    change = None
    if solver_check:
        few = slice(min(solver_check, batch_size, len(x)))
        loose = part(few, 1.0, replay.clone_state() if replay else None).value
        change = part(few, TIGHTER, replay).value - loose
    return summarise(torch.cat(draws), torch.cat(evaluations), probes=probes, change=change)


def summarise(
    draws: Tensor, evaluations: Tensor, *, probes: int | None, change: Tensor | None = None
) -> Likelihood:
    """The mean negative log-likelihood in nats, and its errors, from log-densities point by point.

    Args:
        draws: log p by each probe, shape (N, probes), or (N, 1) with the exact divergence.
        evaluations: how many each point needed, shape (N,).
        probes: their number; None for the exact divergence.
        change: of some points' log p at `TIGHTER` times the tolerances.
    """
    n, per_point = draws.shape
    values = draws.mean(1)
    probe_se = 0.0 if probes is None else math.nan
    if per_point > 1:
        probe_se = float((draws.var(1).mean() / (per_point * n)).sqrt())
    return Likelihood(
        value=-float(values.mean()),
        se=float(values.std() / math.sqrt(n)),
        n=n,
        probe_se=probe_se,
        solver_error=math.nan if change is None else float(change.mean().abs()),
        nfe=float(evaluations.double().mean()),
    )


def dequantise(images: Tensor, generator: torch.Generator) -> Tensor:
    """Spread bytes uniformly over their cells: ``(x + u) / 256`` in [0, 1), float32.

    The authors' ``(u + 255 y) / 256`` with y = x / 255 is the same.

    Args:
        images: whole numbers from 0 to 255, type uint8.
        generator: the source of u, uniform in [0, 1).

    Raises:
        TypeError: the images are not bytes.
    """
    if images.dtype != torch.uint8:
        raise TypeError(f"dequantise needs images of type torch.uint8, got {images.dtype}")
    u = torch.rand(images.shape, generator=generator, device=generator.device)
    return ((images + u.to(images.device)) / 256).clamp(max=1 - 2**-24)


def bits_per_dim(log_p: Tensor, dim: int) -> Tensor:
    """Log-densities in nats of images in [0, 1] with D = dim numbers, as bits per dimension of the bytes."""
    return 8 - log_p / (dim * math.log(2))
