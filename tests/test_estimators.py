"""The estimators: unbiased, with the variance that their docstrings state, blind where they should be."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import curlfree as cf
from cases import CASES, MLP, Case, UNet, dense, mixture, randn, randomised, rng, seeded
from curlfree import estimators, penalty
from curlfree.estimators import ESTIMATORS, circle_work, moments, ratio
from curlfree.operators import Operator, central_difference

PROBES: dict[str, estimators.Probe] = {
    "rademacher": cf.rademacher,
    "gaussian": cf.gaussian,
    "sphere": cf.sphere,
}
DRAWS = 100_000
SIZE = 4
J = randn(SIZE, SIZE, seed=1)
S, K = (J + J.T) / 2, (J - J.T) / 2
ASYM, NORM2 = 0.5 * (J - J.T).square().sum(), J.square().sum()


def draws(name: str, probe: estimators.Probe, matrix: Tensor = J, n: int = DRAWS) -> tuple[Tensor, Tensor]:
    """n independent draws of an estimator on one matrix: a batch of n copies."""
    operator = Operator.from_matrix(matrix.expand(n, *matrix.shape))
    generator = rng(7)
    return ESTIMATORS[name].moments(operator, lambda: probe(operator.like, generator))


def z_score(samples: Tensor, truth: Tensor | float) -> float:
    return float((samples.mean() - truth) / (samples.std() / math.sqrt(len(samples))))


def quadratic_variance(A: Tensor, probe: str) -> Tensor:
    """The variance of v^T A v from the module's docstring, for any A."""
    A = (A + A.T) / 2
    norm2, trace, n = A.square().sum(), A.trace(), len(A)
    if probe == "gaussian":
        return 2 * norm2
    if probe == "rademacher":
        return 2 * (norm2 - A.diagonal().square().sum())
    return n / (n + 2) * (2 * norm2 + trace**2) - trace**2


def variance(name: str, probe: str, J: Tensor = J) -> Tensor:
    """The variance of each estimator from its docstring."""
    S, K, n = (J + J.T) / 2, (J - J.T) / 2, len(J)
    P = K.T @ K
    p, P2 = P.trace(), P.square().sum()
    if name == "est":
        return quadratic_variance(J @ J.T, probe) + quadratic_variance(S @ S + K @ K, probe)
    if name == "paper":
        return quadratic_variance(2 * P - (S @ K - K @ S), probe)
    if name == "skew":
        return quadratic_variance(2 * P, probe)
    if probe == "gaussian":
        return 4 * (2 * p**2 + 6 * P2)
    if probe == "rademacher":
        return 4 * (2 * p**2 + 6 * P2 - 12 * P.diagonal().square().sum() + 4 * K.pow(4).sum())
    return 4 * (3 * (n / (n + 2)) ** 2 * (p**2 + 2 * P2) - p**2)


@pytest.mark.parametrize("probe", PROBES)
def test_probes_have_the_identity_as_second_moment(probe: str) -> None:
    v = PROBES[probe](torch.empty(DRAWS, SIZE, dtype=torch.float64), rng())
    products = torch.einsum("bi,bj->bij", v, v)
    for i in range(SIZE):
        for j in range(i, SIZE):
            spread = products[:, i, j].std()
            if spread > 0:
                assert abs(z_score(products[:, i, j], float(i == j))) < 4
            else:
                assert (products[:, i, j] == float(i == j)).all()
    if probe == "sphere":
        torch.testing.assert_close(v.square().sum(1), torch.full((DRAWS,), 4.0, dtype=v.dtype))
    if probe == "rademacher":
        assert set(v.unique().tolist()) == {-1.0, 1.0}
    assert abs(z_score(v[:, 0], 0.0)) < 4


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    probe=st.sampled_from(sorted(PROBES)),
)
def test_probes_are_like_their_tensor(shape: tuple[int, ...], dtype: torch.dtype, probe: str) -> None:
    like = torch.empty(shape, dtype=dtype)
    v = PROBES[probe](like, rng())
    assert (v.shape, v.dtype, v.device) == (like.shape, dtype, like.device)
    assert torch.equal(v, PROBES[probe](like, rng()))
    assert PROBES[probe](like).shape == shape


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("name", ["est", "paper", "skew", "pair"])
def test_unbiased_with_the_stated_variance(name: str, probe: str) -> None:
    """z-scores over 1e5 draws; the variance within 4 of its standard errors (from the fourth moment)."""
    asym, norm2 = draws(name, PROBES[probe])
    assert abs(z_score(asym, ASYM)) < 4
    assert abs(z_score(norm2, NORM2)) < 4
    squares = (asym - ASYM).square()
    assert abs(z_score(squares, variance(name, probe))) < 4
    assert variance(name, probe) > 0.1


