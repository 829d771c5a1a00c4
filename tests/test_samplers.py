"""Samplers: orders against exact solutions of a Gaussian, parity with SciPy, counts, ranges, noise."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from curlfree.distributions import eight_gaussians
from curlfree.likelihood import log_prob
from curlfree.noise import BatchNoise, PerSampleNoise
from curlfree.ode import (
    _ERROR,
    _NODES,
    _SOLUTION,
    _STAGES,
    rk45,
    rk45_groups,
    rk45_per_sample,
    rk45_scipy,
    rk45_torchdiffeq,
)
from curlfree.processes import VE, VP, Linear, Process
from curlfree.samplers import (
    Solution,
    edm_levels,
    euler,
    heun,
    langevin,
    predictor_corrector,
    probability_flow,
    reverse_sde,
)

STD = 0.7
PROCESS = VE(0.05, 5.0)


def gaussian(x: Tensor, sigma: Tensor | None) -> Tensor:
    """The score of data N(0, STD^2 I)."""
    return -x / (STD**2 + sigma**2).view(-1, *(1 for _ in x.shape[1:]))


def exact_flow(process: VE = PROCESS) -> float:
    """The probability flow of a Gaussian keeps x / sqrt(STD^2 + sigma^2)."""
    low, high = process.sigma_range
    return math.sqrt((STD**2 + low**2) / (STD**2 + high**2))


class Recorder:
    """A field that remembers what it was asked."""

    def __init__(self, field: Callable[..., Tensor] = gaussian) -> None:
        self.field, self.calls, self.low, self.high = field, 0, math.inf, 0.0

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        assert sigma.shape == x.shape[:1]
        assert sigma.dtype == x.dtype
        self.calls += 1
        self.low = min(self.low, float(sigma.double().min()))
        self.high = max(self.high, float(sigma.double().max()))
        return self.field(x, sigma)


def order(errors: list[float]) -> float:
    """The slope between the two finest of errors with doubling numbers of steps."""
    return math.log2(abs(errors[-2] / errors[-1]))


def ones() -> Tensor:
    return torch.ones(1, 1, dtype=torch.float64)


class UnitImpulses:
    """Noise that is 1 for sample b in draw number b and else 0: a linear sampler answers its coefficients."""

    def __init__(self) -> None:
        self.draw = 0

    def __call__(self, like: Tensor) -> Tensor:
        z = torch.zeros_like(like)
        z[self.draw] = 1
        self.draw += 1
        return z


def exact_variance(sample: Callable[[Tensor, UnitImpulses], Solution], draws: int, prior: float) -> float:
    """The variance of a linear sampler's output from prior variance `prior`, without Monte Carlo."""
    start = torch.zeros(draws + 1, 1, dtype=torch.float64)
    start[-1] = math.sqrt(prior)
    return float(sample(start, UnitImpulses()).x.square().sum())


# ---------------------------------------------------------------- orders


def test_euler_has_order_one_and_heun_two() -> None:
    found = {
        method: [
            float(method(gaussian, ones(), PROCESS, steps=n + 1, denoise=False).x) - exact_flow()
            for n in (64, 128, 256)
        ]
        for method in (euler, heun)
    }
    assert abs(order(found[euler]) - 1) < 0.05
    assert abs(order(found[heun]) - 2) < 0.05


def test_reverse_sde_has_weak_order_one() -> None:
    """The exact variance at the end is STD^2 + sigma_min^2 when the prior's is STD^2 + sigma_max^2."""
    low, high = PROCESS.sigma_range
    errors = []
    for n in (64, 128, 256):
        variance = exact_variance(
            lambda x, z, n=n: reverse_sde(gaussian, x, PROCESS, noise=z, steps=n + 1, denoise=False),
            n,
            STD**2 + high**2,
        )
        errors.append(variance - STD**2 - low**2)
    assert abs(order(errors) - 1) < 0.1
    assert abs(errors[-1]) < 0.05


