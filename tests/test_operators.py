"""The Jacobian as an operator, against PyTorch's dense Jacobian in double precision."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import curlfree as cf
from cases import CASES, MLP, Case, FusedUNet, UNet, dense, randn, randomised, rng, seeded
from curlfree.operators import central_difference, second_order

TIGHT = {"rtol": 1e-11, "atol": 1e-12}


def flat(v: Tensor) -> Tensor:
    return v.reshape(len(v), -1)


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_operator_equals_dense_jacobian(case: Case) -> None:
    field, (x, sigma) = case.make(), case.batch()
    v = randn(*x.shape, seed=2)
    with seeded(0):
        expected = dense(field, x, sigma).detach()
    with seeded(0):
        expected_value = field(x, sigma)
    with seeded(0):
        value, J = cf.jacobian(field, x, sigma)
    torch.testing.assert_close(value, expected_value, **TIGHT)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(J.dense(), expected, **TIGHT)
    products = {
        "mv": (J @ v, expected),
        "rmv": (J.T @ v, expected.mT),
        "symmetric": (J.symmetric @ v, (expected + expected.mT) / 2),
        "skew": (J.skew @ v, (expected - expected.mT) / 2),
    }
    for product, matrix in products.values():
        assert product.shape == x.shape
        torch.testing.assert_close(flat(product), torch.einsum("bij,bj->bi", matrix, flat(v)), **TIGHT)
    if case.conservative:
        assert (J.skew @ v).abs().max() < 1e-13 * (J @ v).abs().max()


def test_dropout_masks_are_shared_and_drawn_once(case: Case) -> None:
    """The adjoint law holds with dropout on, and one evaluation's worth of random numbers is used."""
    field, (x, sigma) = case.make(), case.batch()
    u, v = randn(*x.shape, seed=2), randn(*x.shape, seed=3)
    with seeded(0):
        field(x, sigma)
        after = torch.get_rng_state()
    with seeded(0):
        _, J = cf.jacobian(field, x, sigma)
        left, right = (flat(u) * flat(J @ v)).sum(1), (flat(J.T @ u) * flat(v)).sum(1)
        assert torch.equal(J @ v, J @ v)
        assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(left, right, **TIGHT)
    if any(isinstance(m, nn.Dropout) for m in getattr(field, "modules", list)()):
        with seeded(1):
            assert not torch.allclose(cf.jacobian(field, x, sigma)[1] @ v, J @ v)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_products_are_the_same_and_carry_no_graph(case: Case, mode) -> None:
    field, (x, sigma) = case.make(), case.batch()
    with seeded(0):
        value, J = cf.jacobian(field, x, sigma)
        expected = value.detach(), (J @ x).detach(), (J.T @ x).detach()
    with mode(), seeded(0):
        x, sigma = x.clone(), None if sigma is None else sigma.clone()
        value, J = cf.jacobian(field, x, sigma)
        found = value, J @ x, J.T @ x
    for a, b in zip(found, expected, strict=True):
        assert not a.requires_grad
        torch.testing.assert_close(a, b, **TIGHT)


def test_conditions_made_in_inference_mode_can_be_used() -> None:
    embedding = nn.Embedding(3, 4).double()
    x = randn(3, 4)
    expected = cf.asymmetry(lambda y, s, label: torch.sin(y) * embedding(label), x, estimator="exact",
                            condition={"label": torch.arange(3)})  # fmt: skip
    with torch.inference_mode():
        _, J = cf.jacobian(
            lambda y, s, label: torch.sin(y) * embedding(label), x, condition={"label": torch.arange(3)}
        )
        diagonal = J @ torch.ones_like(x)
    torch.testing.assert_close(diagonal, torch.cos(x) * embedding.weight.detach(), **TIGHT)
    assert not expected.any()


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 4),
    event=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    seed=st.integers(0, 1000),
)
def test_algebra_of_operators(batch: int, event: tuple[int, ...], seed: int) -> None:
    size = int(torch.Size(event).numel())
    a, b = randn(batch, size, size, seed=seed), randn(batch, size, size, seed=seed + 1)
    c = randn(batch, seed=seed + 2)
    v = randn(batch, *event, seed=seed + 3)
    A, M = cf.Operator.from_matrix(a, event), cf.Operator.from_matrix(b, event)
    scale = c[:, None, None]
    for operator, matrix in {
        A: a,
        A.T: a.mT,
        A.T.T: a,
        A + M: a + b,
        A - M: a - b,
        2 * A: 2 * a,
        c * A: scale * a,
        (c * A).T: scale * a.mT,
        A.symmetric: (a + a.mT) / 2,
        A.skew: (a - a.mT) / 2,
        A.symmetric + A.skew: a,
        A.skew.T + A.skew: torch.zeros_like(a),
    }.items():
        assert (operator @ v).shape == v.shape
        torch.testing.assert_close(
            flat(operator @ v), torch.einsum("bij,bj->bi", matrix, flat(v)), rtol=1e-12, atol=1e-13
        )
        torch.testing.assert_close(operator.dense(), matrix, rtol=1e-12, atol=1e-13)


