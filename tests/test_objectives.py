"""Score matching: four forms of one objective, and the total loss."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor, nn

import curlfree as cf
from cases import CASES, MLP, UNet, dense, mixture, randn, randomised, rng, seeded

Weighted = Callable[[Callable[..., Tensor]], Tensor]


def grid(size: int, half: float, step: float) -> Tensor:
    """The nodes of the trapezoid rule, which is spectrally accurate for what decays at both ends."""
    axis = torch.arange(-half, half + step / 2, step, dtype=torch.float64)
    return torch.cartesian_prod(*[axis] * size).reshape(-1, size)


def smooth_fields(size: int) -> list[Callable[..., Tensor]]:
    return [randomised(MLP(size), seed) for seed in (1, 2, 3)]


def test_formulas_on_every_field() -> None:
    """Each loss against its equation with a dense Jacobian."""
    for name in ("mlp", "unet", "force", "scalar", "energy"):
        case = CASES[name]
        field, (x, sigma) = case.make(), case.batch()
        v, score = randn(*x.shape, seed=2), randn(*x.shape, seed=3)
        with seeded(0):
            J = dense(field, x, sigma)
        with seeded(0):
            s = field(x, sigma).reshape(3, -1)
        flat = v.reshape(3, -1)
        half = 0.5 * s.square().sum(1)
        expected = {
            "esm": 0.5 * (s - score.reshape(3, -1)).square().sum(1),
            "ism": half + J.diagonal(dim1=1, dim2=2).sum(1),
            "ssm": half + torch.einsum("bi,bij,bj->b", flat, J, flat),
        }
        losses = {
            "esm": lambda f=field, x=x, s=sigma, t=score: cf.esm(f, x, s, t),
            "ism": lambda f=field, x=x, s=sigma: cf.ism(f, x, s),
            "ssm": lambda f=field, x=x, s=sigma, v=v: cf.ssm(f, x, s, v),
        }
        for key, loss in losses.items():
            with seeded(0):
                found = loss()
            assert found.shape == (3,)
            torch.testing.assert_close(found, expected[key], rtol=1e-11, atol=1e-12)
        if sigma is not None:
            level = sigma.view(-1, *[1] * (x.ndim - 1))
            with seeded(0):
                found = cf.dsm(field, x, sigma, v)
            with seeded(0):
                r = (field(x + level * v, sigma) + v / level).reshape(3, -1)
            torch.testing.assert_close(found, 0.5 * r.square().sum(1), rtol=1e-12, atol=0)


def test_the_mean_over_all_sign_probes_of_sliced_is_implicit_score_matching() -> None:
    net, (x, sigma) = randomised(MLP(4)), CASES["mlp"].batch()
    losses = [
        cf.ssm(net, x, sigma, torch.tensor(signs, dtype=x.dtype).expand_as(x))
        for signs in itertools.product((-1.0, 1.0), repeat=4)
    ]
    torch.testing.assert_close(torch.stack(losses).mean(0), cf.ism(net, x, sigma), rtol=1e-12, atol=0)


def test_implicit_is_explicit_score_matching_up_to_a_constant() -> None:
    """E ism = E esm - 1/2 E|score|^2 for any field (Eq. 2), by quadrature over the plane."""
    data, x = mixture(), grid(2, 7.0, 0.2)
    weight = data.log_prob(x).exp() * 0.2**2
    score = data.score(x)
    assert float(weight.sum()) == pytest.approx(1, abs=1e-12)
    constant = float((weight * 0.5 * score.square().sum(1)).sum())
    with torch.no_grad():
        for field in smooth_fields(2):
            explicit = float((weight * cf.esm(field, x, None, score)).sum())
            implicit = float((weight * cf.ism(field, x)).sum())
            assert implicit == pytest.approx(explicit - constant, abs=1e-9)


@pytest.mark.parametrize("level", [0.3, 1.0])
def test_denoising_is_explicit_score_matching_up_to_a_constant(level: float) -> None:
    """E dsm = E esm + 1/2 (D/sigma^2 - E|score|^2) (Eq. 5), over (x0, z) and over x."""
    data, step = mixture(1), 0.1
    pairs = grid(2, 7.5, step)
    x0, z = pairs[:, :1], pairs[:, 1:]
    joint = (data.log_prob(x0) - 0.5 * z[:, 0] ** 2).exp() / math.sqrt(2 * math.pi) * step**2
    x = grid(1, 15.0, step)
    sigma = torch.full((len(x),), level, dtype=torch.float64)
    weight, score = data.log_prob(x, sigma).exp() * step, data.score(x, sigma)
    constant = 0.5 * (1 / level**2 - float((weight * score[:, 0] ** 2).sum()))
    with torch.no_grad():
        for field in smooth_fields(1):
            denoising = float((joint * cf.dsm(field, x0, sigma[:1].expand(len(x0)), z)).sum())
            explicit = float((weight * cf.esm(field, x, sigma, score)).sum())
            assert denoising == pytest.approx(explicit + constant, abs=1e-8)


class Affine(nn.Module):
    """s = A x + b."""

    def __init__(self) -> None:
        super().__init__()
        self.A, self.b = nn.Parameter(randn(2, 2)), nn.Parameter(randn(2, seed=1))

    def forward(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        return x @ self.A.T + self.b


def minimise(module: nn.Module, loss: Callable[[], Tensor], steps: int) -> None:
    tolerances = {"tolerance_grad": 1e-12, "tolerance_change": 0}
    optimiser = torch.optim.LBFGS(
        module.parameters(), max_iter=steps, line_search_fn="strong_wolfe", **tolerances
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return value

    optimiser.step(closure)


def hermite(size: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of E f(z) for standard normal z, exact for polynomials up to degree 5."""
    nodes, weights = (torch.tensor(a) for a in hermegauss(3))
    return torch.cartesian_prod(*[nodes] * size), torch.cartesian_prod(
        *[weights / weights.sum()] * size
    ).prod(1)