@pytest.mark.parametrize("name", ["exact", "trace"])
def test_exact_estimators_have_no_variance(name: str) -> None:
    asym, norm2 = draws(name, cf.rademacher, n=3)
    torch.testing.assert_close(asym, ASYM.expand(3), rtol=1e-13, atol=0)
    torch.testing.assert_close(norm2, NORM2.expand(3), rtol=1e-13, atol=0)


def test_skew_is_exact_in_the_plane() -> None:
    """K^T K is a multiple of the identity there, so Rademacher and sphere probes have no variance."""
    matrix = randn(2, 2, seed=3)
    truth = 0.5 * (matrix - matrix.T).square().sum()
    for probe in ("rademacher", "sphere"):
        assert variance("skew", probe, matrix).abs() < 1e-12
        torch.testing.assert_close(
            draws("skew", PROBES[probe], matrix)[0], truth.expand(DRAWS), rtol=1e-12, atol=0
        )
    asym, _ = draws("skew", cf.gaussian, matrix)
    assert abs(z_score(asym, truth)) < 4
    assert abs(z_score((asym - truth).square(), variance("skew", "gaussian", matrix))) < 4


@settings(max_examples=50, deadline=None)
@given(size=st.integers(2, 12), seed=st.integers(0, 10_000))
def test_skew_has_less_variance_than_paper_with_gaussian_probes(size: int, seed: int) -> None:
    matrix = randn(size, size, seed=seed)
    assert variance("skew", "gaussian", matrix) <= variance("paper", "gaussian", matrix) * (1 + 1e-12)


def test_the_variance_of_pair_is_twice_the_square_in_high_dimension() -> None:
    A = randn(64, 64)
    truth = 0.5 * (A - A.T).square().sum()
    for probe in PROBES:
        assert float(variance("pair", probe, A) / truth**2) == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("name", ["est", "paper", "skew", "pair"])
def test_unbiased_on_a_network(name: str, probe: str) -> None:
    """The whole path, from a network to the mean, over 1e5 draws in all: a batch of copies of one point."""
    net, x, n = randomised(MLP(4)), randn(1, 4), 1000
    matrix = dense(net, x, None)[0].detach()
    truth = 0.5 * (matrix - matrix.T).square().sum()
    generator = rng(2)
    with torch.no_grad():
        means = moments(
            net, x.expand(n, 4), estimator=name, probes=100, probe=PROBES[probe], generator=generator
        )
    assert abs(z_score(means[0], truth)) < 4
    assert abs(z_score(means[1], matrix.square().sum())) < 4
    assert means[0].std() > 0


def test_probes_are_averaged_over_one_evaluation() -> None:
    net, x = randomised(MLP(4)), randn(3, 4)
    calls = []

    def field(y: Tensor, sigma: Tensor | None) -> Tensor:
        calls.append(y)
        return net(y, sigma)

    for name in ("est", "paper", "skew", "pair"):
        generator, single = rng(1), []
        _, operator = cf.jacobian(net, x)
        for _ in range(3):
            single.append(ESTIMATORS[name].moments(operator, lambda g=generator: cf.sphere(x, g))[0])
        found = cf.asymmetry(field, x, estimator=name, probes=3, probe=cf.sphere, generator=rng(1))
        torch.testing.assert_close(found, sum(single) / 3)
    assert len(calls) == 4
    for name in ("exact", "trace"):
        a = cf.asymmetry(net, x, estimator=name, probes=5)
        torch.testing.assert_close(a, cf.asymmetry(net, x, estimator="exact"))


# Loops: finite differences


def test_the_bias_of_loops_has_order_two() -> None:
    """Same probes as pair, so the difference is the bias alone; halving the step quarters it."""
    net, x = randomised(MLP(4)), randn(5, 4)
    probes = [cf.rademacher(x, rng(s)) for s in (1, 2)]

    def pair(operator: Operator) -> Tensor:
        left = iter(probes)
        return ESTIMATORS["loop"].moments(operator, lambda: next(left))[0].detach()

    truth = pair(cf.jacobian(net, x)[1])
    bias = [
        float((pair(central_difference(net, x, step=h)[1]) - truth).norm()) for h in (0.2, 0.1, 0.05, 0.025)
    ]
    assert [math.log2(a / b) for a, b in pairwise(bias)] == pytest.approx([2, 2, 2], abs=0.1)