def test_reverse_sde_follows_the_variance_recursion() -> None:
    levels = PROCESS.levels(40)
    variance = 3.0
    for a, b in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        step = a**2 - b**2
        variance = (1 - step / (STD**2 + a**2)) ** 2 * variance + step
    found = exact_variance(
        lambda x, z: reverse_sde(gaussian, x, PROCESS, noise=z, levels=levels, denoise=False), 39, 3.0
    )
    assert abs(found - variance) < 1e-12
    last = float(levels[-1])
    tweedie = (STD**2 / (STD**2 + last**2)) ** 2
    found = exact_variance(lambda x, z: reverse_sde(gaussian, x, PROCESS, noise=z, levels=levels), 39, 3.0)
    assert abs(found - tweedie * variance) < 1e-12


def test_heun_with_churn_has_the_right_variance_in_the_limit() -> None:
    errors = []
    for n in (100, 200, 400):
        variance = exact_variance(
            lambda x, z, n=n: heun(gaussian, x, PROCESS, steps=n + 1, churn=10.0, noise=z, denoise=False),
            n,
            STD**2 + PROCESS.sigma_max**2,
        )
        errors.append(variance - STD**2 - PROCESS.sigma_min**2)
    assert abs(errors[-1]) < abs(errors[-2]) < abs(errors[0]) < 0.1
    assert order(errors) > 0.9


@pytest.mark.parametrize("corrector_steps", [1, 2])
def test_predictor_corrector_has_weak_order_one(corrector_steps: int) -> None:
    """To the exact variance if the Langevin steps shrink with the predictor's, snr^2 as 1/n."""
    process = VE(0.5, 5.0)
    errors = []
    for n in (64, 128, 256):
        variance = exact_variance(
            lambda x, z, n=n: predictor_corrector(
                gaussian, x, process, noise=z, steps=n + 1, corrector_steps=corrector_steps,
                snr=2 / math.sqrt(n), denoise=False,
            ),
            corrector_steps * (n + 1) + n,
            STD**2 + process.sigma_max**2,
        )  # fmt: skip
        errors.append(variance - STD**2 - process.sigma_min**2)
    assert abs(order(errors) - 1) < 0.05
    assert abs(errors[-1]) < 0.02


def test_predictor_corrector_approaches_the_bias_of_its_corrector() -> None:
    """At a fixed snr many Langevin steps at each level leave their own stationary variance, at order one."""
    process, snr = VE(0.5, 5.0), 0.5
    v, a = STD**2 + process.sigma_min**2, 2 * (snr * process.sigma_min) ** 2
    errors = []
    for n in (64, 128, 256):
        variance = exact_variance(
            lambda x, z, n=n: predictor_corrector(
                gaussian, x, process, noise=z, steps=n + 1, snr=snr, denoise=False
            ),
            2 * n + 1,
            STD**2 + process.sigma_max**2,
        )
        errors.append(variance - v / (1 - a / (2 * v)))
    assert abs(order(errors) - 1) < 0.05
    assert abs(errors[-1]) < 0.02


def test_langevin_has_weak_order_one_and_without_noise_order_one() -> None:
    """At a finite time the variance is that of an Ornstein-Uhlenbeck process, the mean an exponential."""
    v, start, until = STD**2 + 0.25, 3.0, 1.0
    variances, means = [], []
    for n in (64, 128, 256):
        sizes = [until / n] * n
        variance = exact_variance(
            lambda x, z, sizes=sizes: langevin(gaussian, x, sizes, sigma=0.5, noise=z), n, start
        )
        variances.append(variance - (v + (start - v) * math.exp(-2 * until / v)))
        means.append(float(langevin(gaussian, ones(), sizes, sigma=0.5).x) - math.exp(-until / v))
    assert abs(order(variances) - 1) < 0.05
    assert abs(order(means) - 1) < 0.05


def test_langevin_stationary_variance_is_biased_by_order_one() -> None:
    v = STD**2 + 0.25
    for a in (0.1, 0.05):
        n = 300
        variance = exact_variance(
            lambda x, z, a=a, n=n: langevin(gaussian, x, [a] * n, sigma=0.5, noise=z), n, 1.0
        )
        assert abs(variance - v / (1 - a / (2 * v))) < 1e-10


