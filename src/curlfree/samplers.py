r"""Samplers: from noise to data along a field.

In the coordinates ``x = x0 + sigma z`` every process has the same reverse SDE (Eq. 7) and probability-flow
ODE, whatever its schedule; with s the field, sigma falling from sigma_max to sigma_min,

    dx = -2 sigma s dsigma + sqrt(-d sigma^2/dsigma) dw     `reverse_sde`, `predictor_corrector`
    dx =   -sigma s dsigma                                  `euler`, `heun`, `probability_flow`

`langevin` (Eq. 6) moves at one noise level. The samplers with fixed steps take decreasing noise levels; the
last, optional `denoise` step is Tweedie's ``x + sigma_min^2 s``, the mean of x0 given x.

Each returns a `Solution` with the number of evaluations of the field that really happened. The field is never
asked outside [sigma_min, sigma_max]: `Evaluator` refuses such a level (`langevin` asks at its level alone).
The state is kept in double precision, the field sees x's type.

Noise comes from `BatchNoise` or `PerSampleNoise` (see `curlfree.noise`); with the latter a sample does not
depend on the batch that it is drawn in, nor on the device but for rounding.

Song et al. 2021, arXiv:2011.13456 (reverse diffusion, predictor-corrector, probability flow); Karras et al.
2022, arXiv:2206.00364 (Heun, churn, levels); Dormand & Prince 1980 (see `curlfree.ode`).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from curlfree.checks import check_batch, check_value
from curlfree.noise import Noise
from curlfree.ode import Solver, rk45
from curlfree.operators import Condition, Field
from curlfree.processes import Process

Progress = Callable[[int, int], None]
"""Called after each step with the steps done and their total (thousandths of the time for RK45)."""

Observer = Callable[[Tensor, float | None], None]
"""Called with the state and its noise level at the start and after each step."""

_ROUNDING = 1e-9  # how far, relatively, a noise level in double precision may be out of the range by rounding


@dataclass(frozen=True, eq=False)
class Solution:
    """What a sampler returns.

    Args:
        x: the samples, of the shape and type of the starting points.
        nfe: how many times the field was called with the batch.
        evaluations: how many evaluations each sample needed, shape (B,).
    """

    x: Tensor
    nfe: int
    evaluations: Tensor


class Evaluator:
    """A field within a process' range of noise levels, with its evaluations counted and its values checked.

    Args:
        field: the field.
        x: the starting points; the field is called with their type.
        process: the process whose range is required; None for a field that is asked at one level or none.
        condition: keyword arguments for the field.
        progress: called after every step.
        total: how many steps there will be.
        observe: called with the state at the start and after every step.
    """

    def __init__(
        self,
        field: Field,
        x: Tensor,
        process: Process | None,
        condition: Condition | None,
        *,
        progress: Progress | None = None,
        total: int = 0,
        observe: Observer | None = None,
    ) -> None:
        check_batch(x, None)
        self.field, self.dtype, self.condition = field, x.dtype, condition or {}
        self.nfe = self.done = 0
        self.progress, self.total, self.observe = progress, total, observe
        self.range = process.sigma_range if process else (0.0, math.inf)
        self.low = _round(self.range[0], x.dtype, up=True)
        self.high = _round(self.range[1], x.dtype, up=False)

    def inputs(self, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """x and sigma as the field is given them: in its type, in the range; counts one evaluation.

        Raises:
            ValueError: a level is outside the range, by more than rounding.
        """
        self.nfe += 1
        low, high = self.range
        outside = (sigma < low * (1 - _ROUNDING)) | (sigma > high * (1 + _ROUNDING))
        if bool(outside.any()):
            raise ValueError(
                f"expected noise levels in the process' range [{low:.6g}, {high:.6g}], found sigma "
                f"{float(sigma[outside][0]):.6g} at evaluation {self.nfe}; keep the solver in its interval"
            )
        return x.to(self.dtype), sigma.to(x.device, self.dtype).clamp(self.low, self.high)

    @torch.no_grad()
    def __call__(self, x: Tensor, sigma: float | Tensor | None) -> Tensor:
        """The field's value at the state x, in double precision."""
        if sigma is None:
            self.nfe += 1
            value = self.field(x.to(self.dtype), None, **self.condition)
        else:
            levels = torch.as_tensor(sigma, dtype=torch.float64, device=x.device).expand(len(x))
            value = self.field(*self.inputs(x, levels), **self.condition)
        self.check(value, x, sigma)
        return value.double()

    def check(self, value: Tensor, x: Tensor, sigma: float | Tensor | None) -> None:
        """Refuse a value that is not finite or is not a vector like x.

        Raises:
            ArithmeticError: it is not finite; names the step and the noise level.
        """
        bad = ~torch.isfinite(value).flatten(1).all(1)
        if bool(bad.any()):
            level = "" if sigma is None else f", sigma {torch.as_tensor(sigma).expand(len(x))[bad].max():.6g}"
            raise ArithmeticError(
                f"the field's value is not finite for {int(bad.sum())} of {len(x)} samples at evaluation "
                f"{self.nfe}, step {self.done + 1}{level}; their largest |x| is {x[bad].abs().max():.4g}. "
                "Use smaller steps or check the field there"
            )
        check_value(value, x)

    def step(self, x: Tensor, sigma: float | None) -> None:
        """Report that the state x at noise level sigma has been reached."""
        self.done += 1
        if self.observe:
            self.observe(x, sigma)
        if self.progress:
            self.progress(self.done, self.total)

    def reach(self, fraction: float) -> None:
        """Report the share of the time that an adaptive solver has covered."""
        self.done = max(self.done, round(1000 * fraction))
        if self.progress:
            self.progress(self.done, 1000)

    def solution(self, x: Tensor) -> Solution:
        """The samples x, all of which needed every evaluation."""
        return Solution(x.to(self.dtype), self.nfe, torch.full((len(x),), self.nfe, device=x.device))