def test_loops_are_exact_on_linear_fields_and_near_pair_by_default() -> None:
    field, x = cf.LinearField(randn(4, 4)), randn(3, 4)
    for step in (1.0, 1e-3):
        _, operator = central_difference(field, x, step=step)
        torch.testing.assert_close(operator @ x, field(x), rtol=1e-10, atol=1e-10)
    net, sigma = randomised(MLP(4)), torch.linspace(0.01, 3, 3, dtype=torch.float64)
    for dtype, tolerance in {torch.float64: 1e-6, torch.float32: 1e-2}.items():
        args = net.to(dtype), x.to(dtype), sigma.to(dtype)
        loop = cf.asymmetry(*args, estimator="loop", generator=rng())
        torch.testing.assert_close(
            loop, cf.asymmetry(*args, estimator="pair", generator=rng()), rtol=tolerance, atol=tolerance
        )


def test_loops_need_no_derivatives_but_precision() -> None:
    def blunt(x: Tensor, _: Tensor | None) -> Tensor:
        return torch.stack([-x[:, 1], x[:, 0]], 1).detach()

    torch.testing.assert_close(
        cf.asymmetry(blunt, randn(3, 2), estimator="loop", probes=4, generator=rng()).mean(),
        torch.tensor(4.0, dtype=torch.float64), rtol=1, atol=0,
    )  # fmt: skip
    for x, field in {
        randn(3, 2).bfloat16(): lambda y, _: y,
        randn(3, 2).half(): lambda y, _: y.float(),
        randn(3, 2).float(): lambda y, _: y.bfloat16(),
    }.items():
        with pytest.raises(TypeError, match=r"need float32 or float64.*use estimator='skew'"):
            cf.asymmetry(field, x, estimator="loop")


# Exact facts


@pytest.mark.parametrize("name", ["exact", "trace", "skew", "pair"])
def test_normalised_asymmetry_lies_between_0_and_1(name: str) -> None:
    for case in CASES.values():
        field, (x, sigma) = case.make(), case.batch()
        found = cf.normalized_asymmetry(field, x, sigma, estimator=name, generator=rng())
        assert ((found >= -1e-15) & (found <= 1 + 1e-12)).all()


def test_extremes_of_normalised_asymmetry() -> None:
    x = randn(4, 2)
    for name in ("exact", "trace", "skew", "pair"):
        ones = cf.normalized_asymmetry(cf.Rotation(), x, estimator=name, generator=rng())
        measured = ones[ones > 0]  # u^T K v may be 0 for signs, then there is nothing to compare
        torch.testing.assert_close(measured, torch.ones_like(measured))
        assert len(measured) > 0
        zero = cf.normalized_asymmetry(lambda y, _: 0 * y, x, estimator=name, generator=rng())
        assert torch.equal(zero, torch.zeros_like(zero))
        diagonal = cf.normalized_asymmetry(lambda y, _: 3 * y, x, estimator=name, generator=rng())
        assert torch.equal(diagonal, torch.zeros_like(diagonal))
    torch.testing.assert_close(
        ratio(torch.tensor([0.0, 2.0]), torch.tensor([0.0, 4.0])), torch.tensor([0, 0.25])
    )


def test_a_derivative_that_is_not_finite_is_not_taken_for_zero() -> None:
    found = cf.normalized_asymmetry(lambda y, _: y.abs().sqrt(), torch.zeros(3, 2))
    assert found.isnan().all()


def test_zero_jacobians_have_a_finite_gradient() -> None:
    scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
    cf.normalized_asymmetry(lambda y, _: scale * y, randn(3, 2)).sum().backward()
    assert torch.isfinite(scale.grad)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.conservative and n != "scalar"])
def test_conservative_fields_have_no_asymmetry(name: str) -> None:
    case: Case = CASES[name]
    field, (x, sigma) = case.make(), case.batch()
    if isinstance(field, torch.nn.Module):
        field.eval()
    asym, norm2 = moments(field, x, sigma, estimator="exact")
    assert (norm2 > 0.01).all()
    assert (asym < 1e-20 * norm2).all()


