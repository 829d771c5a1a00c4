r"""Ordinary differential equations ``dy/dt = drift(t, y)`` by Dormand and Prince's pair of orders 5 and 4.

Solvers with one signature, `Solver`:

    rk45_per_sample   every sample has its own step size, so that its result does not depend on the others
    rk45              one step size for the batch, as SciPy and the paper have it: the batch as one sample
    rk45_groups(n)    one step size for each of n equal parts of the batch, which are then runs of their own
    rk45_torchdiffeq  torchdiffeq's dopri5, one step size for the batch
    rk45_scipy        SciPy on the host, the authors' solver, for parity

All but the last run on y's device. All keep the state in double precision, whatever the precision of the
network inside the drift: rounding would otherwise be taken for an error of the step. All accept a step when
the root mean square of ``error / (atol + rtol |y|)`` is below 1, evaluate only within the interval, and reuse
the last stage. Step control and starting step of all are SciPy's, so that the numbers of evaluations, a
result in this field, are those of published runs. torchdiffeq's own differ: its error estimate, Shampine's,
is 2/3 of SciPy's, and it never shortens a step after an accepted one nor holds it after a rejected one;
`_SciPyControl` gives it SciPy's through its options. It cannot control single samples.

Dormand & Prince 1980, J. Comp. Appl. Math. 6; Hairer, Norsett & Wanner 1993, Sections II.4 and II.5.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Drift = Callable[[Tensor, Tensor], Tensor]
"""``drift(t, y)``: the derivative of y, of shape (B, D), at times t, of shape (B,), all float64."""

Solver = Callable[[Drift, Tensor, float, float, float, float], tuple[Tensor, Tensor]]
"""``solver(drift, y, start, end, rtol, atol)``: the state at `end`, and each sample's evaluations, (B,)."""

