"""NCSN++: equal to the published network, and as smooth as the penalty needs it."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from curlfree.nets import PRESETS, NCSNpp, NCSNppConfig
from curlfree.nets.layers import Attention, Down, GroupNorm, ResBlock, Up
from networks import SMALL, random_batch, random_net

DATA = Path(__file__).parent / "data"


def test_published_network_is_reproduced() -> None:
    reference = {
        key: torch.from_numpy(value).double() for key, value in np.load(DATA / "ncsnpp_reference.npz").items()
    }
    net = NCSNpp(NCSNppConfig(width=16, blocks=1)).double().eval()
    net.load_state_dict({k.removeprefix("param/"): v for k, v in reference.items() if k.startswith("param/")})
    x = reference["x"].requires_grad_()
    score = net(x, reference["sigma"])
    (vjp,) = torch.autograd.grad(score[:1], x, reference["probe"])
    assert (score - reference["score"]).abs().max() <= 1e-10
    assert (vjp[:1] - reference["vjp"]).abs().max() <= 1e-10


def test_deep_preset_has_the_published_names_and_shapes() -> None:
    with torch.device("meta"):
        net = NCSNpp(PRESETS["ncsnpp-deep"])
    lines = (DATA / "ncsnpp_deep_parameters.txt").read_text().splitlines()[1:]
    published = [(name, tuple(map(int, shape))) for name, *shape in map(str.split, lines)]
    ours = [(name, tuple(value.shape)) for name, value in net.state_dict().items()]
    assert published == [
        ("sigmas", (1000,)),
        *ours,
    ]  # the sigmas are a buffer that the continuous net ignores
    assert sum(p.numel() for p in net.parameters()) == 107_587_075
    assert [name for name, p in net.named_parameters() if not p.requires_grad] == ["all_modules.0.W"]


@pytest.mark.parametrize(
    ("preset", "low", "high"),
    [("ncsnpp", 60e6, 65e6), ("ncsnpp-small", 11e6, 13e6), ("ncsnpp-tiny", 1e5, 3e5)],
)
def test_preset_sizes(preset: str, low: float, high: float) -> None:
    with torch.device("meta"):
        net = NCSNpp(PRESETS[preset])
    assert low < sum(p.numel() for p in net.parameters()) < high


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 28}, "multiple of 8"),
        ({"attention": (15,)}, "15"),
        ({"dropout": 1.0}, "dropout"),
        ({"classes": 0}, "classes"),
        ({"blocks": 0}, "positive"),
        ({"multipliers": ()}, "positive"),
        ({"width": 68}, "multiple of 4 channels"),
    ],
)
def test_impossible_configurations_are_refused(change: dict, message: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        NCSNpp(replace(NCSNppConfig(), **change))


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    first = NCSNpp(SMALL, seed=3).state_dict()
    torch.manual_seed(1)
    again, other = NCSNpp(SMALL, seed=3).state_dict(), NCSNpp(SMALL, seed=4).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["all_modules.3.weight"], other["all_modules.3.weight"])


def test_initial_weights_have_the_published_variance() -> None:
    block = NCSNpp(NCSNppConfig(width=32, blocks=1)).all_modules[4]
    fan = 9 * 32
    for weight, variance in ((block.Conv_0.weight, 1 / fan), (block.Conv_1.weight, 1e-10 / fan)):
        # the variance of a sample variance of n uniform draws is 0.8 variance^2 / n
        assert abs(weight.var() / variance - 1) < 5 * math.sqrt(0.8 / weight.numel())
        assert weight.abs().max() <= math.sqrt(3 * variance)


def insert_zeros_and_filter(x: Tensor, up: int, down: int, pad: tuple[int, int]) -> Tensor:
    """What the published code computes for resampling, by its definition."""
    n, c, height, width = x.shape
    zeros = x.new_zeros(n, c, height * up, width * up)
    zeros[..., ::up, ::up] = x
    padded = torch.nn.functional.pad(zeros, pad * 2)
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=x.dtype) / 8 * up
    windows = padded.unfold(2, 4, down).unfold(3, 4, down)
    return torch.einsum("nchwij,i,j->nchw", windows, taps, taps)


def test_resampling_is_zero_insertion_and_filter() -> None:
    x, _ = random_batch(extra=0)
    torch.testing.assert_close(Up().double()(x), insert_zeros_and_filter(x, 2, 1, (2, 1)), rtol=0, atol=1e-14)
    torch.testing.assert_close(
        Down().double()(x), insert_zeros_and_filter(x, 1, 2, (1, 1)), rtol=0, atol=1e-14
    )
    torch.testing.assert_close(
        Down().double().smooth(x), insert_zeros_and_filter(x, 1, 1, (2, 2)), rtol=0, atol=1e-14
    )


def test_group_norm_equals_torch() -> None:
    x = random_batch(replace(SMALL, channels=8), extra=0)[0]
    for silu in (False, True):
        norm = GroupNorm(8, silu=silu).double()
        torch.nn.init.normal_(norm.weight)
        expected = torch.nn.functional.group_norm(x, 2, norm.weight, norm.bias, eps=1e-6)
        expected = torch.nn.functional.silu(expected) if silu else expected
        torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-13)


def test_attention_commutes_with_permutations_of_the_pixels() -> None:
    x = random_batch(replace(SMALL, channels=8), extra=0)[0]
    layer = Attention(8, torch.Generator().manual_seed(0)).double()
    torch.nn.init.normal_(layer.NIN_3.W)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))

    def permute(h: Tensor) -> Tensor:
        return h.flatten(2)[..., order].unflatten(2, (8, 8))

    assert (layer(x) - x).abs().max() > 0.1
    torch.testing.assert_close(layer(permute(x)), permute(layer(x)), rtol=0, atol=1e-12)


def test_samples_do_not_mix() -> None:
    net, (x, sigma) = random_net(), random_batch(batch=3, extra=0)
    J = torch.autograd.functional.jacobian(lambda x: net(x, sigma).flatten(1).sum(1), x)
    own = torch.eye(3, dtype=torch.bool)
    assert (J.flatten(2).norm(dim=2)[~own] == 0).all()
    assert (J.flatten(2).norm(dim=2)[own] > 0).all()
    torch.testing.assert_close(net(x[1:2], sigma[1:2]), net(x, sigma)[1:2], rtol=1e-12, atol=1e-12)


def test_forward_mode_equals_double_reverse_mode() -> None:
    net, (x, sigma, v) = random_net(), random_batch()
    x.requires_grad_()
    score = net(x, sigma)
    u = torch.zeros_like(score, requires_grad=True)
    (vjp,) = torch.autograd.grad(score, x, u, create_graph=True)
    (expected,) = torch.autograd.grad(vjp, u, v)
    functional = torch.func.jvp(lambda x: net(x, sigma), (x.detach(),), (v,))[1]
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(net(forward_ad.make_dual(x.detach(), v), sigma)).tangent
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(functional, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(dual, expected, rtol=0, atol=1e-10)


def test_penalty_gradient_equals_dense_double_backward() -> None:
    """The gradient of ||(J - J^T) v||^2/2 from two products, against that from the dense Jacobian."""
    net, (x, sigma, v) = random_net(), random_batch(batch=1)
    J = torch.autograd.functional.jacobian(lambda x: net(x, sigma), x, create_graph=True).view(64, 64)
    weights = {name: p for name, p in net.named_parameters() if p.requires_grad}
    weights.pop(f"all_modules.{len(net.all_modules) - 1}.bias")  # J does not depend on it
    dense = torch.autograd.grad(0.5 * ((J - J.T) @ v.view(64)).square().sum(), weights.values())

    _, Jv = torch.func.jvp(lambda x: net(x, sigma), (x,), (v,))
    leaf = x.clone().requires_grad_()
    (JTv,) = torch.autograd.grad(net(leaf, sigma), leaf, v, create_graph=True)
    products = torch.autograd.grad(0.5 * (Jv - JTv).square().sum(), weights.values())
    for name, ours, expected in zip(weights, products, dense, strict=True):
        assert (ours - expected).norm() <= 1e-10 * expected.norm() + 1e-14, name


def test_third_derivatives_of_an_energy_equal_finite_differences() -> None:
    """Energy built on the net, its gradient as the score, a penalty on that: gradient in the weights."""
    net, (x, sigma, v) = random_net(), random_batch(batch=1)
    weights = [p for p in net.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(5)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in weights]

    def penalty() -> Tensor:
        leaf = x.clone().requires_grad_()
        energy = 0.5 * net(leaf, sigma).square().sum()
        (score,) = torch.autograd.grad(-energy, leaf, create_graph=True)
        (product,) = torch.autograd.grad(score, leaf, v, create_graph=True)
        return product.square().mean()

    def moved(step: float) -> Tensor:
        with torch.no_grad():
            for p, d in zip(weights, direction, strict=True):
                p.add_(d, alpha=step)
        value = penalty().detach()
        with torch.no_grad():
            for p, d in zip(weights, direction, strict=True):
                p.sub_(d, alpha=step)
        return value

    gradient = torch.autograd.grad(penalty(), weights, allow_unused=True)
    slope = sum((g * d).sum() for g, d in zip(gradient, direction, strict=True) if g is not None)
    h = 1e-4  # five-point rule: error h^4 against rounding 1e-16 / h
    numeric = (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h)
    assert abs(slope / numeric - 1) < 1e-6


def test_channels_last_changes_nothing_but_the_layout() -> None:
    net, (x, sigma, v) = random_net(), random_batch()
    score, (Jv,) = net.tangents(x, sigma, (v,))
    net = net.to(memory_format=torch.channels_last)
    layouts = []
    for module in net.all_modules:
        module.register_forward_hook(lambda _m, _a, out: layouts.append(out))
    ours, (ours_Jv,) = net.tangents(x.to(memory_format=torch.channels_last), sigma, (v,))
    images = [out for out in layouts if out.ndim == 4]
    assert len(images) > 10
    assert all(out.is_contiguous(memory_format=torch.channels_last) for out in images)
    torch.testing.assert_close(ours, score, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(ours_Jv, Jv, rtol=1e-11, atol=1e-11)


def test_autocast_to_bfloat16_is_close_and_trains() -> None:
    net, (x, sigma, v) = random_net().float(), random_batch()
    x, sigma, v = x.float(), sigma.float(), v.float()
    score, (Jv,) = net.tangents(x, sigma, (v,))
    with torch.autocast("cpu", torch.bfloat16):
        low, (low_Jv,) = net.tangents(x, sigma, (v,))
    assert low.dtype == low_Jv.dtype == torch.float32
    for ours, expected in ((low, score), (low_Jv, Jv)):
        error = (ours - expected).norm() / expected.norm()
        assert 1e-6 < error < 0.1  # bfloat16 has a relative precision of 2^-8; the net has a dozen layers
    low.square().sum().backward()
    gradients = [p.grad for p in net.parameters() if p.requires_grad]
    assert all(g is not None and g.dtype == torch.float32 and torch.isfinite(g).all() for g in gradients)


def test_blocks_compile_to_one_graph() -> None:
    """A residual block with resampling and dropout, then attention: value, tangents and gradient."""
    generator = torch.Generator().manual_seed(0)
    block = ResBlock(8, 12, 16, Down(), generator).double()
    attention = Attention(12, generator).double()
    h = torch.randn(4, 8, 8, 8, generator=generator, dtype=torch.float64)
    t = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 12, 4, 4, generator=generator).bernoulli(generator=generator).double()

    def loss(h: Tensor) -> Tensor:
        return attention(block(h, t, 1, mask), 1).square().sum()

    def value_and_gradient(function) -> tuple[Tensor, Tensor]:
        value = function(h)
        return value, torch.autograd.grad(value, block.Conv_0.weight)[0]

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(value_and_gradient(compiled), value_and_gradient(loss), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_network_compiles_to_one_graph(backend: str) -> None:
    net, (x, sigma, v) = random_net().train(), random_batch()
    masks = net.draw_masks(2, torch.Generator().manual_seed(0))
    weight = net.all_modules[3].weight

    def value_and_gradient(function) -> tuple[Tensor, ...]:
        score, (Jv,) = function(x, sigma, (v,), masks=masks)
        return score, Jv, *torch.autograd.grad((score * v).sum() + (Jv * v).sum(), weight)

    compiled = torch.compile(net.tangents, fullgraph=True, backend=backend)
    for ours, expected in zip(value_and_gradient(compiled), value_and_gradient(net.tangents), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_forward_mode_compiles() -> None:
    net, (x, sigma, v) = random_net(), random_batch()

    def product(x: Tensor, v: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: net(x, sigma), (x,), (v,))[1]

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, v), product(x, v), rtol=1e-10, atol=1e-10)


def test_classes_enter_through_the_embedding() -> None:
    net, (x, sigma) = random_net(replace(SMALL, classes=3)), random_batch(extra=0)
    null = torch.tensor([3, 3])
    assert torch.equal(net(x, sigma), net(x, sigma, null))
    first, second = net(x, sigma, torch.tensor([0, 1])), net(x, sigma, torch.tensor([0, 2]))
    assert torch.equal(first[0], second[0])
    assert (first[1] - second[1]).abs().max() > 1e-3
    assert (first[0] - net(x, sigma)[0]).abs().max() > 1e-3


def test_arguments_that_do_not_fit_are_refused() -> None:
    net, (x, sigma) = random_net(), random_batch(extra=0)
    with pytest.raises(ValueError, match=r"x must have shape \(B, 1, 8, 8\), got \(2, 1, 8, 4\)"):
        net(x[..., :4], sigma)
    with pytest.raises(ValueError, match=r"sigma must have shape \(2,\)"):
        net(x, sigma[:1])
    with pytest.raises(ValueError, match="got None"):
        net(x, None)
    with pytest.raises(ValueError, match="direction"):
        net.tangents(x, sigma, (x[:1],))
    masks = net.draw_masks(3, torch.Generator().manual_seed(0))
    for wrong in (masks, masks[:-1]):
        with pytest.raises(ValueError, match=r"draw_masks\(2\)"):
            net(x, sigma, masks=wrong)
    with pytest.raises(ValueError, match="without classes"):
        net(x, sigma, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="labels must have shape"):
        random_net(replace(SMALL, classes=2))(x, sigma, torch.tensor([0]))
