"""Processes: schedules that agree with their SDEs, derivatives and inverses; priors that are densities."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import curlfree as cf
from cases import rng

BETAS = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)  # DDPM
CUMPROD = torch.cumprod(1 - BETAS, 0)
DISCRETE = cf.Discrete(tuple(((1 - CUMPROD) / CUMPROD).sqrt().tolist()))
PROCESSES: dict[str, cf.Process] = {
    "VE": cf.VE(0.01, 50.0),
    "VE of the toy sets": cf.VE(0.1, 3.0, data_std=1.5, data_mean=0.5),
    "VP": cf.VP(0.1, 20.0),
    "VP gentle": cf.VP(0.5, 2.0, t_min=0.1, t_max=0.9),
    "Linear": cf.Linear(),
    "Discrete": DISCRETE,
}


def times(process: cf.Process, n: int = 50) -> Tensor:
    """Inner times, off the nodes of a table."""
    fractions = torch.linspace(0.003, 0.997, n, dtype=torch.float64)
    return process.t_min + (process.t_max - process.t_min) * fractions


@pytest.fixture(params=PROCESSES)
def process(request: pytest.FixtureRequest) -> cf.Process:
    return PROCESSES[request.param]


def derivative(function, t: Tensor) -> Tensor:
    t = t.clone().requires_grad_()
    return torch.autograd.grad((function(t) + 0 * t).sum(), t)[0]


def test_the_derivative_of_sigma(process: cf.Process) -> None:
    t = times(process)
    torch.testing.assert_close(process.sigma_prime(t), derivative(process.sigma, t), rtol=1e-11, atol=0)
    assert (process.sigma_prime(t) > 0).all()


def test_time_is_the_inverse_of_sigma(process: cf.Process) -> None:
    t = times(process)
    torch.testing.assert_close(process.time(process.sigma(t)), t, rtol=1e-10, atol=1e-12)
    ends = torch.tensor([process.t_min, process.t_max], dtype=torch.float64)
    torch.testing.assert_close(process.time(torch.tensor(process.sigma_range, dtype=torch.float64)), ends)


def test_float32_times_are_accurate(process: cf.Process) -> None:
    t = times(process)
    low = process.t_min + 0.01 * (process.t_max - process.t_min)
    t = t[t > low]
    sigma = process.sigma(t)
    error = (process.time(sigma.float()).double() - t).abs() / (process.t_max - process.t_min)
    assert process.time(sigma.float()).dtype == torch.float32
    assert error.max() < 1e-5


def test_marginals_satisfy_the_moment_equations(process: cf.Process) -> None:
    """Eq. 7 in y = alpha x: dy = (alpha'/alpha) y dt + alpha sqrt(d sigma^2/dt) dw.

    The mean alpha m and the variance alpha^2 (c + sigma^2) of data with mean m and variance c must satisfy
    mean' = f mean and variance' = 2 f variance + g^2.
    """
    t = times(process)
    f = derivative(process.alpha, t) / process.alpha(t)
    g2 = process.alpha(t).square() * 2 * process.sigma(t) * process.sigma_prime(t)
    for c in (0.0, 1.7):

        def variance(s: Tensor, c: float = c) -> Tensor:
            return process.alpha(s).square() * (c + process.sigma(s).square())

        torch.testing.assert_close(
            derivative(variance, t), 2 * f * variance(t) + g2, rtol=1e-9, atol=1e-9 * float(g2.max())
        )


def test_known_coefficients_of_the_sdes() -> None:
    """VP: drift -beta/2 and diffusion sqrt(beta); VE: no drift; straight path: y = (1 - t) x0 + t z."""
    t = times(cf.VP())
    vp, beta = cf.VP(0.1, 20.0), 0.1 + 19.9 * t
    torch.testing.assert_close(derivative(vp.alpha, t) / vp.alpha(t), -beta / 2)
    torch.testing.assert_close(vp.alpha(t) ** 2 * 2 * vp.sigma(t) * vp.sigma_prime(t), beta)
    assert torch.equal(cf.VE().alpha(t), torch.ones_like(t))
    torch.testing.assert_close(cf.Linear().alpha(t) * cf.Linear().sigma(t), t)
    torch.testing.assert_close(cf.Linear().alpha(t), 1 - t)
    ve = cf.VE(0.01, 50.0)
    torch.testing.assert_close(ve.sigma(t), 0.01 ** (1 - t) * 50**t)


@pytest.mark.parametrize("name", ["VP", "VP gentle", "Discrete"])
def test_variance_is_preserved(name: str) -> None:
    process = PROCESSES[name]
    t = times(process)
    torch.testing.assert_close(process.alpha(t) ** 2 * (1 + process.sigma(t) ** 2), torch.ones_like(t))


def test_the_table_of_ddpm_is_met_at_integer_times() -> None:
    t = torch.arange(1000, dtype=torch.float64)
    torch.testing.assert_close(DISCRETE.alpha(t).square(), CUMPROD)
    torch.testing.assert_close(DISCRETE.sigma(t).square(), (1 - CUMPROD) / CUMPROD)
    assert DISCRETE.t_max == 999
    middle = DISCRETE.sigma(t[:-1] + 0.5)
    torch.testing.assert_close(middle, (DISCRETE.sigma(t[:-1]) * DISCRETE.sigma(t[1:])).sqrt())
    torch.testing.assert_close(DISCRETE.time(DISCRETE.sigma(t).reshape(10, 100)), t.reshape(10, 100))


def test_levels_and_range(process: cf.Process) -> None:
    levels = process.levels(7)
    low, high = process.sigma_range
    assert levels.dtype == torch.float64
    torch.testing.assert_close(levels[[0, -1]], torch.tensor([high, low], dtype=torch.float64))
    assert (levels.diff() < 0).all()
    t = process.time(levels)
    torch.testing.assert_close(t.diff(), t.diff()[:1].expand(6), rtol=1e-8, atol=0)
    assert process.levels(1).tolist() == [high]


def test_ve_levels_are_a_geometric_sequence() -> None:
    levels = cf.VE(0.01, 50.0).levels(5)
    torch.testing.assert_close(levels[:-1] / levels[1:], torch.full((4,), 5000**0.25, dtype=torch.float64))


def test_sampled_levels_are_uniform_in_time(process: cf.Process) -> None:
    sigma = process.sample_sigma(20_000, rng())
    assert (sigma.shape, sigma.dtype) == ((20_000,), torch.float32)
    u = (process.time(sigma.double()) - process.t_min) / (process.t_max - process.t_min)
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4


def test_the_prior_is_the_density_of_its_samples(process: cf.Process) -> None:
    assert process.prior_std == pytest.approx(math.hypot(process.sigma_range[1], process.data_std))
    x = process.prior_sample((20_000, 1), rng(), torch.float64)
    assert stats.kstest(x[:, 0].numpy(), stats.norm(process.data_mean, process.prior_std).cdf).pvalue > 1e-4
    y = process.prior_sample((5, 2, 3), rng(1), torch.float64)
    truth = stats.norm(process.data_mean, process.prior_std).logpdf(y.numpy()).sum((1, 2))
    torch.testing.assert_close(process.prior_log_prob(y), torch.tensor(truth))
    scalar = process.prior_sample((5,), rng(1), torch.float64)
    torch.testing.assert_close(process.prior_log_prob(scalar), process.prior_log_prob(scalar[:, None]))
    assert process.prior_sample((2, 3), rng()).dtype == torch.float32


ranges = st.tuples(st.floats(1e-3, 10), st.floats(1.01, 1e4)).map(lambda p: (p[0], p[0] * p[1]))
unit = st.tuples(st.floats(0.01, 0.45), st.floats(0.55, 0.99))


@settings(max_examples=60, deadline=None)
@given(limits=ranges, window=unit)
def test_laws_of_every_ve_and_vp(limits: tuple[float, float], window: tuple[float, float]) -> None:
    """Monotone, inverted by time, within its ends, and with the derivative of finite differences."""
    vp = (min(limits[0], 5.0), min(limits[0], 5.0) + min(limits[1], 30.0))
    for process in (
        cf.VE(*limits, t_min=window[0], t_max=window[1]),
        cf.VP(*vp, t_min=window[0], t_max=window[1]),
        cf.Linear(t_min=window[0], t_max=window[1]),
    ):
        t = times(process, 9)
        sigma = process.sigma(t)
        assert (sigma.diff() > 0).all()
        low, high = process.sigma_range
        assert low < sigma.min() and sigma.max() < high
        torch.testing.assert_close(process.time(sigma), t, rtol=1e-8, atol=1e-9)
        h = 1e-5
        difference = (process.sigma(t + h) - process.sigma(t - h)) / (2 * h)
        torch.testing.assert_close(process.sigma_prime(t), difference, rtol=1e-4, atol=1e-9)
        alpha = process.alpha(t)
        assert ((alpha > 0) & (alpha <= 1)).all()


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=30),
    fractions=st.lists(st.floats(0, 1), min_size=1, max_size=8),
)
def test_laws_of_every_table(steps: list[float], fractions: list[float]) -> None:
    table = torch.tensor(list(itertools.accumulate(steps)), dtype=torch.float64).exp()
    process = cf.Discrete(tuple(table.tolist()))
    t = torch.tensor(fractions, dtype=torch.float64) * (len(steps) - 1)
    torch.testing.assert_close(process.time(process.sigma(t)), t, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(process.sigma(torch.arange(len(steps), dtype=torch.float64)), table)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cf.VE(0.0, 1.0), r"VE needs 0 < sigma_min < sigma_max, got sigma_min=0.0"),
        (lambda: cf.VE(2.0, 1.0), "VE needs 0 < sigma_min < sigma_max"),
        (lambda: cf.VE(1.0, math.inf), "VE needs 0 < sigma_min < sigma_max"),
        (lambda: cf.VE(math.nan, 1.0), "VE needs 0 < sigma_min < sigma_max"),
        (lambda: cf.VE(0.1, 1.0, t_min=0.5, t_max=0.5), "VE needs 0.0 <= t_min < t_max <= 1.0, got t_m"),
        (lambda: cf.VE(0.1, 1.0, t_max=1.5), "t_max=1.5"),
        (lambda: cf.VE(0.1, 1.0, t_min=-0.1), "t_min=-0.1"),
        (lambda: cf.VE(0.1, 1.0, data_std=-1.0), "data_std must be finite and not negative, got -1.0"),
        (lambda: cf.VE(0.1, 1.0, data_std=math.nan), "data_std must be finite and not negative"),
        (lambda: cf.VP(0.0, 1.0), "VP needs 0 < beta_min < beta_max"),
        (lambda: cf.VP(3.0, 1.0), "VP needs 0 < beta_min < beta_max"),
        (lambda: cf.VP(t_min=0.0), r"VP needs t_min > 0 \(its noise is 0 at time 0\), got 0.0"),
        (lambda: cf.VP(t_max=2.0), "VP needs 0.0 <= t_min < t_max <= 1.0"),
        (lambda: cf.Linear(t_max=1.0), "Linear needs 0 < t_min and t_max < 1"),
        (lambda: cf.Linear(t_min=0.0), "Linear needs 0 < t_min and t_max < 1"),
        (lambda: cf.Linear(t_min=0.9, t_max=0.1), "Linear needs 0.0 <= t_min < t_max"),
        (cf.Discrete, "Discrete needs at least two increasing, positive, finite noise levels, got 0"),
        (lambda: cf.Discrete((1.0,)), "got 1 of them: 1"),
        (lambda: cf.Discrete((1.0, 1.0)), "increasing, positive, finite"),
        (lambda: cf.Discrete((0.0, 1.0)), "increasing, positive, finite"),
        (lambda: cf.Discrete((1.0, math.inf)), "increasing, positive, finite"),
        (lambda: cf.Discrete((1.0, math.nan)), "increasing, positive, finite"),
        (lambda: cf.Discrete((1.0, 2.0), t_min=1.0), "Discrete needs 0.0 <= t_min < t_max <= 1.0"),
    ],
)  # fmt: skip
def test_impossible_schedules_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