def _round(value: float, dtype: torch.dtype, *, up: bool) -> float:
    """The number of that type next to `value` that is not below (or not above) it."""
    near = torch.tensor(value, dtype=dtype)
    if (float(near) < value) if up else (float(near) > value):
        near = torch.nextafter(near, torch.tensor(math.inf if up else -math.inf, dtype=dtype))
    return float(near)


def langevin(
    field: Field,
    x: Tensor,
    step_sizes: Iterable[float],
    *,
    sigma: float | None = None,
    noise: Noise | None = None,
    condition: Condition | None = None,
    progress: Progress | None = None,
    observe: Observer | None = None,
) -> Solution:
    """Langevin dynamics at one noise level, ``x + a s + sqrt(2a) z`` (Eq. 6).

    Its stationary distribution is biased by O(a): for N(0, v) the variance is ``v / (1 - a/(2v))``.

    Args:
        field: the score.
        x: the starting points.
        step_sizes: the step size a of every step.
        sigma: the noise level that the field is asked at, and no other; None for a field without levels.
        noise: the source of z; None for the deterministic variant ``x + a s`` of Section 3.1.
        condition: keyword arguments for the field.
        progress: called after every step.
        observe: called with the state at the start and after every step.

    Returns:
        The last state; one evaluation per step.
    """
    sizes = list(step_sizes)
    run = Evaluator(field, x, None, condition, progress=progress, total=len(sizes), observe=observe)
    x = x.double()
    if observe:
        observe(x, sigma)
    for a in sizes:
        x = x + a * run(x, sigma)
        if noise:
            x = x + math.sqrt(2 * a) * noise(x)
        run.step(x, sigma)
    return run.solution(x)


def reverse_sde(
    field: Field,
    x: Tensor,
    process: Process,
    *,
    noise: Noise,
    steps: int = 1000,
    levels: Tensor | None = None,
    denoise: bool = True,
    condition: Condition | None = None,
    progress: Progress | None = None,
    observe: Observer | None = None,
) -> Solution:
    """The reverse-time SDE (Eq. 7) by Euler and Maruyama's method in the variance sigma^2.

    From one level to the next, ``x + (sigma_i^2 - sigma_{i+1}^2) s + sqrt(sigma_i^2 - sigma_{i+1}^2) z``:
    the reverse diffusion of Song et al. 2021, Appendix E; weak order 1.

    Args: as for `predictor_corrector`.

    Returns:
        The samples; one evaluation per level (one less without `denoise`).
    """
    return predictor_corrector(
        field,
        x,
        process,
        noise=noise,
        steps=steps,
        levels=levels,
        corrector_steps=0,
        denoise=denoise,
        condition=condition,
        progress=progress,
        observe=observe,
    )