def test_scalar_events_are_always_conservative() -> None:
    field, (x, sigma) = CASES["scalar"].make(), CASES["scalar"].batch()
    for name in ESTIMATORS:
        asym, norm2 = moments(field, x, sigma, estimator=name, generator=rng())
        assert (asym.abs() < 1e-8).all()
        if name != "loop":
            torch.testing.assert_close(norm2, (torch.cos(x) / sigma).square())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_adding_a_gradient_changes_only_est_and_paper(seed: int) -> None:
    """Draw by draw the others see K alone; those two change, but not in expectation."""
    net, x = randomised(MLP(4), seed), randn(3, 4, seed=seed)
    gradient = cf.EnergyField(cf.ScalarEnergy(randomised(MLP(4, out=1), seed + 1)))

    def shifted(y: Tensor, sigma: Tensor | None) -> Tensor:
        return net(y, sigma) + gradient(y, sigma)

    for name in ("exact", "trace", "skew", "pair", "est", "paper"):
        a, b = (cf.asymmetry(f, x, estimator=name, generator=rng(seed)) for f in (net, shifted))
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-11) == (name not in ("est", "paper"))


def test_adding_a_gradient_leaves_the_expectation_of_est_and_paper() -> None:
    symmetric = randn(SIZE, SIZE, seed=9)
    for name in ("est", "paper"):
        asym, _ = draws(name, cf.rademacher, J + symmetric + symmetric.T)
        assert abs(z_score(asym, ASYM)) < 4


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 30), seed=st.integers(0, 10_000))
def test_hutchinson_divergence_is_blind_to_the_skew_part(size: int, seed: int) -> None:
    """v^T K v = 0 for every v, to the last bit where the products are: integers."""
    A = torch.randint(-50, 50, (1, size, size), generator=rng(seed)).double()
    K = A - A.mT
    v = cf.rademacher(torch.empty(1, size, dtype=torch.float64), rng(seed + 1))
    assert float(torch.einsum("bi,bij,bj->b", v, K, v)) == 0
    a = randn(1, size, size, seed=seed)
    operator = Operator.from_matrix(a)
    for probe in PROBES.values():
        u = probe(operator.like, rng(seed))
        assert abs(float((u * (operator.skew @ u)).sum())) < 1e-12 * size**2
        torch.testing.assert_close((u * (operator @ u)).sum(), (u * (operator.symmetric @ u)).sum())


# Work around circles


def test_each_draw_of_work_on_a_linear_field_is_exact() -> None:
    """2 pi sigma^2 z2^T K z1, whatever the number of nodes; and rms 2 pi sigma^2 ||K||."""
    n = 20_000
    matrix, x0 = randn(5, 5), randn(1, 5).expand(n, 5)
    sigma = torch.full((n,), 0.7, dtype=torch.float64)
    skew = (matrix - matrix.T) / 2
    for nodes in (3, 4, 8, 9):
        generator = rng(3)
        z1, z2 = cf.gaussian(x0, generator), cf.gaussian(x0, generator)
        truth = 2 * math.pi * 0.7**2 * torch.einsum("bi,ij,bj->b", z2, skew, z1)
        work = cf.loop_work(cf.LinearField(matrix), x0, sigma, nodes=nodes, generator=rng(3))
        torch.testing.assert_close(work, truth, rtol=1e-10, atol=1e-10)
    assert abs(z_score(work.square(), (2 * math.pi * 0.7**2) ** 2 * skew.square().sum())) < 4


def test_work_on_images_with_one_level_each() -> None:
    matrix = randn(8, 8)
    x0, sigma = randn(3, 2, 2, 2), torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)

    def field(x: Tensor, s: Tensor) -> Tensor:
        return (x.flatten(1) @ matrix.T).view_as(x)

    z1, z2 = randn(3, 2, 2, 2, seed=1), randn(3, 2, 2, 2, seed=2)
    truth = torch.einsum("bi,ij,bj->b", z2.flatten(1), (matrix - matrix.T) / 2, z1.flatten(1))
    work = circle_work(field, x0, sigma, z1, z2).sum(0)
    torch.testing.assert_close(work, 2 * math.pi * sigma**2 * truth, rtol=1e-10, atol=1e-10)


