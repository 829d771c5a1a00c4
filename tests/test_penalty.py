"""The penalty: its value and its gradient, against brute force in double precision and in users' loops."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import curlfree as cf
from cases import CASES, MLP, UNet, dense, mixture, randn, randomised, rng, seeded
from curlfree.penalty import estimates, restrict

# With dropout in those made of a U-Net.
NETS = ["mlp", "unet", "energy", "convolutional energy", "force", "paper", "autoencoder"]


def gradients(module: nn.Module) -> Tensor:
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in module.parameters()]
    )


def gradient_of(loss: Callable[[], Tensor], module: nn.Module) -> tuple[Tensor, Tensor]:
    """The loss and the gradient that one ordinary backward leaves, with a fixed random state."""
    module.zero_grad()
    with seeded(3):
        value = loss()
        value.backward()
    return value.detach(), gradients(module)


def from_matrix(name: str, J: Tensor, v: Tensor) -> Tensor:
    """The estimate of one probe by its definition."""
    v = v.flatten(1)
    Jv, vJ = torch.einsum("bij,bj->bi", J, v), torch.einsum("bij,bi->bj", J, v)
    if name == "skew":
        return 0.5 * (Jv - vJ).square().sum(1)
    if name == "paper":
        return vJ.square().sum(1) - (vJ * Jv).sum(1)
    return 0.5 * (J - J.mT).square().sum((1, 2))


class Tilted(nn.Module):
    """An energy's field times a fixed matrix: no longer a gradient, so that its penalty has a gradient."""

    def __init__(self, field: nn.Module, size: int) -> None:
        super().__init__()
        self.field = field
        self.register_buffer("A", randn(size, size, seed=7))

    def forward(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        return (self.field(x, sigma).flatten(1) @ self.A).view_as(x)


def network(name: str) -> tuple[nn.Module, Tensor, Tensor | None]:
    case = CASES[name]
    field, (x, sigma) = case.make(), case.batch()
    return (Tilted(field, x[0].numel()) if case.conservative else field), x, sigma


@pytest.mark.parametrize("name", NETS)
def test_gradient_equals_brute_force(name: str) -> None:
    net, x, sigma = network(name)
    weight = torch.tensor([0.1, 2.0, 0.7], dtype=torch.float64)
    v = cf.rademacher(x, rng(5))
    for estimator, forms in {
        "skew": ("double", "dual"),
        "paper": ("double", "dual"),
        "exact": ("double",),
    }.items():
        value, expected = gradient_of(
            lambda estimator=estimator: (weight * from_matrix(estimator, dense(net, x, sigma), v)).mean(), net
        )
        assert expected.norm() > 1e-3
        for form in forms:
            found, gradient = gradient_of(
                lambda estimator=estimator, form=form: cf.qc_loss(
                    net, x, sigma, weight=weight, estimator=estimator, form=form, generator=rng(5)
                ),
                net,
            )
            assert float((found - value).abs() / value.abs()) < 1e-12
            assert float((gradient - expected).norm() / expected.norm()) < 1e-11


@pytest.mark.parametrize("form", ["double", "dual"])
@pytest.mark.parametrize("name", ["energy", "convolutional energy", "tied autoencoder"])
def test_conservative_networks_are_not_penalised(name: str, form: str) -> None:
    field, (x, sigma) = CASES[name].make(), CASES[name].batch()
    value, gradient = gradient_of(
        lambda: cf.qc_loss(field, x, sigma, weight=1.0, form=form, generator=rng()), field
    )
    scale = gradient_of(lambda: cf.estimators.moments(field, x, sigma, generator=rng())[1].mean(), field)[1]
    assert float(value) < 1e-20 * float(scale.norm())
    assert gradient.norm() < 1e-9 * scale.norm()


@pytest.mark.parametrize("name", ["mlp", "unet", "energy"])
def test_algorithm_1_equals_one_backward(name: str) -> None:
    net, x, sigma = network(name)
    v = cf.rademacher(x, rng(5))
    weight = torch.tensor([0.1, 2.0, 0.7], dtype=torch.float64)
    net.zero_grad()
    with seeded(3):
        value = cf.algorithm1(net, x, sigma, v, weight=weight)
    expected = gradients(net)
    assert not value.requires_grad
    for form in ("double", "dual"):
        found, gradient = gradient_of(
            lambda form=form: cf.qc_loss(
                net, x, sigma, weight=weight, estimator="paper", form=form, generator=rng(5)
            ),
            net,
        )
        torch.testing.assert_close(found, value, rtol=1e-12, atol=0)
        assert float((gradient - expected).norm() / expected.norm()) < 1e-10


def test_algorithm_1_without_its_second_stage_is_wrong() -> None:
    """Stage (5) is not idle: the stop-gradient alone loses most of the gradient."""
    net, x, sigma = network("mlp")
    v = cf.rademacher(x, rng(5))
    y = x.clone().requires_grad_()
    s = net(y, sigma)
    (vJ,) = torch.autograd.grad((v * s).sum(), y, create_graph=True)
    stopped = vJ.detach()
    (vJJ,) = torch.autograd.grad((stopped * s).sum(), y, create_graph=True)
    net.zero_grad()
    (vJ.square().sum() - (vJJ * v).sum()).div(len(x)).backward()
    stage4 = gradients(net)
    net.zero_grad()
    cf.algorithm1(net, x, sigma, v)
    assert (stage4 - gradients(net)).norm() > 0.1 * gradients(net).norm()


def square(h: Tensor) -> Tensor:
    return h[:, :4].view(3, 2, 2)


# Operations on (3, 8): some of PyTorch's higher derivatives of these are wrong or missing (curlfree.mended).
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer norm": lambda h: F.layer_norm(h, (8,), torch.arange(1.0, 9, dtype=h.dtype), torch.ones_like(h[0])),
    "layer norm of pairs": lambda h: torch.layer_norm(h.view(3, 2, 4), (2, 4)).view(3, 8),
    "instance norm": lambda h: F.instance_norm(h.view(3, 2, 4)).view(3, 8),
    "instance norm evaluated": lambda h: F.instance_norm(
        h.view(3, 2, 4),
        torch.zeros(2, dtype=h.dtype),
        torch.ones(2, dtype=h.dtype),
        use_input_stats=False,
    ).view(3, 8),
    "batch norm evaluated": lambda h: F.batch_norm(h, torch.zeros_like(h[0]), torch.ones_like(h[0])) ** 2,
    "group norm": lambda h: F.group_norm(h, 2),
    "rms norm": lambda h: F.rms_norm(h, (8,)),
    "rms norm of pairs": lambda h: torch.rms_norm(h.view(3, 2, 4), (2, 4), randn(2, 4), 1e-3).view(3, 8),
    "softmax": lambda h: F.softmax(h, dim=-1),
    "softmax method": lambda h: h.softmax(-1),
    "softmin": lambda h: F.softmin(h, dim=-1),
    "log softmax": lambda h: F.log_softmax(h, dim=-1),
    "logsumexp": lambda h: h * torch.logsumexp(h, -1, keepdim=True),
    "attention": lambda h: F.scaled_dot_product_attention(*[h.view(3, 1, 4, 2)] * 3).reshape(3, 8),
    "causal attention": lambda h: F.scaled_dot_product_attention(
        *[h.view(3, 4, 2)] * 3, is_causal=True
    ).view(3, 8),
    "glu": lambda h: F.glu(torch.cat([h, h.flip(1)], 1)),
    "silu": F.silu,
    "gelu": F.gelu,
    "convolution": lambda h: F.conv1d(h[:, None], randn(1, 1, 3), padding=1)[:, 0] ** 2,
    "interpolation": lambda h: F.interpolate(F.avg_pool1d(h[:, None], 2), scale_factor=2.0)[:, 0] ** 2,
    "transformer": nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        randomised(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)),
        nn.Flatten(),
    ),
    "determinant": lambda h: h * torch.linalg.det(square(h))[:, None],
    "solve": lambda h: torch.linalg.solve(3 * torch.eye(2) + square(h), h.view(3, 2, 4)).reshape(3, 8),
}  # fmt: skip