def test_vectors_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a vector of shape \(2, 3\), got \(3,\)"):
        cf.Operator.from_matrix(randn(2, 3, 3)) @ randn(3)


def test_from_matrix_takes_vectors_by_default() -> None:
    a = randn(2, 3, 3)
    assert cf.Operator.from_matrix(a).like.shape == (2, 3)


def test_channels_last_images() -> None:
    """Memory formats change strides, not the Jacobian."""
    net = randomised(UNet(dropout=0.0))
    x, sigma = CASES["unet"].batch()
    expected = cf.jacobian(net, x, sigma)[1].dense()
    found = cf.jacobian(net, x.to(memory_format=torch.channels_last), sigma)[1]
    torch.testing.assert_close(found.dense(), expected, **TIGHT)
    torch.testing.assert_close(found @ x, cf.jacobian(net, x, sigma)[1] @ x, **TIGHT)


def test_expanded_points() -> None:
    """Many copies of one point that share its memory."""
    net, x = randomised(MLP(4)), randn(1, 4)
    expected = cf.qc_loss(net, x.repeat(3, 1), weight=1.0, generator=rng())
    for form in ("double", "dual"):
        found = cf.qc_loss(net, x.expand(3, 4), weight=1.0, form=form, generator=rng())
        torch.testing.assert_close(found, expected, **TIGHT)


def test_gradients_flow_to_parameters_and_to_x_only_where_it_asks() -> None:
    net, x = randomised(MLP(4)), randn(3, 4)
    sigma = torch.linspace(0.5, 1.5, 3, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    cf.asymmetry(net, leaf.detach(), sigma, estimator="exact").sum().backward()
    weights = [p for p in net.parameters() if p is not net.last.bias]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in weights)
    assert leaf.grad is None

    def asym(y: Tensor) -> Tensor:
        J = dense(net, y, sigma)
        return 0.5 * (J - J.mT).square().sum()

    (expected,) = torch.autograd.grad(asym(leaf), leaf)
    for name in ("exact", "trace"):
        (found,) = torch.autograd.grad(cf.asymmetry(net, leaf, sigma, estimator=name).sum(), leaf)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert expected.abs().max() > 0.01


def test_no_graph_survives_a_step() -> None:
    """Reference counting alone frees everything: no cycle keeps activations until the collector runs."""
    net, x = randomised(UNet()), CASES["unet"].batch()[0]
    alive: list[weakref.ref] = []

    def field(y: Tensor, sigma: Tensor | None) -> Tensor:
        value = net(y, sigma)
        alive.extend([weakref.ref(y), weakref.ref(value)])
        return value

    cf.qc_loss(net, x, weight=1.0, form="dual").backward()  # PyTorch compiles some forward-mode rules once
    gc.disable()
    try:
        for form in ("double", "dual"):
            cf.qc_loss(field, x, weight=1.0, form=form, generator=rng()).backward()
        cf.asymmetry(field, x, generator=rng())
        value, J = cf.jacobian(field, x)
        (J @ x).sum().backward()
        del value, J
        assert len(alive) >= 10
        assert [reference() for reference in alive] == [None] * len(alive)
    finally:
        gc.enable()


def test_autocast_works_in_reduced_precision_and_near_the_truth() -> None:
    net, x = randomised(MLP(8, 32)).float(), randn(6, 8).float()
    seen: list[torch.dtype] = []

    def field(y: Tensor, sigma: Tensor | None) -> Tensor:
        value = net(y, sigma)
        seen.append(value.dtype)
        return value

    exact = cf.asymmetry(net, x, estimator="exact")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = cf.asymmetry(field, x, estimator="exact")
        rough = cf.asymmetry(field, x, estimator="skew", probes=200, generator=rng())
    assert seen == [torch.bfloat16] * 2
    assert found.dtype == rough.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0)
    torch.testing.assert_close(rough.mean(), exact.mean(), rtol=0.2, atol=0)


def test_networks_in_half_precision() -> None:
    net = randomised(MLP(8, 32)).bfloat16()
    x = randn(6, 8).bfloat16()
    exact = cf.asymmetry(randomised(MLP(8, 32)).float(), x.float(), estimator="exact")
    torch.testing.assert_close(
        cf.asymmetry(net, x, estimator="skew", probes=400, generator=rng()).mean(),
        exact.mean(), rtol=0.2, atol=0,
    )  # fmt: skip