_NODES = (0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0)
_STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
)
_SOLUTION = (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


def rk45_per_sample(
    drift: Drift, y: Tensor, start: float, end: float, rtol: float, atol: float
) -> tuple[Tensor, Tensor]:
    """Solve with one step size for each sample.

    The drift is always called with the whole batch: samples that have arrived wait at `end`. So the calls
    are those of the slowest sample, and the numbers returned are what each would have needed alone.

    Args:
        drift: the derivative.
        y: the state at `start`, shape (B, D).
        start: the time to start from.
        end: the time to stop at, before or after `start`.
        rtol: tolerance relative to the size of each component.
        atol: absolute tolerance.

    Returns:
        The state at `end` in double precision, and the number of evaluations of each sample.

    Raises:
        ArithmeticError: a sample's step became too small to advance its time.
    """
    y = y.double()
    sign = math.copysign(1.0, end - start)
    t = y.new_full((len(y),), start)
    k = drift(t, y)
    step = _first_step(drift, t, y, k, end, rtol, atol)
    evaluations = torch.full((len(y),), 2, device=y.device)
    rejected = torch.zeros(len(y), dtype=torch.bool, device=y.device)
    while bool((active := t != end).any()):
        least = 10 * (torch.nextafter(t, t + sign) - t).abs()
        if bool((active & rejected & (step < least)).any()):
            raise ArithmeticError(_too_small(rtol, atol))
        step = torch.where(rejected, step, step.maximum(least))
        t_new = torch.where(sign * (t + sign * step - end) > 0, end, t + sign * step)
        h = (t_new - t)[:, None]
        y_new, k_new, error = _stages(drift, t, y, k, h)
        evaluations += 6 * active
        ratio = _rms(error / (atol + rtol * y.abs().maximum(y_new.abs())))
        accepted = active & (ratio < 1)
        growth = 0.9 * ratio.clamp(min=1e-30) ** -0.2
        growth = torch.where(
            accepted, growth.clamp(max=10).minimum(torch.where(rejected, 1.0, 10.0)), growth.clamp(min=0.2)
        )
        step = torch.where(active, h[:, 0].abs() * growth, step)
        t = torch.where(accepted, t_new, t)
        y = torch.where(accepted[:, None], y_new, y)
        k = torch.where(accepted[:, None], k_new, k)
        rejected = active & ~accepted
    return y, evaluations


def rk45_groups(groups: int) -> Solver:
    """The solver with one step size for each of so many equal consecutive parts of the batch."""

    def solve(
        drift: Drift, y: Tensor, start: float, end: float, rtol: float, atol: float
    ) -> tuple[Tensor, Tensor]:
        if len(y) % groups:
            raise ValueError(f"{groups} groups need a batch of as many equal parts, got {len(y)} samples")
        size = len(y) // groups

        def joined(t: Tensor, state: Tensor) -> Tensor:
            return drift(t.repeat_interleave(size), state.view(y.shape)).reshape(groups, -1)

        state, evaluations = rk45_per_sample(joined, y.reshape(groups, -1), start, end, rtol, atol)
        return state.view(y.shape), evaluations.repeat_interleave(size)

    return solve


def rk45(
    drift: Drift, y: Tensor, start: float, end: float, rtol: float, atol: float
) -> tuple[Tensor, Tensor]:
    """Solve with one step size for the batch; arguments as for `rk45_per_sample`.

    Returns:
        The state at `end` in double precision, and the number of evaluations, the same for all samples.

    Raises:
        ArithmeticError: the step became too small to advance the time.
    """
    return rk45_groups(1)(drift, y, start, end, rtol, atol)


def rk45_torchdiffeq(
    drift: Drift, y: Tensor, start: float, end: float, rtol: float, atol: float
) -> tuple[Tensor, Tensor]:
    """Solve with torchdiffeq's dopri5 on y's device; arguments as for `rk45_per_sample`.

    Returns:
        The state at `end` in double precision, and the number of evaluations, the same for all samples.

    Raises:
        ArithmeticError: the step became too small to advance the time.
    """
    from torchdiffeq import odeint

    times = torch.tensor([start, end], dtype=torch.float64, device=y.device)
    control = _SciPyControl(drift, times)
    try:
        states = odeint(
            control,
            y.double(),
            times,
            method="dopri5",
            rtol=rtol,
            atol=atol,
            # step_t: the last step ends at the end, not beyond it
            options={"step_t": times[1:], "norm": control.norm, "max_step": control.longest},
        )
    except AssertionError as error:  # "underflow in dt"
        raise ArithmeticError(_too_small(rtol, atol)) from error
    return states[-1], torch.full((len(y),), control.calls, device=y.device)


class _SciPyControl:
    """A drift for torchdiffeq, and through its callbacks, norm and largest step SciPy's control of steps.

    torchdiffeq keeps the tensor `longest` that it is given: what a callback writes there limits the step.
    """

    def __init__(self, drift: Drift, times: Tensor) -> None:
        self.drift, self.first, self.last = drift, times.min(), times.max()
        self.calls, self.stepping, self.rejected = 0, False, False
        self.longest, self.ratio = times.new_tensor(math.inf), times.new_tensor(0.0)

    def __call__(self, t: Tensor, state: Tensor) -> Tensor:
        self.calls += 1
        if not self.stepping:  # the trial that finds the first step may reach beyond the interval
            t = t.clamp(self.first, self.last)
        return self.drift(t.expand(len(state)), state)

    def norm(self, v: Tensor) -> Tensor:
        """The root mean square; of an error, as SciPy estimates it: 3/2 of Shampine's."""
        size = v.square().mean().sqrt()
        self.ratio = 1.5 * size
        return self.ratio if self.stepping else size

    def callback_step(self, t: Tensor, y: Tensor, dt: Tensor) -> None:
        """A step begins."""
        self.stepping = True

    def callback_accept_step(self, t: Tensor, y: Tensor, dt: Tensor) -> None:
        """It was accepted: the next one may be shorter, and after a rejected one not longer."""
        growth = (0.9 * self.ratio.clamp(min=1e-30) ** -0.2).clamp(max=1.0 if self.rejected else 10.0)
        self.longest.copy_(dt * growth)
        self.rejected = False

    def callback_reject_step(self, t: Tensor, y: Tensor, dt: Tensor) -> None:
        """It was rejected: torchdiffeq shortens it as SciPy does."""
        self.rejected = True


def rk45_scipy(
    drift: Drift, y: Tensor, start: float, end: float, rtol: float, atol: float
) -> tuple[Tensor, Tensor]:
    """Solve with SciPy's RK45 on the host, as the authors' code does; arguments as for `rk45_per_sample`.

    Returns:
        The state at `end` in double precision, and the number of evaluations, the same for all samples.

    Raises:
        ArithmeticError: the step became too small to advance the time.
    """
    from scipy.integrate import solve_ivp

    def function(t: float, state: np.ndarray) -> np.ndarray:
        at = torch.from_numpy(state.reshape(y.shape)).to(y.device)
        return drift(at.new_full((len(at),), t), at).cpu().numpy().ravel()

    begin = y.double().cpu().numpy().ravel()
    found = solve_ivp(function, (start, end), begin, method="RK45", rtol=rtol, atol=atol)
    if not found.success:
        raise ArithmeticError(_too_small(rtol, atol))
    state = torch.from_numpy(found.y[:, -1].reshape(y.shape)).to(y.device)
    return state, torch.full((len(y),), found.nfev, device=y.device)


def _stages(drift: Drift, t: Tensor, y: Tensor, first: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of length h, shape (B, 1): the new state, its derivative and the estimated error."""
    k = [first]
    for node, row in zip(_NODES[1:], _STAGES, strict=True):
        k.append(drift(t + node * h[:, 0], y + h * _combine(row, k)))
    y_new = y + h * _combine(_SOLUTION, k)
    k.append(drift(t + h[:, 0], y_new))
    return y_new, k[-1], h * _combine(_ERROR, k)


def _combine(coefficients: tuple[float, ...], k: list[Tensor]) -> Tensor:
    total = coefficients[0] * k[0]
    for c, stage in zip(coefficients[1:], k[1:], strict=True):
        total = torch.add(total, stage, alpha=c)
    return total


def _first_step(
    drift: Drift, t: Tensor, y: Tensor, k: Tensor, end: float, rtol: float, atol: float
) -> Tensor:
    """Hairer, Norsett and Wanner's starting step, for each sample; one evaluation."""
    length = (end - t).abs()
    scale = atol + rtol * y.abs()
    d0, d1 = _rms(y / scale), _rms(k / scale)
    h0 = torch.where((d0 < 1e-5) | (d1 < 1e-5), 1e-6, 0.01 * d0 / d1).minimum(length)
    signed = h0 * torch.sign(end - t)
    slope = drift(t + signed, y + signed[:, None] * k)
    d2 = _rms((slope - k) / scale) / h0
    still = (d1 <= 1e-15) & (d2 <= 1e-15)
    h1 = torch.where(still, (1e-3 * h0).clamp(min=1e-6), (0.01 / d1.maximum(d2)) ** 0.2)
    return (100 * h0).minimum(h1).minimum(length)


def _rms(v: Tensor) -> Tensor:
    return v.square().mean(1).sqrt()


def _too_small(rtol: float, atol: float) -> str:
    return (
        f"RK45's step became too small to advance: the field changes too abruptly for rtol={rtol:g}, "
        f"atol={atol:g}; loosen them, raise t_min, or use a fixed-step sampler"
    )