def through(operation: Callable[[Tensor], Tensor], energy: bool) -> Callable[[Tensor], Callable[..., Tensor]]:
    """W -> a field, not conservative, with the operation inside; or with its gradient inside."""
    tilt = randn(8, 8, seed=8)

    def make(W: Tensor) -> Callable[..., Tensor]:
        if energy:
            field = cf.EnergyField(lambda y, _: (operation(torch.tanh(y @ W)) @ tilt).sin().sum(1))
            return lambda y, _: field(y, None) @ tilt
        return lambda y, _: operation(torch.tanh(y @ W)) @ tilt

    return make


@pytest.mark.parametrize("energy", [False, True], ids=["field", "energy"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradient_through_each_operation_equals_finite_differences(name: str, energy: bool) -> None:
    """The value is right whatever PyTorch's third derivatives are; its differences are the truth."""
    make = through(OPERATIONS[name], energy)
    x, W, direction = randn(3, 8), randn(8, 8, seed=1) / 2, randn(8, 8, seed=2)

    def penalty(matrix: Tensor, form: str) -> Tensor:
        field = make(matrix.requires_grad_())
        return cf.qc_loss(field, x, weight=1.0, form=form, generator=rng())

    def slope(h: float) -> float:
        ends = [float(penalty(W + s * direction, "double").detach()) for s in (h, -h)]
        return (ends[0] - ends[1]) / (2 * h)

    expected = (4 * slope(5e-5) - slope(1e-4)) / 3  # Richardson: error O(h^4)
    assert abs(expected) > 1e-3
    for form in ("double", "dual"):
        if form == "dual" and name in ("determinant", "solve"):
            with pytest.raises(ValueError, match=r"determinants and linear solves.*use form='double'"):
                penalty(W.clone(), form)
            continue
        matrix = W.clone()
        penalty(matrix, form).backward()
        found = float((matrix.grad * direction).sum())
        assert found == pytest.approx(expected, rel=2e-7)


def test_layer_norm_in_plain_pytorch_has_a_wrong_third_derivative() -> None:
    """Why `curlfree.mended` exists. If this fails PyTorch has been mended and its rule can go."""
    h, u, v = randn(3, 8).requires_grad_(), randn(3, 8, seed=1).requires_grad_(), randn(3, 8, seed=2)

    def Jv(norm: Callable[[Tensor], Tensor]) -> Tensor:
        (pulled,) = torch.autograd.grad((norm(h) * u).sum(), h, create_graph=True)
        return torch.autograd.grad(pulled, u, v, create_graph=True)[0]

    def by_hand(y: Tensor) -> Tensor:
        y = y - y.mean(1, keepdim=True)
        return y * (y.square().mean(1, keepdim=True) + 1e-5).rsqrt()

    def fused(y: Tensor) -> Tensor:
        return F.layer_norm(y, (8,))

    torch.testing.assert_close(Jv(fused), Jv(by_hand), rtol=1e-10, atol=1e-12)
    a, b = (torch.autograd.grad(Jv(norm).square().sum(), h)[0] for norm in (fused, by_hand))
    assert (a - b).norm() > 0.01 * b.norm()


def test_normalisations_keep_their_values_and_types() -> None:
    x = randn(3, 8)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for norm in (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm):
            value, _ = cf.jacobian(lambda y, _, norm=norm: norm(y, (8,)), x.to(dtype))
            assert value.dtype == dtype
            torch.testing.assert_close(value, norm(x.to(dtype), (8,)))
            weighted, _ = cf.jacobian(
                lambda y, _, norm=norm: norm(y, (8,), torch.ones_like(y[0])), x.to(dtype)
            )
            assert torch.equal(weighted, value)


@pytest.mark.parametrize("form", ["double", "dual"])
def test_weights(form: str) -> None:
    net, x, sigma = network("mlp")
    v = cf.rademacher(x, rng(5))
    each = from_matrix("skew", dense(net, x, sigma), v)
    for weight in (0.1, torch.tensor(0.1, dtype=torch.float64), sigma**2, 3):
        found = cf.qc_loss(net, x, sigma, weight=weight, form=form, generator=rng(5))
        torch.testing.assert_close(found, (weight * each).mean(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", ["double", "dual"])
@pytest.mark.parametrize("estimator", ["skew", "paper"])
def test_several_probes_are_the_mean_over_them(form: str, estimator: str) -> None:
    net, x, sigma = network("mlp")
    draws, generator = [], rng(5)
    for _ in range(3):
        draws.append(from_matrix(estimator, dense(net, x, sigma), cf.rademacher(x, generator)))
    expected, gradient = gradient_of(lambda: torch.stack(draws).mean(), net)
    found = gradient_of(
        lambda: cf.qc_loss(
            net, x, sigma, weight=1.0, probes=3, form=form, estimator=estimator, generator=rng(5)
        ),
        net,
    )
    torch.testing.assert_close(found, (expected, gradient), rtol=1e-11, atol=1e-13)


def test_the_scalar_is_the_estimate_not_the_surrogate() -> None:
    """A field linear in its parameter: penalty = theta^2 c, so value = theta * gradient / 2."""
    theta = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    A = randn(4, 4)
    for form in ("double", "dual"):
        loss = cf.qc_loss(
            lambda y, _: theta * torch.tanh(y) @ A, randn(3, 4), weight=1.0, form=form, generator=rng()
        )
        (slope,) = torch.autograd.grad(loss, theta)
        torch.testing.assert_close(loss.detach(), 0.5 * theta.detach() * slope)


def test_a_fraction_of_the_batch_is_unbiased() -> None:
    """z-scores of value and gradient over 300 subsets of each size."""
    theta = torch.linspace(1, 2, 5, dtype=torch.float64).requires_grad_()
    x = randn(5, 2)
    weight = torch.linspace(0.5, 3, 5, dtype=torch.float64)

    def field(y: Tensor, _: Tensor | None, theta: Tensor) -> Tensor:
        return theta[:, None] * torch.stack([-y[:, 1], y[:, 0]], 1)

    whole = cf.qc_loss(field, x, weight=weight, condition={"theta": theta})
    (expected,) = torch.autograd.grad(whole, theta)
    torch.testing.assert_close(whole, (weight * 4 * theta**2).mean())
    for fraction, size in {0.01: 1, 0.3: 2, 0.5: 2, 0.79: 4, 1.0: 5}.items():
        generator, draws = rng(1), []
        for _ in range(1 if size == 5 else 300):
            loss = cf.qc_loss(
                field, x, weight=weight, condition={"theta": theta}, fraction=fraction, generator=generator
            )
            draws.append(torch.cat([loss.detach()[None], torch.autograd.grad(loss, theta)[0]]))
            assert int((draws[-1][1:] != 0).sum()) == size
        samples = torch.stack(draws)
        truth = torch.cat([whole.detach()[None], expected])
        if size == 5:
            assert torch.equal(samples[0], truth)
        else:
            z = (samples.mean(0) - truth) / (samples.std(0) / math.sqrt(len(samples)))
            assert z.abs().max() < 4


def test_auto_fraction_and_auto_form() -> None:
    net, x, sigma = network("mlp")
    seen = []

    def field(y: Tensor, s: Tensor | None) -> Tensor:
        seen.append(len(y))
        return net(y, s)

    cf.qc_loss(field, x.repeat(64, 1), sigma.repeat(64), weight=1.0, fraction="auto")
    assert seen == [192 // 32]
    field.tangents = lambda y, s, vs: (
        net(y, s),
        tuple(torch.func.jvp(lambda q: net(q, s), (y,), (v,))[1] for v in vs),
    )
    plain = gradient_of(lambda: cf.qc_loss(net, x, sigma, weight=1.0, generator=rng()), net)
    own = gradient_of(lambda: cf.qc_loss(field, x, sigma, weight=1.0, generator=rng()), net)
    assert seen == [6]  # the field's own tangents were used
    torch.testing.assert_close(own, plain, rtol=1e-11, atol=1e-13)


def test_labels_go_with_their_samples() -> None:
    embedding = nn.Embedding(10, 4).double()
    x, sigma, labels = randn(8, 4), torch.linspace(0.5, 2, 8, dtype=torch.float64), torch.arange(8)
    seen = []

    def field(y: Tensor, s: Tensor | None, label: Tensor, scale: float, table: Tensor) -> Tensor:
        seen.append((y.detach(), s, label, scale, table))
        return scale * torch.tanh(y.roll(1, 1) * embedding(label))

    condition = {"label": labels, "scale": 2.0, "table": torch.zeros(3)}
    for form in ("double", "dual"):
        cf.qc_loss(field, x, sigma, weight=1.0, fraction=0.5, form=form, condition=condition, generator=rng())
    for y, s, label, scale, table in seen:
        assert len(label) == 4
        assert torch.equal(y, x[label])
        assert torch.equal(s, sigma[label])
        assert (scale, table.shape) == (2.0, (3,))
    assert torch.equal(seen[0][2], seen[1][2])


def test_the_penalty_never_writes_into_x() -> None:
    net, x, sigma = network("mlp")
    x = x.clone().requires_grad_()
    for form in ("double", "dual"):
        cf.qc_loss(net, x, sigma, weight=1.0, form=form).backward()
    assert x.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_values_without_gradients(mode) -> None:
    """A validation loop logs the penalty with the training configuration."""
    net, x, sigma = network("unet")
    embedding = nn.Embedding(3, 32).double()

    def classes(y: Tensor, _: Tensor | None, label: Tensor) -> Tensor:
        return torch.tanh(y.roll(1, 1) * embedding(label))

    for form in ("double", "dual"):
        with seeded(0):
            expected = cf.qc_loss(net, x, sigma, weight=1.0, form=form, generator=rng()).detach()
        with mode(), seeded(0):
            found = cf.qc_loss(net, x.clone(), sigma.clone(), weight=1.0, form=form, generator=rng())
        assert not found.requires_grad
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        with mode():
            condition = {"label": torch.arange(3)}
            labelled = cf.qc_loss(classes, x.flatten(1), weight=1.0, form=form, condition=condition)
        assert labelled > 0


@pytest.mark.parametrize("form", ["double", "dual"])
def test_autocast(form: str) -> None:
    net = randomised(MLP(8, 32)).float()
    x = randn(16, 8).float()
    expected = gradient_of(lambda: cf.qc_loss(net, x, weight=1.0, form=form, generator=rng()), net)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cf.qc_loss(net, x, weight=1.0, form=form, generator=rng())

    found = gradient_of(loss, net)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0], rtol=0.05, atol=0)
    assert F.cosine_similarity(found[1], expected[1], dim=0) > 0.99


def _worker(rank: int, folder: str) -> None:
    """One process of two: score matching and the penalty on its half of the batch, one backward."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        for form, wrapped in itertools.product(("double", "dual"), (False, True)):
            net = randomised(UNet(dropout=0.0))
            model = DistributedDataParallel(net)
            x, sigma, z, v = (part.chunk(2)[rank] for part in _ddp_data())
            loss = cf.dsm(model, x, sigma, z).mean()
            penalty = cf.qc_loss(
                model if wrapped else net, x + sigma.view(-1, 1, 1, 1) * z, sigma,
                weight=sigma**2, form=form, probe=lambda like, _, v=v: v,
            )  # fmt: skip
            (loss + penalty).backward()
            torch.save(gradients(net), f"{folder}/{form}{wrapped}{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def _ddp_data() -> tuple[Tensor, ...]:
    x = randn(4, 2, 4, 4)
    return (
        x,
        torch.linspace(0.5, 2, 4, dtype=torch.float64),
        randn(4, 2, 4, 4, seed=1),
        cf.rademacher(x, rng(2)),
    )


def test_distributed_data_parallel(tmp_path: Path) -> None:
    """Two processes get the gradient of one, whether the penalty is given the wrapped network or the bare."""
    torch.multiprocessing.spawn(_worker, (str(tmp_path),), nprocs=2)
    net = randomised(UNet(dropout=0.0))
    x, sigma, z, v = _ddp_data()
    noisy = x + sigma.view(-1, 1, 1, 1) * z
    (
        cf.dsm(net, x, sigma, z).mean()
        + cf.qc_loss(net, noisy, sigma, weight=sigma**2, probe=lambda like, _: v)
    ).backward()
    expected = gradients(net)
    for file in tmp_path.glob("*.pt"):
        found = torch.load(file, weights_only=True)
        assert float((found - expected).norm() / expected.norm()) < 1e-12
    assert len(list(tmp_path.glob("*.pt"))) == 8


class NoForwardRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def test_what_the_dual_cannot_do() -> None:
    x = randn(3, 4)
    rotate = randn(4, 4)
    with pytest.raises(ValueError, match=r"forward-mode derivatives.*none; use form='double'"):
        cf.qc_loss(lambda y, _: NoForwardRule.apply(y) @ rotate, x, weight=1.0, form="dual")
    cf.qc_loss(lambda y, _: NoForwardRule.apply(y) @ rotate, x, weight=1.0, form="double")
    with pytest.raises(ValueError, match=r"lost the forward-mode tangent.*form='double'"):
        cf.qc_loss(lambda y, _: y.detach() * torch.ones(4).requires_grad_(), x, weight=1.0, form="dual")
    with pytest.raises(ValueError, match=r"the detached dual exists for skew and paper, got 'exact'"):
        cf.qc_loss(lambda y, _: y, x, weight=1.0, form="dual", estimator="exact")
    generator = rng()

    def noisy(y: Tensor, _: Tensor | None) -> Tensor:
        return y * (1 + torch.rand(1, generator=generator))

    with pytest.raises(ValueError, match=r"two values at one point.*use form='double'"):
        cf.qc_loss(noisy, x, weight=1.0, form="dual")
    with pytest.raises(ValueError, match=r"batch normalisation in training mode mixes samples.*GroupNorm"):
        cf.qc_loss(lambda y, _: F.batch_norm(y, None, None, training=True), x, weight=1.0)


def test_a_frozen_network_has_a_value_in_both_forms() -> None:
    """Parameters that need no gradient: nothing to train, but the estimate exists."""
    net, x, sigma = network("mlp")
    expected = cf.qc_loss(net, x, sigma, weight=1.0, generator=rng()).detach()
    net.requires_grad_(False)
    for form in ("double", "dual"):
        found = cf.qc_loss(net, x, sigma, weight=1.0, form=form, generator=rng())
        torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=0)


def test_estimates_are_the_penalty_per_sample() -> None:
    net, x, sigma = network("mlp")
    for form in ("auto", "double", "dual"):
        each = estimates(net, x, sigma, form=form, generator=rng())
        assert each.shape == (3,)
        torch.testing.assert_close(
            (2 * each).mean(), cf.qc_loss(net, x, sigma, weight=2.0, form=form, generator=rng())
        )


def asymmetry_after(steps: int, weight: float, form: str) -> float:
    """Train a small score network on a mixture; return its mean exact asymmetry."""
    data, net = mixture(), randomised(MLP(2, 24))
    optimiser, generator = torch.optim.Adam(net.parameters(), 1e-2), rng()
    for _ in range(steps):
        x0 = data.sample(128, generator, torch.float64)
        sigma = torch.full((128,), 0.5, dtype=torch.float64)
        z = torch.randn(x0.shape, generator=generator, dtype=torch.float64)
        loss = cf.dsm(net, x0, sigma, z).mean()
        if weight:
            loss = loss + cf.qc_loss(net, x0 + 0.5 * z, sigma, weight=weight, form=form, generator=generator)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    x = randn(200, 2, seed=9)
    sigma = torch.full((200,), 0.5, dtype=torch.float64)
    return cf.asymmetry(net, x, sigma, estimator="exact").mean().item()


@pytest.mark.parametrize("form", ["double", "dual"])
def test_training_with_the_penalty_makes_a_field_conservative(form: str) -> None:
    assert asymmetry_after(150, 1.0, form) < 0.25 * asymmetry_after(150, 0.0, form)


def test_conditions_inside_lists_and_dictionaries_follow_the_chosen_samples() -> None:
    x, labels = randn(8, 2), torch.arange(8, dtype=torch.float64)
    chosen = torch.tensor([5, 2])
    found = restrict({"a": {"b": [labels, (labels, "name")]}, "scale": 2.0, "table": labels[:3]}, chosen, 8)
    assert found is not None
    (first, (second, name)), table = found["a"]["b"], found["table"]
    assert torch.equal(first, labels[chosen]) and torch.equal(second, labels[chosen])
    assert (name, found["scale"]) == ("name", 2.0)
    assert torch.equal(table, labels[:3])

    def field(y: Tensor, _: Tensor | None, *, nested: dict[str, Tensor]) -> Tensor:
        return nested["label"][:, None] * torch.stack([-y[:, 1], y[:, 0]], 1)

    value = cf.qc_loss(field, x, weight=1.0, fraction=0.25, condition={"nested": {"label": labels}})
    assert float(value) >= 2 * (0**2 + 1**2)  # Asym is 4 label^2


class Counted(nn.Module):
    """A field with tangents of its own that counts its evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.A, self.calls = nn.Parameter(randn(4, 4)), []

    def forward(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        return torch.tanh(x) @ self.A

    def tangents(self, x: Tensor, sigma: Tensor | None, vs: tuple[Tensor, ...]):
        self.calls.append(len(vs))
        return self(x, sigma), tuple((v / torch.cosh(x) ** 2) @ self.A for v in vs)


def test_probes_share_the_passes_of_the_dual() -> None:
    field, x = Counted(), randn(5, 4)
    found = gradient_of(lambda: cf.qc_loss(field, x, weight=1.0, probes=3, generator=rng()), field)
    assert field.calls == [3, 6]
    expected = gradient_of(
        lambda: cf.qc_loss(field, x, weight=1.0, probes=3, form="double", generator=rng()), field
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