@pytest.mark.parametrize("objective", ["esm", "ism", "ssm", "dsm"])
def test_each_objective_trains_an_affine_field_to_the_score_of_a_gaussian(objective: str) -> None:
    """By exact expectations, so the minimum is the score itself: A = -C^-1 and b = C^-1 m."""
    L, mean = torch.tensor([[1.0, 0.0], [0.7, 0.5]], dtype=torch.float64), randn(2, seed=4)
    C, level = L @ L.T, 0.8
    field = Affine()
    if objective == "dsm":
        u, w = hermite(4)
        x0, z = u[:, :2] @ L.T + mean, u[:, 2:]
        sigma = torch.full((len(u),), level, dtype=torch.float64)
        C = C + level**2 * torch.eye(2)
        losses = {"dsm": lambda: cf.dsm(field, x0, sigma, z)}
    else:
        u, w = hermite(2)
        x = u @ L.T + mean
        signs = [torch.tensor(s, dtype=x.dtype).expand_as(x) for s in ((1.0, 1.0), (1.0, -1.0))]
        losses = {
            "esm": lambda: cf.esm(field, x, None, (mean - x) @ C.inverse()),
            "ism": lambda: cf.ism(field, x),
            "ssm": lambda: 0.5 * sum(cf.ssm(field, x, None, v) for v in signs),
        }
    minimise(field, lambda: (w * losses[objective]()).sum(), 100)
    torch.testing.assert_close(field.A.detach(), -C.inverse(), rtol=0, atol=1e-6)
    torch.testing.assert_close(field.b.detach(), C.inverse() @ mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("objective", ["esm", "ism", "ssm", "dsm"])
def test_each_objective_trains_a_network_to_the_score_of_a_mixture(objective: str) -> None:
    data = cf.GaussianMixture(torch.tensor([[-1.5], [1.0]], dtype=torch.float64), 0.6)
    level = 0.5
    x = grid(1, 6.0, 0.05)
    sigma = torch.full((len(x),), level, dtype=torch.float64)
    field = randomised(MLP(1, 24))
    if objective == "dsm":
        pairs = grid(2, 5.0, 0.2)
        x0, z = pairs[:, :1], pairs[:, 1:]
        w = (data.log_prob(x0) - 0.5 * z[:, 0] ** 2).exp() / math.sqrt(2 * math.pi) * 0.04
        levels = sigma[:1].expand(len(x0))
    else:
        w = data.log_prob(x, sigma).exp() * 0.05
    losses = {
        "esm": lambda: cf.esm(field, x, sigma, data.score(x, sigma)),
        "ism": lambda: cf.ism(field, x, sigma),
        "ssm": lambda: cf.ssm(field, x, sigma, cf.rademacher(x, rng())),
        "dsm": lambda: cf.dsm(field, x0, levels, z),
    }

    def error() -> float:
        with torch.no_grad():
            return float(
                (data.log_prob(x, sigma).exp() * 0.05 * cf.esm(field, x, sigma, data.score(x, sigma))).sum()
            )

    before = error()
    minimise(field, lambda: (w * losses[objective]()).sum(), 150)
    assert error() < 1e-3 * before


def test_weightings_and_the_total() -> None:
    """Eq. 12 with the weights of Eqs. A4 and A5."""
    net, (x0, sigma) = randomised(MLP(4)), CASES["mlp"].batch()
    z = randn(3, 4, seed=3)
    x = x0 + sigma[:, None] * z
    sm = cf.dsm(net, x0, sigma, z)
    asym = cf.asymmetry(net, x, sigma, generator=rng())
    torch.testing.assert_close(cf.sigma2(sigma), sigma**2)
    torch.testing.assert_close(cf.sigma4(sigma), sigma**4)
    for weighting, qc_weighting, w, u in (
        (cf.sigma2, None, sigma**2, sigma**2),
        (cf.sigma2, cf.sigma4, sigma**2, sigma**4),
        (torch.ones_like, cf.sigma4, torch.ones(3), sigma**4),
    ):
        for form in ("double", "dual"):
            total, matched, qc = cf.total_loss(
                sm, net, x, sigma, lmbda=0.3, weighting=weighting, qc_weighting=qc_weighting,
                form=form, generator=rng(),
            )  # fmt: skip
            torch.testing.assert_close(matched, (w * sm).mean().detach())
            torch.testing.assert_close(qc, (u * asym).mean().detach())
            torch.testing.assert_close(total, (w * sm).mean() + 0.3 * (u * asym).mean())
            assert total.requires_grad and not matched.requires_grad and not qc.requires_grad
    plain = cf.total_loss(cf.ism(net, x), net, x, None, lmbda=0.3, generator=rng())
    torch.testing.assert_close(
        plain.total, cf.ism(net, x).mean() + 0.3 * cf.asymmetry(net, x, generator=rng()).mean()
    )


def test_sigma4_is_the_penalty_of_the_denoiser() -> None:
    """sigma^4 Asym(s) = Asym(D) for s = (D - x)/sigma^2."""
    denoiser, (x, sigma) = randomised(MLP(4)), CASES["mlp"].batch()
    score = cf.asymmetry(cf.DenoiserField(denoiser), x, sigma, estimator="exact")
    torch.testing.assert_close(cf.sigma4(sigma) * score, cf.asymmetry(denoiser, x, sigma, estimator="exact"))


def test_lambda_zero_is_score_matching_to_the_last_bit() -> None:
    """Loss, gradients, evaluations and random numbers are those of score matching alone."""
    x0, sigma = CASES["unet"].batch()
    z = randn(*x0.shape, seed=3)
    outcomes = []
    for alone in (True, False):
        net, generator, calls = randomised(UNet()), rng(4), []

        def field(x: Tensor, s: Tensor, net: nn.Module = net, calls: list = calls) -> Tensor:
            calls.append(1)
            return net(x, s)

        with seeded(1):
            sm = cf.dsm(field, x0, sigma, z)
            if alone:
                loss = (sigma.square() * sm).mean()
            else:
                loss, matched, qc = cf.total_loss(
                    sm, field, x0, sigma, lmbda=0.0, generator=generator, fraction=0.5, probes=3
                )
                assert float(qc) == 0 and torch.equal(matched, loss.detach())
            loss.backward()
            state = torch.get_rng_state()
        assert torch.equal(generator.get_state(), rng(4).get_state())
        outcomes.append([loss.detach(), state, torch.tensor(len(calls)), *(p.grad for p in net.parameters())])
    for a, b in zip(*outcomes, strict=True):
        assert torch.equal(a, b)


def test_conditions_reach_the_field() -> None:
    net, (x, sigma) = randomised(MLP(4)), CASES["mlp"].batch()
    z, condition = randn(3, 4, seed=3), {"label": torch.tensor([1.0, 2.0, 3.0])}

    def fixed(y: Tensor, s: Tensor | None) -> Tensor:
        return net(y, s, **condition)

    sm = torch.zeros(3)
    for loss in (
        lambda f, **c: cf.esm(f, x, sigma, z, **c),
        lambda f, **c: cf.dsm(f, x, sigma, z, **c),
        lambda f, **c: cf.ism(f, x, sigma, **c),
        lambda f, **c: cf.ssm(f, x, sigma, z, **c),
        lambda f, **c: cf.total_loss(sm, f, x, sigma, lmbda=1.0, generator=rng(), **c).total,
    ):
        torch.testing.assert_close(loss(net, condition=condition), loss(fixed))
        assert not torch.allclose(loss(net), loss(fixed))