def predictor_corrector(
    field: Field,
    x: Tensor,
    process: Process,
    *,
    noise: Noise,
    steps: int = 1000,
    levels: Tensor | None = None,
    corrector_steps: int = 1,
    snr: float = 0.16,
    batch_norms: bool = False,
    denoise: bool = True,
    condition: Condition | None = None,
    progress: Progress | None = None,
    observe: Observer | None = None,
) -> Solution:
    """Reverse diffusion, each step preceded by Langevin steps at its level (Song et al. 2021, Alg. 2 and 4).

    The Langevin step is ``x + a s + sqrt(2a) z`` with ``a = 2 (snr r)^2``. In the authors' code r is the
    ratio of ``||z||`` and ``||s||``, each averaged over the batch, which ties its samples together
    (`batch_norms`); here it is what that ratio is for noise alone, s = -z/sigma: r = sigma. (The ratio of
    each sample by itself lets a sample leave wherever its score vanishes, and in few dimensions does.)

    Args:
        field: the score.
        x: draws from the prior at sigma_max.
        process: gives the range of noise levels and their spacing.
        noise: the source of z.
        steps: how many levels.
        levels: the levels themselves, decreasing, in place of ``process.levels(steps)``.
        corrector_steps: Langevin steps at each level, before the step to the next one.
        snr: the signal-to-noise ratio of the Langevin steps.
        batch_norms: take the ratio of norms averaged over the batch.
        denoise: end with Tweedie's step at the last level, in place of nothing.
        condition: keyword arguments for the field.
        progress: called after every level.
        observe: called with the state at the start and after every level.

    Returns:
        The samples; ``1 + corrector_steps`` evaluations per level, so 2,000 at the authors' 1,000 levels.
    """
    sigmas = _levels(process, process.levels(steps) if levels is None else levels)
    run = Evaluator(field, x, process, condition, progress=progress, total=len(sigmas), observe=observe)
    x = x.double()
    if observe:
        observe(x, sigmas[0])
    for sigma, following in zip(sigmas, [*sigmas[1:], None], strict=True):
        for _ in range(corrector_steps):
            s, z = run(x, sigma), noise(x)
            ratio = _norm(z) / _norm(s) if batch_norms else sigma
            a = 2 * (snr * ratio) ** 2
            x = x + a * s + math.sqrt(2 * a) * z
        if following is not None:
            variance = sigma**2 - following**2
            x = x + variance * run(x, sigma) + math.sqrt(variance) * noise(x)
        elif denoise:
            x = x + sigma**2 * run(x, sigma)
        run.step(x, following or (0.0 if denoise else sigma))
    return run.solution(x)


def _norm(v: Tensor) -> float:
    """The mean over the batch of the samples' norms."""
    return float(v.flatten(1).norm(dim=1).mean())


def edm_levels(process: Process, steps: int, rho: float = 7.0) -> Tensor:
    """Noise levels with equally spaced roots of degree rho (Karras et al. 2022, Eq. 5), shape (steps,)."""
    low, high = (sigma ** (1 / rho) for sigma in process.sigma_range)
    return torch.linspace(high, low, steps, dtype=torch.float64) ** rho


def heun(
    field: Field,
    x: Tensor,
    process: Process,
    *,
    steps: int = 18,
    levels: Tensor | None = None,
    churn: float = 0.0,
    churn_range: tuple[float, float] = (0.0, math.inf),
    churn_noise: float = 1.0,
    noise: Noise | None = None,
    denoise: bool = True,
    condition: Condition | None = None,
    progress: Progress | None = None,
    observe: Observer | None = None,
) -> Solution:
    """Heun's method of order 2 for the probability-flow ODE (Karras et al. 2022, Algorithms 1 and 2).

    Args:
        field: the score.
        x: draws from the prior at sigma_max.
        process: gives the range of noise levels.
        steps: how many levels, by `edm_levels`.
        levels: the levels themselves, decreasing, in place of these.
        churn: S_churn, how much fresh noise is added before the steps in all; 0 is deterministic.
        churn_range: S_min and S_max, the levels at which it is.
        churn_noise: S_noise, its standard deviation.
        noise: the source of the churn's noise.
        denoise: end with Tweedie's step at the last level.
        condition: keyword arguments for the field.
        progress: called after every step.
        observe: called with the state at the start and after every step.

    Returns:
        The samples; ``2 steps - 1`` evaluations.

    Raises:
        ValueError: churn without a source of noise.
    """
    if churn and noise is None:
        raise ValueError(f"churn={churn:g} needs a source of noise, for example noise=BatchNoise(generator)")
    sigmas = _levels(process, edm_levels(process, steps) if levels is None else levels)
    run = Evaluator(field, x, process, condition, progress=progress, total=len(sigmas) - 1, observe=observe)
    x = x.double()
    if observe:
        observe(x, sigmas[0])
    gamma = min(churn / len(sigmas), math.sqrt(2) - 1)
    for sigma, following in pairwise(sigmas):
        if noise and gamma and churn_range[0] <= sigma <= churn_range[1]:
            raised = min(sigma * (1 + gamma), sigmas[0])
            x = x + churn_noise * math.sqrt(raised**2 - sigma**2) * noise(x)
            sigma = raised
        slope = -sigma * run(x, sigma)
        ahead = x + (following - sigma) * slope
        x = x + (following - sigma) * (slope - following * run(ahead, following)) / 2
        run.step(x, following)
    return run.solution(_denoised(run, x, sigmas[-1]) if denoise else x)