def test_deterministic_langevin_is_gradient_ascent() -> None:
    sizes = [0.1 * math.exp(-i / 10) for i in range(20)]
    found = langevin(lambda x, sigma: -x, ones(), sizes)
    assert abs(float(found.x) - math.prod(1 - a for a in sizes)) < 1e-14
    assert found.nfe == 20


ADAPTIVE = [rk45, rk45_scipy, rk45_per_sample, rk45_torchdiffeq]


@pytest.mark.parametrize("solver", ADAPTIVE)
def test_rk45_error_follows_the_tolerance_and_has_order_five(solver: Callable) -> None:
    def solve(tolerance: float) -> Solution:
        return probability_flow(gaussian, ones(), PROCESS, solver=solver, rtol=tolerance, atol=tolerance)

    errors = [abs(float(solve(tolerance).x) - exact_flow()) for tolerance in (1e-4, 1e-6, 1e-8)]
    assert all(e < 30 * tolerance for e, tolerance in zip(errors, (1e-4, 1e-6, 1e-8), strict=True))
    assert errors[-1] < 1e-8
    assert 0.8 < math.log10(solve(1e-11).nfe / solve(1e-6).nfe) < 1.2  # steps grow as tolerance^(-1/5)


@pytest.mark.parametrize("solver", ADAPTIVE)
def test_one_step_of_rk45_has_order_five(solver: Callable) -> None:
    """With a tolerance so loose that one step covers the interval, its error falls as h^6."""
    errors = []
    for h in (0.4, 0.2, 0.1):
        y, calls = solver(lambda t, y: -y, ones(), 0.0, h, 1e3, 1e3)
        assert calls.tolist() == [8]
        errors.append(float(y) - math.exp(-h))
    assert abs(order(errors) - 6) < 0.2


def test_tableau_is_that_of_dormand_and_prince() -> None:
    method = integrate.RK45
    assert np.allclose(_NODES, method.C, atol=1e-15)
    assert np.allclose(_SOLUTION, method.B, atol=1e-15)
    assert np.allclose(np.abs(_ERROR), np.abs(method.E), atol=1e-15)
    for row, stages in zip(method.A[1:], _STAGES, strict=True):
        assert np.allclose(row[: len(stages)], stages, atol=1e-15)


@pytest.mark.parametrize("solver", ADAPTIVE)
def test_solvers_reach_machine_precision_on_a_polynomial_of_degree_four(solver: Callable) -> None:
    """A method of order five integrates t^4 exactly."""
    y, _ = solver(lambda t, y: 5 * (t**4)[:, None] + 0 * y, torch.zeros(2, 3), 2.0, 0.5, 1e-6, 1e-6)
    assert (y - (0.5**5 - 2.0**5)).abs().max() < 1e-12


# ---------------------------------------------------------------- parity with SciPy


@pytest.mark.parametrize("solver", [rk45, rk45_torchdiffeq])
@pytest.mark.parametrize("process", [VE(0.1, 3.0), VE(0.01, 50.0, t_min=1e-5), VP(), Linear(t_max=0.98)])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-5, 1e-7])
def test_rk45_agrees_with_scipy(solver: Callable, process: Process, tolerance: float) -> None:
    """Evaluations and samples, whatever the tolerance: the same steps are taken, rejected ones included."""
    data = eight_gaussians()
    x = process.prior_sample((50, 2), torch.Generator().manual_seed(0), torch.float64)
    ours, theirs = (
        probability_flow(data.score, x, process, rtol=tolerance, atol=tolerance, solver=s)
        for s in (solver, rk45_scipy)
    )
    assert (ours.x - theirs.x).abs().max() < 1e-9
    assert ours.nfe == theirs.nfe


