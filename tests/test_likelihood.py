"""Likelihood against exact densities, and its error bars against what they claim."""

import math

import pytest
import torch
from torch import Tensor

from curlfree.distributions import Checkerboard, Distribution, GaussianMixture, Spirals, eight_gaussians
from curlfree.fields import LinearField
from curlfree.likelihood import bits_per_dim, dequantise, log_prob, nll
from curlfree.ode import Solver, rk45, rk45_per_sample, rk45_scipy
from curlfree.processes import VE, VP, Linear, Process

TIGHT = {"rtol": 1e-7, "atol": 1e-7}


def noised(data: Distribution, process: Process, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Data at the smallest level of the process, and the exact log-densities."""
    g = torch.Generator().manual_seed(seed)
    low = process.sigma_range[0]
    x = data.sample(n, g, torch.float64)
    x = x + low * torch.randn(x.shape, generator=g, dtype=torch.float64)
    return x, data.log_prob(x, torch.full((n,), low, dtype=torch.float64))


class CorrelatedGaussian:
    """Data N(0, spread I + U diag(extra) U^T) with a few correlated directions in many dimensions."""

    def __init__(self, dim: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.rank = min(8, dim - 2)
        self.u = torch.linalg.qr(torch.randn(dim, self.rank, generator=g, dtype=torch.float64)).Q
        self.extra = torch.linspace(1, 40, self.rank, dtype=torch.float64)
        self.spread, self.dim = 0.5, dim
        self.data_std = math.sqrt(self.spread + float(self.extra.sum()) / dim)

    def sample(self, n: int, sigma: float) -> Tensor:
        g = torch.Generator().manual_seed(1)
        z = torch.randn(n, self.dim, generator=g, dtype=torch.float64)
        return math.sqrt(self.spread + sigma**2) * z + (
            (self.extra.sqrt() * torch.randn(n, self.rank, generator=g, dtype=torch.float64)) @ self.u.T
        )

    def score(self, x: Tensor, sigma: Tensor) -> Tensor:
        flat_variance = self.spread + sigma.double()[:, None] ** 2
        part = (x.flatten(1).double() @ self.u) * (1 / (flat_variance + self.extra) - 1 / flat_variance)
        return -(x.double() / flat_variance + part @ self.u.T).to(x.dtype)

    def flow_log_prob(self, x: Tensor, process: Process) -> Tensor:
        """Exact, with the prior's mismatch: the flow scales each eigenvector by a ratio of deviations."""
        low, high = process.sigma_range

        def deviation(sigma: float) -> tuple[float, Tensor]:
            return math.sqrt(self.spread + sigma**2), (self.spread + self.extra + sigma**2).sqrt()

        (a, a_u), (b, b_u) = deviation(low), deviation(high)
        end = b / a * x + (x @ self.u * (b_u / a_u - b / a)) @ self.u.T
        log_det = (self.dim - self.rank) * math.log(b / a) + float((b_u / a_u).log().sum())
        return process.prior_log_prob(end) + log_det


STD = eight_gaussians().data_std
WIDE = VE(0.05, 100.0, data_std=STD)


@pytest.mark.parametrize(
    ("process", "solver"),
    [
        (WIDE, rk45),
        (WIDE, rk45_scipy),
        (WIDE, rk45_per_sample),
        (VP(data_std=STD), rk45),
        (Linear(t_min=0.03, t_max=0.99, data_std=STD), rk45),
    ],
    ids=["VE", "VE with SciPy", "VE with steps per sample", "VP", "Linear"],
)
def test_log_density_of_a_mixture(process: Process, solver: Solver) -> None:
    data = eight_gaussians()
    x, exact = noised(data, process, 8)
    found = log_prob(data.score, x, process, solver=solver, **TIGHT)
    assert (found.value - exact).abs().max() < 1e-4
    assert found.draws.shape == (8, 1)
    assert found.nfe == int(found.evaluations.max())


def test_log_density_of_a_mixture_in_five_dimensions_with_event_shape() -> None:
    means = torch.randn(4, 5, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = GaussianMixture(means - means.mean(0), torch.tensor([0.3, 0.5, 0.7, 1.0]))
    process = VE(0.02, 500.0, data_std=data.data_std)
    x, exact = noised(data, process, 8)
    assert (log_prob(data.score, x, process, **TIGHT).value - exact).abs().max() < 1e-4


def test_density_with_a_mismatched_prior_is_still_that_of_the_flow() -> None:
    data, process = CorrelatedGaussian(10), VE(0.1, 3.0)
    x = data.sample(6, 0.1)
    found = log_prob(data.score, x, process, **TIGHT)
    assert (found.value - data.flow_log_prob(x, process)).abs().max() < 1e-6


def test_density_integrates_to_one() -> None:
    """For any field, here one that is not conservative: the flow is a change of variables."""
    a = torch.tensor([[-0.5, 0.4], [-0.7, -0.3]], dtype=torch.float64)
    process = VE(0.1, 1.5)
    axis = torch.linspace(-9, 9, 61, dtype=torch.float64)
    found = log_prob(LinearField(a), torch.cartesian_prod(axis, axis), process, **TIGHT)
    assert abs(float(found.value.exp().sum()) * 0.3**2 - 1) < 1e-6


def test_hutchinson_is_unbiased_and_its_probes_are_fixed() -> None:
    data, process = CorrelatedGaussian(6), VE(0.1, 3.0)
    x = data.sample(1, 0.1).expand(3000, -1)
    exact = data.flow_log_prob(x[:1], process).item()
    draws = log_prob(
        data.score, x, process, probes=1, generator=torch.Generator().manual_seed(0), rtol=1e-4, atol=1e-4
    ).value
    assert draws.std() > 0.1
    assert abs(draws.mean() - exact) < 5 * draws.std() / math.sqrt(3000) + 1e-3
    # one probe per trajectory: v^T J v with signs takes finitely many values, here at most 2^5
    assert len((draws * 1e4).round().unique()) <= 32


def test_hutchinson_does_not_see_the_rotation() -> None:
    """tr K = v^T K v = 0: a field and its symmetric part have the same divergence for every probe."""
    symmetric = torch.diag(torch.tensor([-0.6, -0.6], dtype=torch.float64))
    skew = torch.tensor([[0.0, 0.8], [-0.8, 0.0]], dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0], [-0.3, 0.4]], dtype=torch.float64)
    process = VE(0.1, 1.5)
    values = [
        log_prob(
            LinearField(a), x, process, probes=1, generator=torch.Generator().manual_seed(0), **TIGHT
        ).value
        for a in (symmetric, symmetric + skew)
    ]
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-5)