def euler(
    field: Field,
    x: Tensor,
    process: Process,
    *,
    steps: int = 100,
    levels: Tensor | None = None,
    denoise: bool = True,
    condition: Condition | None = None,
    progress: Progress | None = None,
    observe: Observer | None = None,
) -> Solution:
    """Euler's method of order 1 for the probability-flow ODE, which is DDIM (Song et al. 2021b, 2010.02502).

    Args: as for `heun`.

    Returns:
        The samples; one evaluation per level (one less without `denoise`).
    """
    sigmas = _levels(process, edm_levels(process, steps) if levels is None else levels)
    run = Evaluator(field, x, process, condition, progress=progress, total=len(sigmas) - 1, observe=observe)
    x = x.double()
    if observe:
        observe(x, sigmas[0])
    for sigma, following in pairwise(sigmas):
        x = x - (following - sigma) * sigma * run(x, sigma)
        run.step(x, following)
    return run.solution(_denoised(run, x, sigmas[-1]) if denoise else x)


def probability_flow(
    field: Field,
    x: Tensor,
    process: Process,
    *,
    solver: Solver = rk45,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    denoise: bool = False,
    condition: Condition | None = None,
    progress: Progress | None = None,
) -> Solution:
    """The probability-flow ODE ``dx/dt = -sigma sigma' s`` by RK45 in the process' time, t_max to t_min.

    Args:
        field: the score.
        x: draws from the prior at sigma_max.
        process: the schedule; the authors' runs end at ``t_min=1e-5``.
        solver: `curlfree.ode.rk45` (on the device, SciPy's steps), or another solver of that module.
        rtol: tolerance relative to the size of each component.
        atol: absolute tolerance.
        denoise: end with Tweedie's step.
        condition: keyword arguments for the field.
        progress: called after every evaluation with the thousandths of the time covered.

    Returns:
        The samples.
    """
    run = Evaluator(field, x, process, condition, progress=progress)
    shape, span = x.shape, process.t_max - process.t_min

    def drift(t: Tensor, y: Tensor) -> Tensor:
        sigma = process.sigma(t)
        s = run(y.view(shape), sigma).flatten(1)
        run.reach((process.t_max - float(t.max())) / span)
        return -(sigma * process.sigma_prime(t))[:, None] * s

    start = x.flatten(1).double()
    y, evaluations = solver(drift, start, process.t_max, process.t_min, rtol, atol)
    y = y.view(shape)
    if denoise:
        y = _denoised(run, y, process.sigma_range[0])
        evaluations = evaluations + 1
    return Solution(y.to(x.dtype), run.nfe, evaluations)


def _denoised(run: Evaluator, x: Tensor, sigma: float) -> Tensor:
    """Tweedie's step, the mean of x0 given x."""
    return x + sigma**2 * run(x, sigma)


def _levels(process: Process, levels: Tensor) -> list[float]:
    found = levels.double()
    low, high = process.sigma_range
    if len(found) < 2 or bool((found.diff() >= 0).any()):
        raise ValueError(
            f"a sampler needs at least 2 noise levels, strictly decreasing, got {found.tolist()[:5]}"
        )
    if float(found[0]) > high * (1 + 1e-9) or float(found[-1]) < low * (1 - 1e-9):
        raise ValueError(
            f"levels must be in the process' range [{low:g}, {high:g}], "
            f"got [{float(found[-1]):g}, {float(found[0]):g}]"
        )
    return found.tolist()