def test_work_of_an_exact_score_vanishes_spectrally() -> None:
    """On a circle the trapezoid rule of an analytic gradient converges faster than any power."""
    data = mixture()
    x0 = data.sample(200, rng(), torch.float64)
    sigma = torch.full((200,), 0.6, dtype=torch.float64)
    rms = []
    for nodes in (4, 8, 16, 32, 64):
        work = cf.loop_work(data.score, x0, sigma, nodes=nodes, generator=rng(1))
        rms.append(float(work.square().mean().sqrt()))
    orders = [math.log2(a / b) for a, b in pairwise(rms)]
    assert orders[1] < orders[2] < orders[3]
    assert orders[3] > 5
    assert rms[-1] < 1e-4 * rms[0]


def test_dropout_masks_are_the_same_at_all_nodes() -> None:
    net, x0 = randomised(UNet()), randn(3, 2, 4, 4)
    sigma, z1, z2 = torch.ones(3, dtype=torch.float64), randn(*x0.shape, seed=1), randn(*x0.shape, seed=2)
    with seeded(0):
        found = circle_work(net, x0, sigma, z1, z2, nodes=4)
        after = torch.get_rng_state()
    for k, (c, s) in enumerate([(1, 0), (0, 1), (-1, 0), (0, -1)]):
        with seeded(0):
            value = net(x0 + c * z1 + s * z2, sigma)
            assert torch.equal(torch.get_rng_state(), after)
        expected = math.pi / 2 * (value * (c * z2 - s * z1)).sum((1, 2, 3))
        torch.testing.assert_close(found[k], expected, rtol=1e-10, atol=1e-10)


def test_half_the_nodes_show_the_error() -> None:
    net, x0 = randomised(MLP(3)), randn(4, 3)
    sigma, z1, z2 = torch.ones(4, dtype=torch.float64), randn(4, 3, seed=1), randn(4, 3, seed=2)
    nodes = circle_work(net, x0, sigma, z1, z2, nodes=12)
    assert nodes.shape == (12, 4)
    torch.testing.assert_close(2 * nodes[::2].sum(0), circle_work(net, x0, sigma, z1, z2, nodes=6).sum(0))


# Random numbers


NET = randomised(MLP(4))
X = randn(3, 4)
RANDOM: dict[str, Callable[..., Tensor | cf.Audit | cf.Loss]] = {
    "rademacher": partial(cf.rademacher, X),
    "gaussian": partial(cf.gaussian, X),
    "sphere": partial(cf.sphere, X),
    "loop_work": partial(cf.loop_work, NET, X, torch.ones_like(X[:, 0])),
    "subset": partial(penalty.subset, 10, 0.5, device=X.device),
    "sample_sigma": partial(cf.VE().sample_sigma, 5),
    "prior_sample": partial(cf.VP().prior_sample, (3, 4)),
    "autoencoder": lambda generator: cf.Autoencoder(3, 4, generator=generator).W,
    "mixture": partial(mixture().sample, 4),
    "audit": partial(cf.audit, NET, X, cf.VE(), levels=2),
    "total_loss": lambda generator: (
        cf.total_loss(torch.ones(3), NET, X, None, lmbda=1.0, fraction=0.5, generator=generator).total
    ),
}
RANDOM |= {n: partial(cf.asymmetry, NET, X, estimator=n) for n in ("est", "paper", "skew", "pair", "loop")}
RANDOM |= {f"normalised {n}": partial(cf.normalized_asymmetry, NET, X, estimator=n) for n in ("est", "skew")}
RANDOM |= {f: partial(cf.qc_loss, NET, X, weight=1.0, fraction=0.7, form=f) for f in ("double", "dual")}


@pytest.mark.parametrize("name", RANDOM)
def test_generators_are_obeyed_and_the_global_state_left_alone(name: str) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    a, b, c = (RANDOM[name](generator=rng(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    if isinstance(a, Tensor):
        assert torch.equal(a, b) and not torch.equal(a, c)
    else:
        assert a == b != c


def test_without_a_generator_the_global_state_is_used() -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(cf.asymmetry(NET, randn(3, 4)).detach())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_every_estimator_states_expectation_and_cost() -> None:
    for name, estimator in ESTIMATORS.items():
        text = inspect.getdoc(estimator.moments)
        assert "Cost: " in text or "passes" in text, name
        assert "ariance" in text, name
        assert "xpectation" in text or not estimator.random, name
    assert "bias of order h^2" in inspect.getdoc(ESTIMATORS["loop"].moments)