def test_nll_in_3072_dimensions_equals_the_closed_form() -> None:
    data = CorrelatedGaussian(3072)
    process = VE(0.01, 50.0, data_std=data.data_std)
    x = data.sample(16, 0.01).float()
    found = nll(
        data.score,
        x,
        process,
        probes=2,
        generator=torch.Generator().manual_seed(3),
        rtol=1e-4,
        atol=1e-4,
        batch_size=8,
        solver_check=4,
    )
    exact = -float(data.flow_log_prob(x.double(), process).mean())
    assert found.probe_se > 0
    assert abs(found.value - exact) < 5 * found.probe_se + 5 * found.solver_error
    assert found.solver_error < 2 < found.se
    bits = found.bits_per_dim(3072)
    assert abs(bits.value - exact / (3072 * math.log(2)) - 8) < 1e-3
    assert bits.unit == "bits/dim"


@pytest.mark.parametrize(
    "data", [eight_gaussians(), Checkerboard(), Spirals()], ids=lambda d: type(d).__name__
)
def test_nll_of_the_exact_score_is_the_entropy(data: Distribution) -> None:
    process = VE(0.1, 40.0, data_std=data.data_std)
    x, exact = noised(data, process, 40)
    found = nll(data.score, x, process, rtol=1e-3, atol=1e-3, solver_check=4)
    assert abs(found.value + float(exact.mean())) < 1e-2
    assert abs(found.value - data.entropy(0.1, points=2**12)) < 5 * found.se + 1e-2
    assert found.probe_se == 0
    assert found.solver_error < 1e-2


def test_the_solver_error_is_the_change_at_a_tenth_of_the_tolerances() -> None:
    data, process = CorrelatedGaussian(6), VE(0.1, 3.0)
    x = data.sample(10, 0.1)
    found = nll(data.score, x, process, rtol=1e-2, atol=1e-2, solver_check=4)
    loose, tight = (log_prob(data.score, x[:4], process, rtol=t, atol=t).value for t in (1e-2, 1e-3))
    assert found.solver_error == pytest.approx(float((tight - loose).mean().abs()), rel=1e-12)
    assert found.solver_error > 0