@pytest.mark.parametrize("solver", [rk45, rk45_torchdiffeq])
@pytest.mark.parametrize(("start", "end"), [(0.0, 2.0), (2.0, 0.0)])
def test_rk45_takes_scipys_steps_where_many_are_rejected(solver: Callable, start: float, end: float) -> None:
    """A spring towards a wave of steep edges, forwards and backwards in time."""
    rate = math.copysign(5.0, end - start)

    def drift(t: Tensor, y: Tensor) -> Tensor:
        return rate * ((5 * (8 * t).sin()).tanh()[:, None] - y)

    y, calls = solver(drift, ones(), start, end, 1e-3, 1e-3)
    expected, theirs = rk45_scipy(drift, ones(), start, end, 1e-3, 1e-3)
    assert calls.tolist() == theirs.tolist()
    assert (y - expected).abs().max() < 1e-9


def test_rk45_agrees_with_scipy_for_a_single_precision_network() -> None:
    data, process = eight_gaussians(), VE(0.1, 3.0)
    x = process.prior_sample((200, 2), torch.Generator().manual_seed(0))
    ours = probability_flow(data.score, x, process, rtol=1e-5, atol=1e-5)
    theirs = probability_flow(data.score, x, process, rtol=1e-5, atol=1e-5, solver=rk45_scipy)
    assert ours.x.dtype == torch.float32
    assert (ours.x - theirs.x).abs().max() < 1e-3
    assert abs(ours.nfe / theirs.nfe - 1) < 0.05


def test_per_sample_control_is_scipy_run_on_each_sample_alone() -> None:
    data, process = eight_gaussians(), VE(0.1, 30.0)
    x = process.prior_sample((6, 2), torch.Generator().manual_seed(1), torch.float64)
    ours = probability_flow(data.score, x, process, solver=rk45_per_sample, rtol=1e-5, atol=1e-6)
    for i in range(6):
        alone = probability_flow(data.score, x[i : i + 1], process, solver=rk45_scipy, rtol=1e-5, atol=1e-6)
        assert (ours.x[i] - alone.x[0]).abs().max() < 1e-8
        assert int(ours.evaluations[i]) == alone.nfe
    assert len(set(ours.evaluations.tolist())) > 1
    assert ours.nfe == int(ours.evaluations.max())


def test_each_group_is_solved_as_a_batch_of_its_own() -> None:
    process, data = VE(0.05, 5.0), eight_gaussians()
    start = process.prior_sample((12, 2), torch.Generator().manual_seed(3)).double()

    def drift(t: Tensor, y: Tensor) -> Tensor:
        sigma = process.sigma(t)
        return -(sigma[:, None] ** 2) * data.score(y, sigma)

    y, evaluations = rk45_groups(3)(drift, start, 1.0, 0.1, 1e-6, 1e-8)
    for i in range(3):
        alone, count = rk45(drift, start[4 * i : 4 * i + 4], 1.0, 0.1, 1e-6, 1e-8)
        torch.testing.assert_close(y[4 * i : 4 * i + 4], alone, rtol=1e-12, atol=1e-12)
        assert torch.equal(evaluations[4 * i : 4 * i + 4], count)
    assert len(evaluations.unique()) > 1
    with pytest.raises(ValueError, match="5 groups need a batch of as many equal parts, got 12"):
        rk45_groups(5)(drift, start, 1.0, 0.1, 1e-6, 1e-8)


def test_per_sample_control_does_not_depend_on_the_batch() -> None:
    data, process = eight_gaussians(), VE(0.1, 3.0)
    x = process.prior_sample((8, 2), torch.Generator().manual_seed(1))
    together = probability_flow(data.score, x, process, solver=rk45_per_sample)
    order = torch.tensor([5, 0, 7])
    some = probability_flow(data.score, x[order], process, solver=rk45_per_sample)
    torch.testing.assert_close(some.x, together.x[order], rtol=0, atol=1e-6)
    assert torch.equal(some.evaluations, together.evaluations[order])


# ---------------------------------------------------------------- counts, ranges, errors


def noiseless_euler(field, x, process, *, noise, **options) -> Solution:
    return euler(field, x, process, **options)


FIXED = {  # and how many evaluations 20 levels need
    "reverse_sde": (reverse_sde, 20),
    "predictor_corrector": (predictor_corrector, 40),
    "two correctors": (partial(predictor_corrector, corrector_steps=2), 60),
    "euler": (noiseless_euler, 20),
    "heun": (heun, 39),
    "heun with churn": (partial(heun, churn=8.0), 39),
}


