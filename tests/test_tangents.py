"""Tangents carried by hand through NCSN++, against automatic differentiation."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from curlfree.nets import NCSNpp
from curlfree.nets.layers import HALF, Attention, Conv, Down, GroupNorm, PyramidConv, ResBlock, Up
from networks import SMALL, random_batch, random_net


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _block(resample: Down | Up | None, size: int) -> Callable[[Tensor, int], Tensor]:
    block = ResBlock(8, 12, 16, resample, _generator(), dropout=0.3).double()
    t = torch.randn(2, 16, generator=_generator(), dtype=torch.float64)
    mask = torch.bernoulli(torch.full((2, 12, size, size), 0.7), generator=_generator()).bool()
    return lambda h, k: block(h, t, k, mask)


LAYERS = {
    "conv": Conv(8, 5, 3, _generator()).double(),
    "norm": GroupNorm(8, silu=False).double(),
    "norm and SiLU": GroupNorm(8, silu=True).double(),
    "attention": Attention(8, _generator()).double(),
    "pyramid": PyramidConv(8, 5, _generator()).double(),
    "block": _block(None, 8),
    "block down": _block(Down(), 4),
    "block up": _block(Up(), 16),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_forward_mode(name: str) -> None:
    layer = LAYERS[name]
    x, _, v, w = random_batch(replace(SMALL, channels=8), extra=2)
    stack = layer(torch.cat([x, v, w]), 2).unflatten(0, (3, 2))
    torch.testing.assert_close(stack[0], layer(x, 0), rtol=1e-12, atol=1e-12)
    for tangent, direction in zip(stack[1:], (v, w), strict=True):
        expected = torch.func.jvp(lambda h: layer(h, 0), (x,), (direction,))[1]
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(tangent, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("classes", [None, 3])
def test_products_equal_forward_mode(train: bool, classes: int | None) -> None:
    net = random_net(replace(SMALL, classes=classes)).train(train)
    x, sigma, v, w = random_batch(extra=2)
    masks = net.draw_masks(2, _generator()) if train else None
    labels = None if classes is None else torch.tensor([2, 0])
    score, products = net.tangents(x, sigma, (v, w), labels, masks)
    for product, direction in zip(products, (v, w), strict=True):
        value, expected = torch.func.jvp(lambda x: net(x, sigma, labels, masks), (x,), (direction,))
        torch.testing.assert_close(score, value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(product, expected, rtol=1e-12, atol=1e-12)


def _weights(net: NCSNpp) -> dict[str, Tensor]:
    """The trained weights that the Jacobian depends on."""
    weights = {name: p for name, p in net.named_parameters() if p.requires_grad}
    weights.pop(f"all_modules.{len(net.all_modules) - 1}.bias")
    return weights


def _reverse_products(
    net: NCSNpp, x: Tensor, sigma: Tensor, v: Tensor, masks: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """J v and J^T v, both from reverse mode alone, to be differentiated in the weights."""
    leaf = x.clone().requires_grad_()
    score = net(leaf, sigma, masks=masks)
    u = torch.zeros_like(score, requires_grad=True)
    (JTu,) = torch.autograd.grad(score, leaf, u, create_graph=True)
    (Jv,) = torch.autograd.grad(JTu, u, v, create_graph=True)
    (JTv,) = torch.autograd.grad(score, leaf, v, create_graph=True)
    return Jv, JTv


def test_weight_gradients_equal_double_backward() -> None:
    net, (x, sigma, v, q) = random_net().train(), random_batch(extra=2)
    masks, weights = net.draw_masks(2, _generator()), _weights(net)
    Jv, _ = _reverse_products(net, x, sigma, v, masks)
    expected = torch.autograd.grad((q * Jv).sum(), weights.values())
    product = net.tangents(x, sigma, (v,), masks=masks)[1][0]
    ours = torch.autograd.grad((q * product).sum(), weights.values())
    for name, mine, other in zip(weights, ours, expected, strict=True):
        assert (mine - other).norm() <= 1e-10 * other.norm() + 1e-14, name


def test_detached_dual_gives_the_gradient_of_the_skew_penalty() -> None:
    """With q = (J - J^T) v held fixed, <q, J v> - <v, J q> has the gradient of ||q||^2 / 2."""
    net, (x, sigma, v) = random_net().train(), random_batch()
    masks, weights = net.draw_masks(2, _generator()), _weights(net)
    Jv, JTv = _reverse_products(net, x, sigma, v, masks)
    expected = torch.autograd.grad(0.5 * (Jv - JTv).square().sum(), weights.values())

    q = (Jv - JTv).detach()
    _, (Jv, Jq) = net.tangents(x, sigma, (v, q), masks=masks)
    ours = torch.autograd.grad((q * Jv - v * Jq).sum(), weights.values())
    for name, mine, other in zip(weights, ours, expected, strict=True):
        assert (mine - other).norm() <= 1e-10 * other.norm() + 1e-14, name


def test_forward_is_the_pass_without_tangents() -> None:
    net, (x, sigma) = random_net(), random_batch(extra=0)
    score, products = net.tangents(x, sigma, ())
    assert products == ()
    assert torch.equal(net(x, sigma), score)


class _Calls(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_primal_and_tangents_share_every_convolution() -> None:
    net, (x, sigma, v, w) = random_net(), random_batch(extra=2)
    counts = []
    for vs in ((), (v,), (v, w)):
        with torch.no_grad(), _Calls() as calls:
            net.tangents(x, sigma, vs)
        counts.append(calls.count["convolution"])
    assert counts[0] > 20
    assert counts == [counts[0]] * 3


def test_replayed_random_state_repeats_the_masks() -> None:
    net, (x, sigma, v, w) = random_net().train(), random_batch(extra=2)
    state = torch.get_rng_state()
    score = net(x, sigma)
    other = net(x, sigma)
    torch.set_rng_state(state)
    again, (Jv,) = net.tangents(x, sigma, (v,))
    torch.set_rng_state(state)
    third, (_, Jv_again) = net.tangents(x, sigma, (w, v))
    assert (score - other).abs().max() > 1e-3
    for repeated in (again, third):
        torch.testing.assert_close(repeated, score, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(Jv_again, Jv, rtol=1e-12, atol=1e-12)


def test_masks_keep_the_mean() -> None:
    net = random_net()
    masks = net.draw_masks(4, _generator())
    kept = torch.cat([mask.flatten() for mask in masks])
    assert kept.dtype == torch.bool
    keep = 1 - net.config.dropout
    n = kept.numel()
    assert abs(kept.sum() - n * keep) < 5 * math.sqrt(n * keep * (1 - keep))
    plain, dropping = (ResBlock(8, 8, 16, None, _generator(), p).double() for p in (0.0, 0.3))
    dropping.load_state_dict(plain.state_dict())
    x, t = random_batch(replace(SMALL, channels=8), extra=0)[0], torch.zeros(2, 16, dtype=torch.float64)
    with torch.no_grad():
        none, all_kept = plain(x, t) / HALF - x, dropping(x, t, 0, torch.ones_like(x).bool()) / HALF - x
    torch.testing.assert_close(all_kept, none / 0.7)
    assert [tuple(mask.shape[1:]) for mask in masks] == net.mask_shapes


def test_masks_are_repeated_by_their_generator_alone() -> None:
    net = random_net()
    torch.manual_seed(0)
    first = net.draw_masks(2, _generator())
    torch.manual_seed(1)
    again = net.draw_masks(2, _generator())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_no_dropout_means_no_masks() -> None:
    net, (x, sigma) = random_net(replace(SMALL, dropout=0.0)), random_batch(extra=0)
    assert net.draw_masks(2) == ()
    assert torch.equal(net.train()(x, sigma), net.eval()(x, sigma))