def test_fused_attention_equals_plain_attention() -> None:
    plain, fused = randomised(UNet(dropout=0.0)), randomised(FusedUNet(dropout=0.0))
    x, sigma = CASES["unet"].batch()
    a, b = (cf.jacobian(net, x, sigma)[1].dense() for net in (plain, fused))
    torch.testing.assert_close(a, b, **TIGHT)
    y = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(fused(y, sigma).sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):  # as it does without the library
        torch.autograd.grad(g.sum(), y)


def test_compiled_networks() -> None:
    """A compiled network gives the same products, and runs compiled again afterwards."""
    net = randomised(FusedUNet(dropout=0.0))
    compiled = torch.compile(net, backend="aot_eager")
    x, sigma = CASES["unet"].batch()
    value = compiled(x, sigma)
    torch.testing.assert_close(value, net(x, sigma))
    torch.testing.assert_close(cf.jacobian(compiled, x, sigma)[1] @ x, cf.jacobian(net, x, sigma)[1] @ x)
    losses = {}
    for form in ("double", "dual"):
        for name, field in {"plain": net, "compiled": compiled}.items():
            net.zero_grad()
            loss = cf.qc_loss(field, x, sigma, weight=1.0, form=form, generator=rng())
            (loss + compiled(x, sigma).square().sum()).backward()
            losses[form, name] = torch.cat([p.grad.flatten() for p in net.parameters()])
    reference = losses["double", "plain"]
    for found in losses.values():
        torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-9)


def test_the_library_can_be_traced() -> None:
    """Inside a user's own compiled function nothing is switched and no value is read."""

    def step(x: Tensor) -> Tensor:
        with second_order():
            return torch.sin(x) * 2

    x = randn(3)
    torch.testing.assert_close(torch.compile(step, backend="eager", fullgraph=True)(x), 2 * torch.sin(x))


