"""Exact data: densities and scores against high precision, each other and their own samples."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate, special

from curlfree.distributions import Checkerboard, Distribution, GaussianMixture, Spirals, eight_gaussians

SETS = {
    "8-Gaussian": eight_gaussians(),
    "8-Gaussian, text": eight_gaussians(1, 1 / 8),
    "Checkerboard": Checkerboard(),
    "Checkerboard, text": Checkerboard.text(),
    "Spirals": Spirals(),
    "Spirals, text": Spirals.text(),
}
every_set = pytest.mark.parametrize("data", SETS.values(), ids=SETS.keys())
LEVELS = [0.01, 0.1, 1.0, 8.0, 50.0]


def noised(data: Distribution, sigma: float, n: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    x0 = data.sample(n, g, torch.float64)
    z = torch.randn(x0.shape, generator=g, dtype=torch.float64)
    return x0 + sigma * z, torch.full((n,), sigma, dtype=torch.float64), z


def tail_points(data: Distribution, sigma: float) -> torch.Tensor:
    """Points up to ten sigma from the data, in all directions."""
    g = torch.Generator().manual_seed(3)
    x0 = data.sample(24, g, torch.float64)
    z = torch.randn(x0.shape, generator=g, dtype=torch.float64)
    return x0 + sigma * torch.linspace(0, 10, 24)[:, None] * z / z.norm(dim=1, keepdim=True)


@every_set
@pytest.mark.parametrize("sigma", LEVELS)
def test_score_is_the_gradient_of_log_prob(data: Distribution, sigma: float) -> None:
    x, s, _ = noised(data, sigma, 64)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(data.log_prob(x, s).sum(), x)
    torch.testing.assert_close(data.score(x, s), gradient, rtol=1e-9, atol=1e-9 / sigma)


@every_set
def test_score_is_curl_free(data: Distribution) -> None:
    x, s, _ = noised(data, 0.5, 16)
    x.requires_grad_()
    score = data.score(x, s)
    rows = [torch.autograd.grad(score[:, i].sum(), x, retain_graph=True)[0] for i in range(2)]
    assert (rows[0][:, 1] - rows[1][:, 0]).abs().max() < 1e-9
    assert rows[0][:, 1].abs().max() > 1e-3


@pytest.mark.parametrize("sigma", LEVELS)
def test_mixture_and_checkerboard_match_fifty_digits(sigma: float) -> None:
    mpmath.mp.dps = 50
    for name in ("8-Gaussian", "Checkerboard", "Checkerboard, text"):
        data = SETS[name]
        x = tail_points(data, sigma)
        s = torch.full((len(x),), sigma, dtype=torch.float64)
        log_prob, score = data.log_prob(x, s), data.score(x, s)
        for i, point in enumerate(x.tolist()):
            p, gradient = high_precision(data, point, sigma)
            assert abs(log_prob[i] - float(mpmath.log(p))) < 1e-8
            exact = torch.tensor([float(g / p) for g in gradient], dtype=torch.float64)
            assert (score[i] - exact).norm() < 1e-8 * exact.norm() + 1e-12


def high_precision(data: Distribution, point: list[float], sigma: float) -> tuple[mpmath.mpf, list]:
    """The density and its gradient by direct summation with mpmath."""
    sigma = mpmath.mpf(sigma)

    def box(d: mpmath.mpf) -> tuple[mpmath.mpf, mpmath.mpf]:
        width = mpmath.mpf(data.cell)
        low, high = (d - width) / sigma, d / sigma
        value = (mpmath.erfc(low / mpmath.sqrt(2)) - mpmath.erfc(high / mpmath.sqrt(2))) / (2 * width)
        return value, (mpmath.npdf(high) - mpmath.npdf(low)) / (width * sigma)

    def gauss(d: mpmath.mpf) -> tuple[mpmath.mpf, mpmath.mpf]:
        std = mpmath.sqrt(sigma**2 + mpmath.mpf(float(data.std[0])) ** 2)
        return mpmath.npdf(d, 0, std), -d / std**2 * mpmath.npdf(d, 0, std)

    kernel, centres = (box, data.corners) if isinstance(data, Checkerboard) else (gauss, data.means)
    total, gradient = mpmath.mpf(0), [mpmath.mpf(0), mpmath.mpf(0)]
    for centre in centres.tolist():
        (k0, d0), (k1, d1) = (
            kernel(mpmath.mpf(x) - mpmath.mpf(c)) for x, c in zip(point, centre, strict=True)
        )
        total += k0 * k1 / 8
        gradient = [gradient[0] + d0 * k1 / 8, gradient[1] + k0 * d1 / 8]
    return total, gradient


@pytest.mark.parametrize("data", [Spirals(), Spirals.text()], ids=["code", "text"])
@pytest.mark.parametrize("sigma", LEVELS)
def test_spirals_match_a_uniform_fine_quadrature(data: Spirals, sigma: float) -> None:
    """All of the curve in equal steps of the angle, without any choice of near panels."""
    nodes, weights = np.polynomial.legendre.leggauss(8)
    edges = np.linspace(0, data.end, 8001)
    half = np.diff(edges)[:, None] / 2
    n = (edges[:-1, None] + half * (1 + nodes)).ravel()
    log_w = np.log(n * (half * weights).ravel() / data.end**2)
    curve = np.stack([-n * np.cos(n), n * np.sin(n)], 1)
    x = tail_points(data, sigma)
    found = data.log_prob(x, torch.full((len(x),), sigma, dtype=torch.float64))
    s = sigma / data.scale
    for point, log_prob in zip(x.numpy() / data.scale, found.tolist(), strict=True):
        d = np.concatenate([point - curve, -point - curve])
        if data.noise:
            d = np.where(d > data.noise / 2, data.noise - d, d)
            high, low = special.log_ndtr(d / s), special.log_ndtr((d - data.noise) / s)
            log_k = high + np.log(-np.expm1(low - high)) - math.log(data.noise)
        else:
            log_k = -0.5 * (d / s) ** 2 - math.log(s * math.sqrt(2 * math.pi))
        exact = special.logsumexp(log_k.sum(1) + np.tile(log_w, 2)) - 2 * math.log(data.scale)
        assert abs(log_prob - exact) < 1e-8


@every_set
@pytest.mark.parametrize("sigma", [0.3, 2.0])
def test_density_integrates_to_one_and_gives_the_entropy(data: Distribution, sigma: float) -> None:
    """The trapezoid rule is spectrally accurate for a smooth density that vanishes at the border."""
    edge = 8 + 8 * sigma if data.data_std > 2 else 4 + 8 * sigma
    axis = torch.linspace(-edge, edge, 1 + round(2 * edge / (0.5 * sigma)), dtype=torch.float64)
    x = torch.cartesian_prod(axis, axis)
    log_p = data.log_prob(x, torch.full((len(x),), sigma, dtype=torch.float64))
    area = float(axis[1] - axis[0]) ** 2
    assert abs(float(log_p.exp().sum()) * area - 1) < 1e-8
    entropy = -float((log_p.exp() * log_p).sum()) * area
    assert abs(data.entropy(sigma, points=2**14) - entropy) < 2e-3


def test_entropy_of_clean_data() -> None:
    assert Checkerboard().entropy() == math.log(72)
    assert Checkerboard.text().entropy() == math.log(8)
    one = GaussianMixture(torch.zeros(1, 2), 2.0)
    assert abs(one.entropy() - math.log(2 * math.pi * math.e * 4)) < 5e-4
    apart = eight_gaussians(radius=100, std=1.0)
    assert abs(apart.entropy() - math.log(2 * math.pi * math.e) - math.log(8)) < 5e-4
    spirals = Spirals()
    assert abs(spirals.entropy(points=2**12) - spirals.entropy(0.002, points=2**11)) < 2e-2


def test_clean_spirals_density_is_the_limit_of_small_noise() -> None:
    data = Spirals()
    x = data.sample(400, torch.Generator().manual_seed(1), torch.float64)
    clean, near = data.log_prob(x), data.log_prob(x, torch.full((400,), 1e-4, dtype=torch.float64))
    assert bool(torch.isfinite(clean).all())
    # all points but those within a few sigma of an edge of the support, where the limit is not uniform
    assert ((clean - near).abs() < 1e-3).double().mean() > 0.97
    assert data.log_prob(torch.tensor([[20.0, 0.0]])).item() == -math.inf


def test_clean_spirals_density_integrates_to_one() -> None:
    """Over a strip, against the share of samples in it."""
    data = Spirals()
    axis = (torch.arange(200, dtype=torch.float64) + 0.5) * 0.09 - 9
    x = torch.cartesian_prod(axis[50:150], axis)
    inside = float(data.log_prob(x).exp().sum()) * 0.09**2
    u = data.sample(200_000, torch.Generator().manual_seed(2), torch.float64)[:, 0].abs() < 4.5
    share = u.double().mean()
    assert abs(inside - share) < 5 * math.sqrt(share * (1 - share) / 200_000) + 2e-3


@every_set
@pytest.mark.parametrize("sigma", [0.3, 3.0])
def test_samples_belong_to_the_score(data: Distribution, sigma: float) -> None:
    """Tweedie: E[z | x] = -sigma s(x), so E[(z + sigma s) g(x)] = 0 for any g."""
    x, s, z = noised(data, sigma, 20_000, seed=5)
    residual = z + sigma * data.score(x, s)
    for g in (torch.ones(()), x, x.sin(), x.flip(1), x * x.flip(1)):
        values = (residual * g).sum(1)
        assert abs(values.mean()) < 5 * values.std() / math.sqrt(len(values))


@every_set
def test_moments_of_samples(data: Distribution) -> None:
    x = data.sample(100_000, torch.Generator().manual_seed(7), torch.float64)
    assert (x.mean(0).abs() < 5 * x.std(0) / math.sqrt(len(x))).all()
    rms = x.square().mean(1)
    assert abs(rms.mean() - data.data_std**2) < 5 * rms.std() / math.sqrt(len(x))


def test_samples_lie_where_the_clean_density_is() -> None:
    x = Checkerboard().sample(5000, torch.Generator().manual_seed(0))
    board = torch.floor(x / 3).long()
    assert bool(((board.sum(1) % 2) == 0).all())
    assert len(torch.unique(board, dim=0)) == 8
    assert bool(torch.isfinite(Checkerboard().log_prob(x)).all())
    outside = torch.tensor([[1.0, 4.0], [7.0, 0.0]])
    assert Checkerboard().log_prob(outside).tolist() == [-math.inf, -math.inf]
    text = Spirals.text().sample(1000, torch.Generator().manual_seed(0), torch.float64)
    n = text.norm(dim=1, keepdim=True)
    on_curve = torch.cat([-n * n.cos(), n * n.sin()], 1)
    assert torch.minimum((text - on_curve).norm(dim=1), (text + on_curve).norm(dim=1)).max() < 1e-12


def test_paired_spirals_share_draws() -> None:
    x = Spirals(paired=True).sample(101, torch.Generator().manual_seed(0))
    assert x.shape == (101, 2)
    assert torch.equal(x[0:100:2], -x[1::2])


def test_mixture_with_weights_stds_and_event_shape() -> None:
    means = torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    std, weights = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1.0, 2.0, 5.0])
    data = GaussianMixture(means, std, weights)
    x = data.sample(40_000, torch.Generator().manual_seed(1), torch.float64)
    assert x.shape == (40_000, 2, 2, 2)
    error = x.mean(0) - data.data_mean
    assert (error.abs() < 5 * x.std(0) / 200).all()
    rms = (x - data.data_mean).flatten(1).square().mean(1)
    assert abs(rms.mean() - data.data_std**2) < 5 * rms.std() / 200
    normals = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(weights.double()),
        torch.distributions.Independent(
            torch.distributions.Normal(means.flatten(1), (std.double().square() + 0.09).sqrt()[:, None]), 1
        ),
    )
    sigma = torch.full((50,), 0.3, dtype=torch.float64)
    torch.testing.assert_close(data.log_prob(x[:50], sigma), normals.log_prob(x[:50].flatten(1)))


def test_mixture_marginal_by_quadrature() -> None:
    """One dimension, clean and noised, against SciPy's adaptive quadrature of the convolution."""
    data = GaussianMixture(torch.tensor([[-1.0], [2.0]]), 0.4, torch.tensor([0.3, 0.7]))

    def clean(y: float) -> float:
        return float(data.log_prob(torch.tensor([[y]], dtype=torch.float64)).exp())

    def blurred(y: float) -> float:
        return clean(y) * math.exp(-0.5 * ((0.7 - y) / 0.5) ** 2) / (0.5 * math.sqrt(2 * math.pi))

    value = integrate.quad(blurred, -8, 8, points=[-1, 0.7, 2], epsabs=1e-12)[0]
    x, sigma = torch.tensor([[0.7]], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    assert abs(float(data.log_prob(x, sigma).exp()) - value) < 1e-9


@every_set
def test_type_follows_x_and_levels_may_differ(data: Distribution) -> None:
    x = data.sample(6, torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.01, 0.1, 0.5, 2.0, 10.0, 50.0])
    score = data.score(x, sigma)
    assert score.dtype == torch.float32
    assert data.log_prob(x, sigma).dtype == torch.float32
    alone = torch.cat([data.score(x[i : i + 1], sigma[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(score, alone, rtol=1e-6, atol=0)


@every_set
def test_samples_come_from_the_generator_alone(data: Distribution) -> None:
    before = torch.get_rng_state()
    first = data.sample(10, torch.Generator().manual_seed(4))
    second = data.sample(10, torch.Generator().manual_seed(4))
    data.entropy(1.0, points=64)
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.gpu
@every_set
@pytest.mark.parametrize("sigma", LEVELS)
def test_a_gpu_gives_the_same_numbers(data: Distribution, sigma: float) -> None:
    x, s, _ = noised(data, sigma, 200)
    torch.testing.assert_close(data.score(x.cuda(), s.cuda()).cpu(), data.score(x, s), rtol=1e-9, atol=1e-9)
    log_prob = data.log_prob(x.cuda(), s.cuda()).cpu()
    torch.testing.assert_close(log_prob, data.log_prob(x, s), rtol=1e-9, atol=1e-9)
    assert data.sample(10, torch.Generator("cuda").manual_seed(0)).is_cuda


def test_refusals() -> None:
    x = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"needs x of shape \(B, 2\), got \(3, 4\)"):
        Checkerboard().log_prob(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="no score without noise"):
        Checkerboard().score(x)
    with pytest.raises(ValueError, match="no score without noise"):
        Spirals().score(x)
    with pytest.raises(ValueError, match="has no density"):
        Spirals.text().log_prob(x)
    with pytest.raises(ValueError, match="weights"):
        GaussianMixture(x, 1.0, torch.tensor([1.0, -1.0, 1.0]))
    with pytest.raises(ValueError, match="means must have shape"):
        GaussianMixture(torch.zeros(2))
    with pytest.raises(TypeError, match="floating"):
        eight_gaussians().score(torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="sigma must be positive"):
        eight_gaussians().score(x, torch.zeros(3))


def test_points_have_a_score_with_noise_only() -> None:
    points = GaussianMixture(torch.eye(2, dtype=torch.float64), 0.0)
    x = torch.zeros(3, 2, dtype=torch.float64)
    torch.testing.assert_close(points.score(x, torch.ones(3).double()), torch.full_like(x, 0.5))
    for call in (points.score, points.log_prob):
        with pytest.raises(ValueError, match=r"std = 0 has no density without noise; pass sigma"):
            call(x)