def test_error_bars_are_those_of_repeated_experiments() -> None:
    data, process = CorrelatedGaussian(6), VE(0.1, 3.0)
    x = data.sample(10, 0.1)
    g = torch.Generator().manual_seed(0)
    loose = {"rtol": 1e-3, "atol": 1e-3}
    runs = [nll(data.score, x, process, probes=2, generator=g, **loose) for _ in range(40)]
    spread = torch.tensor([run.value for run in runs]).std()
    claimed = math.sqrt(sum(run.probe_se**2 for run in runs) / 40)
    assert 0.7 < spread / claimed < 1.4
    one = nll(data.score, x, process, probes=1, generator=g, **loose)
    assert math.isnan(one.probe_se)
    assert one.se > 0


def test_batches_and_conditions() -> None:
    def field(x: Tensor, sigma: Tensor, scale: Tensor) -> Tensor:
        return -scale[:, None] * x / (1 + sigma[:, None] ** 2)

    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    condition = {"scale": torch.linspace(0.5, 1.5, 7, dtype=torch.float64)}
    process, done = VE(0.1, 2.0), []
    whole = nll(field, x, process, condition=condition, **TIGHT)
    parts = nll(
        field,
        x,
        process,
        condition=condition,
        batch_size=3,
        progress=lambda i, n: done.append((i, n)),
        **TIGHT,
    )
    assert abs(whole.value - parts.value) < 1e-6
    assert done == [(3, 7), (6, 7), (7, 7)]
    assert parts.n == 7


def test_every_evaluation_is_one_call_in_range() -> None:
    calls = []

    def field(x: Tensor, sigma: Tensor) -> Tensor:
        calls.append((float(sigma.double().min()), float(sigma.double().max())))
        return -x / (1 + sigma[:, None] ** 2)

    process = VE(0.01, 50.0)
    for probes, generator in ((None, None), (3, torch.Generator().manual_seed(0))):
        calls.clear()
        found = log_prob(field, torch.ones(2, 3), process, probes=probes, generator=generator)
        assert found.nfe == len(calls) == int(found.evaluations.max())
        assert min(c[0] for c in calls) >= process.sigma_min
        assert max(c[1] for c in calls) <= process.sigma_max


def test_bits_per_dimension_of_uniform_bytes_is_eight() -> None:
    """p = 1 on [0, 1]^D costs eight bits per byte; a density of 256 on one cell costs none."""
    assert bits_per_dim(torch.zeros(1), 12).item() == 8
    assert abs(bits_per_dim(torch.tensor([12 * math.log(256)], dtype=torch.float64), 12).item()) < 1e-12


def test_dequantised_bytes_bound_the_discrete_likelihood() -> None:
    """A density that is constant on every cell: the bound is the exact cost of the bytes."""
    probabilities = torch.rand(256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probabilities /= probabilities.sum()
    images = torch.arange(256, dtype=torch.uint8)[:, None]
    x = dequantise(images, torch.Generator().manual_seed(1))
    cell = (256 * x[:, 0]).floor().long()
    log_p = torch.log(256 * probabilities[cell])
    torch.testing.assert_close(bits_per_dim(log_p, 1), -torch.log2(probabilities))


def test_dequantise_is_the_authors_formula_and_stays_in_its_cell() -> None:
    images = torch.randint(0, 256, (50, 3, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    x = dequantise(images, torch.Generator().manual_seed(1))
    u = torch.rand(images.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(x, (u + 255 * (images / 255)) / 256)
    assert torch.equal((x * 256).floor().byte(), images)
    assert x.dtype == torch.float32
    assert float(x.max()) < 1
    with pytest.raises(TypeError, match="uint8"):
        dequantise(images.float(), torch.Generator())


@pytest.mark.gpu
def test_on_a_gpu_the_likelihood_is_that_of_the_cpu() -> None:
    data = eight_gaussians()
    x, exact = noised(data, WIDE, 8)
    found = log_prob(data.score, x.cuda(), WIDE, **TIGHT)
    assert found.value.is_cuda
    assert (found.value.cpu() - exact).abs().max() < 1e-4


def test_refusals() -> None:
    x, process = torch.ones(2, 2), VE(0.1, 2.0)
    with pytest.raises(ValueError, match="probes >= 1 and a generator"):
        log_prob(LinearField(torch.eye(2)), x, process, probes=1)
    with pytest.raises(ValueError, match="probes >= 1 and a generator"):
        log_prob(LinearField(torch.eye(2)), x, process, probes=0, generator=torch.Generator())