class Checkpointed(nn.Module):
    def __init__(self, net: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        return checkpoint(self.net, x, sigma, use_reentrant=self.reentrant)


class Layered(nn.Module):
    """Layer normalisation, which `second_order` replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.norm, self.outward = nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 32)

    def forward(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        return self.outward(torch.tanh(self.norm(self.inward(x.flatten(1))))).view_as(x)


@pytest.mark.parametrize("kind", [UNet, FusedUNet, Layered])
def test_activation_checkpointing(kind) -> None:
    """Values work anywhere; training through what is replaced needs the step inside second_order()."""
    net = randomised(kind())
    field = Checkpointed(net, reentrant=False)
    x, sigma = CASES["unet"].batch()
    with torch.no_grad():
        with seeded(0):
            expected = cf.asymmetry(net, x, sigma, generator=rng())
        with seeded(0):
            torch.testing.assert_close(cf.asymmetry(field, x, sigma, generator=rng()), expected, **TIGHT)
    gradients = []
    for f in (net, field):
        net.zero_grad()
        with second_order(), seeded(0):
            cf.qc_loss(f, x, sigma, weight=1.0, generator=rng()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients, **TIGHT)


@pytest.mark.parametrize("kind", [UNet, FusedUNet, Layered])
def test_activation_checkpointing_inside_an_energy(kind) -> None:
    net = randomised(kind())
    x, sigma = CASES["unet"].batch()
    gradients = []
    for f in (net, Checkpointed(net, reentrant=False)):
        field = cf.EnergyField(cf.DenoiserEnergy(f))
        net.zero_grad()
        with second_order(), seeded(0):
            value = field(x, sigma)
            with torch.no_grad(), seeded(0):
                torch.testing.assert_close(field(x, sigma), value, **TIGHT)
            value.square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients, **TIGHT)


def test_what_activation_checkpointing_cannot_do() -> None:
    x, sigma = CASES["unet"].batch()
    fused = randomised(FusedUNet())
    with pytest.raises(ValueError, match=r"inside 'with curlfree\.operators\.second_order\(\):'"):
        cf.qc_loss(Checkpointed(fused, False), x, sigma, weight=1.0)
    with pytest.raises(ValueError, match=r"activation checkpointing .* use form='double'"):
        cf.qc_loss(Checkpointed(fused, False), x, sigma, weight=1.0, form="dual")
    with pytest.raises(RuntimeError, match=r"set use_reentrant=False"):
        cf.qc_loss(Checkpointed(fused, True), x, sigma, weight=1.0)


class Carrying(nn.Module):
    """A layer that propagates its own tangents; its dropout is PyTorch's own, or drawn when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(randn(4, 6)), nn.Parameter(randn(6, 4, seed=1))

    def forward(self, x: Tensor, sigma: Tensor, **condition: Tensor) -> Tensor:
        return self.tangents(x, sigma, (), **condition)[0]

    def mask(self, h: Tensor, masks: Tensor | None) -> Tensor:
        return nn.functional.dropout(torch.ones_like(h), 0.5, self.training)

    def tangents(self, x, sigma, vs, *, label: Tensor, masks: Tensor | None = None):
        A = label[:, None, None] * self.A
        h = torch.einsum("bi,bij->bj", x * label[:, None], A)
        scale = self.mask(h, masks) / sigma[:, None]
        slope = scale / h.cosh() ** 2
        return scale * torch.tanh(h) @ self.B, tuple(
            slope * torch.einsum("bi,bij->bj", v * label[:, None], A) @ self.B for v in vs
        )


class Drawing(Carrying):
    def mask(self, h: Tensor, masks: Tensor | None) -> Tensor:
        return torch.ones_like(h) if masks is None else masks

    def draw_masks(self, batch: int) -> Tensor:
        return 2 * torch.bernoulli(torch.full((batch, 6), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [Carrying, Drawing])
def test_fields_that_carry_tangents(kind: type[Carrying], training: bool, mode) -> None:
    """Without gradients J v comes from them: equal to the other way, with the dropout of the evaluation."""
    net = kind().train(training)
    with mode():
        x, v, u = randn(5, 4), randn(5, 4, seed=2), randn(5, 4, seed=3)
        sigma, condition = torch.linspace(0.5, 2, 5, dtype=torch.float64), {"label": torch.arange(5.0)}
        with seeded(0):
            value, J = cf.jacobian(net, x, sigma, condition=condition)
            Jv, JTu, again = J @ v, J.T @ u, J @ v
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert not value.requires_grad and not Jv.requires_grad
    assert torch.equal(Jv, again)
    torch.testing.assert_close((u * Jv).sum(1), (JTu * v).sum(1), **TIGHT)
    x, v, sigma, condition = x.clone(), v.clone(), sigma.clone(), {"label": condition["label"].clone()}
    with seeded(0):
        if training and kind is Drawing:
            condition["masks"] = net.draw_masks(5)
        known, K = cf.jacobian(lambda y, s, **c: net(y, s, **c), x, sigma, condition=condition)
    torch.testing.assert_close((value, Jv), (known.detach(), (K @ v).detach()), **TIGHT)


def test_central_differences_converge_with_order_two_and_have_no_transpose() -> None:
    net, (x, sigma) = randomised(MLP(4)), CASES["mlp"].batch()
    v = randn(*x.shape, seed=4)
    _, J = cf.jacobian(net, x, sigma)
    errors = []
    for step in (0.2, 0.1, 0.05):
        value, D = central_difference(net, x, sigma, step=step)
        errors.append(float((D @ v - J @ v).detach().norm()))
    assert torch.equal(value, net(x, sigma))
    orders = [torch.tensor(a / b).log2().item() for a, b in pairwise(errors)]
    assert orders == pytest.approx([2, 2], abs=0.05)
    with pytest.raises(ValueError, match=r"finite differences give J v only"):
        D.T @ v


def test_central_differences_leave_autocast() -> None:
    """Half precision inside a field that returns float32 would look like curvature."""
    field = cf.DenoiserField(randomised(MLP(4, 32)).float())
    x, sigma = (t.float() for t in CASES["mlp"].batch())
    expected = cf.asymmetry(field, x, sigma, estimator="loop", generator=rng())
    with torch.autocast("cpu", torch.bfloat16):
        found = cf.asymmetry(field, x, sigma, estimator="loop", generator=rng())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_compiled_loss_is_refused_with_advice() -> None:
    net, (x, sigma) = randomised(MLP(4)), CASES["mlp"].batch()
    loss = torch.compile(lambda: cf.qc_loss(net, x, sigma, weight=1.0, form="double"), backend="eager")
    with pytest.raises(ValueError, match=r"expected torch\.compile around the network, not"):
        loss()


def test_central_differences_replay_dropout_and_leave_the_random_state_alone() -> None:
    net, (x, sigma) = randomised(UNet()), CASES["unet"].batch()
    with seeded(0):
        _, J = cf.jacobian(net, x, sigma)
        after = torch.get_rng_state()
    with seeded(0):
        _, D = central_difference(net, x, sigma, step=1e-5)
        product = D @ x
        assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(product, J @ x, rtol=1e-7, atol=1e-7)