@pytest.mark.parametrize(("sampler", "calls"), FIXED.values(), ids=FIXED.keys())
@pytest.mark.parametrize("process", [VE(0.01, 50.0), VE(0.1, 3.0), VP(), Linear()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_evaluations_are_counted_and_stay_in_range(sampler, calls, process, dtype) -> None:
    noise = BatchNoise(torch.Generator().manual_seed(0))
    x = process.prior_std * noise(torch.zeros(4, 3, dtype=dtype))
    field = Recorder()
    found = sampler(field, x, process, noise=noise, steps=20)
    assert found.nfe == field.calls == calls
    assert found.evaluations.tolist() == [calls] * 4
    assert process.sigma_range[0] <= field.low <= field.high <= process.sigma_range[1]
    assert found.x.dtype == dtype
    found = sampler(field, x, process, noise=noise, steps=20, denoise=False)
    assert found.nfe == calls - 1


def test_langevin_evaluates_once_a_step_at_its_level_alone() -> None:
    field, noise = Recorder(), BatchNoise(torch.Generator().manual_seed(0))
    found = langevin(field, torch.ones(3, 2), [0.1, 0.05, 0.02], sigma=0.5, noise=noise)
    assert found.nfe == field.calls == 3
    assert found.evaluations.tolist() == [3] * 3
    assert field.low == field.high == 0.5


@pytest.mark.parametrize(("t", "sigma"), [(1.01, r"5\.235"), (-0.01, r"0\.0477")])
def test_a_solver_that_leaves_the_range_is_found(t: float, sigma: str) -> None:
    """Nothing is clipped but rounding."""

    def solver(drift: Callable, y: Tensor, *_: float) -> tuple[Tensor, Tensor]:
        drift(y.new_full((len(y),), 0.5), y)
        return drift(y.new_full((len(y),), t), y), torch.ones(len(y))

    field = Recorder()
    expected = rf"range \[0\.05, 5\], found sigma {sigma}.* at evaluation 2"
    with pytest.raises(ValueError, match=expected):
        probability_flow(field, torch.ones(2, 1), PROCESS, solver=solver)
    with pytest.raises(ValueError, match=expected):
        log_prob(field, torch.ones(2, 1), PROCESS, solver=solver)
    assert field.calls == 2


@pytest.mark.parametrize("solver", ADAPTIVE)
@pytest.mark.parametrize("process", [VE(0.01, 50.0, t_min=1e-5), VE(0.1, 3.0), VP()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adaptive_evaluations_are_counted_and_stay_in_range(solver, process, dtype) -> None:
    x = process.prior_sample((4, 3), torch.Generator().manual_seed(0), dtype)
    field = Recorder()
    found = probability_flow(field, x, process, solver=solver, rtol=1e-3, atol=1e-3, denoise=True)
    assert found.nfe == field.calls == int(found.evaluations.max())
    assert process.sigma_range[0] <= field.low <= field.high <= process.sigma_range[1]
    assert found.x.dtype == dtype


def test_denoising_is_tweedie() -> None:
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    raw = probability_flow(gaussian, x, PROCESS)
    clean = probability_flow(gaussian, x, PROCESS, denoise=True)
    torch.testing.assert_close(clean.x, raw.x * STD**2 / (STD**2 + PROCESS.sigma_min**2))
    assert clean.nfe == raw.nfe + 1


def test_progress_and_observer_see_every_step() -> None:
    seen, done = [], []
    noise = BatchNoise(torch.Generator().manual_seed(0))
    found = reverse_sde(
        gaussian,
        torch.ones(2, 1),
        PROCESS,
        noise=noise,
        steps=5,
        progress=lambda i, n: done.append((i, n)),
        observe=lambda x, sigma: seen.append((x, sigma)),
    )
    assert done == [(i, 5) for i in range(1, 6)]
    assert [sigma for _, sigma in seen] == pytest.approx([*PROCESS.levels(5).tolist(), 0.0])
    assert torch.equal(seen[-1][0].float(), found.x)
    shares = []
    probability_flow(gaussian, ones(), PROCESS, progress=lambda i, n: shares.append(i / n))
    assert shares == sorted(shares)
    assert shares[0] == 0 and shares[-1] == 1


def test_condition_reaches_the_field() -> None:
    def field(x: Tensor, sigma: Tensor, scale: Tensor) -> Tensor:
        return -scale[:, None] * x

    condition = {"scale": torch.tensor([1.0, 2.0])}
    found = langevin(field, torch.ones(2, 1), [0.1], sigma=1.0, condition=condition)
    assert found.x.flatten().tolist() == pytest.approx([0.9, 0.8])


@pytest.mark.parametrize("solver", ADAPTIVE)
def test_non_finite_values_stop_adaptive_solvers(solver: Callable) -> None:
    def field(x: Tensor, sigma: Tensor) -> Tensor:
        return torch.where(sigma[:, None] < 1, torch.nan, -x)

    with pytest.raises(ArithmeticError, match=r"not finite for 2 of 2 samples at evaluation \d+.*sigma 0\."):
        probability_flow(field, torch.ones(2, 1), PROCESS, solver=solver)


def test_non_finite_values_stop_fixed_steps_with_step_and_level() -> None:
    def field(x: Tensor, sigma: Tensor) -> Tensor:
        return torch.where((sigma[:, None] < 1) & (x < 0), torch.inf, -x)

    x = torch.tensor([[1.0], [-1.0]])
    with pytest.raises(ArithmeticError, match=r"for 1 of 2 samples at evaluation 3, step 3, sigma 0\.5"):
        euler(field, x, PROCESS, levels=torch.tensor([2.0, 1.8, 0.5, 0.1]))


@pytest.mark.parametrize("solver", ADAPTIVE)
def test_a_jump_in_the_field_ends_in_a_clear_error_or_a_solution(solver: Callable) -> None:
    """y' = 1/(t - 1) cannot be passed."""
    with pytest.raises(ArithmeticError, match="too small to advance"):
        solver(lambda t, y: (1 / (t - 1)[:, None] ** 2).expand_as(y), torch.ones(1, 1), 0.0, 2.0, 1e-6, 1e-6)


def test_a_field_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="expected shape"):
        euler(lambda x, sigma: x[:, :1], torch.ones(2, 2), PROCESS)


def test_interrupts_pass_through() -> None:
    def field(x: Tensor, sigma: Tensor) -> Tensor:
        raise KeyboardInterrupt

    for solver in ADAPTIVE:
        with pytest.raises(KeyboardInterrupt):
            probability_flow(field, torch.ones(2, 2), PROCESS, solver=solver)


def test_bad_levels_are_refused() -> None:
    x = torch.ones(1, 1)
    with pytest.raises(ValueError, match="strictly decreasing"):
        euler(gaussian, x, PROCESS, levels=torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"range \[0.05, 5\]"):
        euler(gaussian, x, PROCESS, levels=torch.tensor([9.0, 2.0]))
    with pytest.raises(ValueError, match="at least 2 noise levels"):
        euler(gaussian, x, PROCESS, steps=1)
    with pytest.raises(ValueError, match="source of noise"):
        heun(gaussian, x, PROCESS, churn=1.0)


def test_edm_levels() -> None:
    levels = edm_levels(VE(0.002, 80.0), 18)
    i = torch.arange(18, dtype=torch.float64)
    expected = (80 ** (1 / 7) + i / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    torch.testing.assert_close(levels, expected)


# ---------------------------------------------------------------- noise


def test_per_sample_noise_is_normal_and_independent() -> None:
    noise = PerSampleNoise(0, range(2000))
    z = torch.stack([noise(torch.zeros(2000, 25, dtype=torch.float64)) for _ in range(4)])
    assert stats.kstest(z.flatten().numpy(), "norm").pvalue > 1e-3
    assert stats.kstest((z**2).sum(-1).flatten().numpy(), stats.chi2(25).cdf).pvalue > 1e-3
    neighbours = [z[:-1] * z[1:], z[:, :-1] * z[:, 1:], z[..., :-1] * z[..., 1:]]
    other = PerSampleNoise(1, range(2000))(torch.zeros(2000, 25, dtype=torch.float64))
    for product in (*neighbours, z[0] * other, z[1] * other):
        assert abs(product.mean()) < 5 / math.sqrt(product.numel())
    assert len(z.unique()) == z.numel()


def test_per_sample_noise_depends_on_seed_and_sample_alone() -> None:
    like = torch.zeros(6, 2, 3)
    all_of_them, later = PerSampleNoise(3, range(6)), PerSampleNoise(3, [4, 1])
    for _ in range(3):
        assert torch.equal(all_of_them(like)[[4, 1]], later(like[:2]))
    with pytest.raises(ValueError, match="made for 6 samples"):
        all_of_them(like[:2])


@pytest.mark.parametrize(("sampler", "calls"), FIXED.values(), ids=FIXED.keys())
def test_samples_do_not_depend_on_the_batch(sampler, calls) -> None:
    data, process = eight_gaussians(), VE(0.1, 3.0)

    def run(samples: list[int]) -> Tensor:
        noise = PerSampleNoise(7, samples)
        x = process.prior_std * noise(torch.zeros(len(samples), 2))
        return sampler(data.score, x, process, noise=noise, steps=20).x

    together, some = run(list(range(10))), run([8, 3])
    assert torch.equal(together[[8, 3]], some)
    assert torch.equal(some, torch.cat([run([8]), run([3])]))


def test_batch_norms_tie_samples_together_as_the_authors_code_does() -> None:
    """One corrector step at one level against its formula."""
    x = torch.tensor([[3.0, 4.0], [0.6, 0.8]], dtype=torch.float64)
    z = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    levels = torch.tensor([2.0, 1.0])

    def one_step(batch_norms: bool) -> Tensor:
        states = []

        def field(x: Tensor, sigma: Tensor) -> Tensor:
            states.append(x)
            return -x

        predictor_corrector(field, x, PROCESS, noise=lambda _: z, levels=levels, batch_norms=batch_norms)
        return states[1]

    def expected(ratio: Tensor) -> Tensor:
        a = 2 * (0.16 * ratio) ** 2
        return x - a * x + (2 * a).sqrt() * z

    torch.testing.assert_close(one_step(False), expected(torch.tensor(2.0).double()))
    torch.testing.assert_close(one_step(True), expected(torch.tensor(1.5 / 3.0).double()))


@pytest.mark.parametrize("name", FIXED)
def test_samplers_reach_the_data(name: str) -> None:
    """400 samples of the 8-Gaussian set: its log-density and the shares of its modes."""
    data = eight_gaussians()
    process = VE(0.05, 20.0, data_std=data.data_std)
    noise = PerSampleNoise(0, range(400))
    x = process.prior_std * noise(torch.zeros(400, 2))
    x = FIXED[name][0](data.score, x, process, noise=noise, steps=100, denoise=False).x
    mode = (x[:, None] - data.means.float()).norm(dim=-1).argmin(1)
    assert stats.chisquare(torch.bincount(mode, minlength=8).numpy()).pvalue > 1e-4
    log_prob = data.log_prob(x, torch.full((400,), 0.05))
    assert abs(-log_prob.mean() - data.entropy(0.05, points=2**12)) < 5 * log_prob.std() / 20 + 0.1


@pytest.mark.gpu
def test_per_sample_noise_and_samples_are_those_of_the_cpu() -> None:
    on_cpu, on_gpu = PerSampleNoise(5, range(9)), PerSampleNoise(5, range(9))
    like = torch.zeros(9, 7, dtype=torch.float64)
    torch.testing.assert_close(on_cpu(like), on_gpu(like.cuda()).cpu(), rtol=1e-12, atol=1e-12)
    data, process = eight_gaussians(), VE(0.1, 3.0)
    x = process.prior_std * on_cpu(like)[:, :2]
    ours, theirs = (
        probability_flow(data.score, start, process, rtol=1e-7, atol=1e-7) for start in (x.cuda(), x)
    )
    assert (ours.x.cpu() - theirs.x).abs().max() < 1e-4
    assert ours.nfe == theirs.nfe
