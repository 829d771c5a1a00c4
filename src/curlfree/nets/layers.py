r"""Layers of NCSN++ that carry a primal and k tangents through the network in one pass.

A layer's input h has shape ((1 + k) B, C, H, W): the activations of B samples, followed by their derivatives
along k directions. Linear maps (convolutions, FIR filters) act on the whole stack in one call; biases touch
the primal only; the nonlinear layers have closed forms. With k = 0 the same code is the ordinary layer.

- Group norm, y = (x - m) r with r = (var + eps)^(-1/2): ``dy = r (dx - mean(dx) - y mean(y dx))``.
- SiLU, z g with g = sigmoid(z): ``d = g (1 + z (1 - g)) dz``.
- Attention, o = w v with w = softmax(c q k^T): ``ds = c (dq k^T + q dk^T)``,
  ``dw = w (ds - sum(w ds))``, ``do = dw v + w dv``.

Every operation is made of primitives that are differentiable to any order, in forward and reverse mode, in
eager mode and under `torch.compile`. Statistics and softmax run in float32 at least; activations keep the
type and the memory format that they came with. Module and parameter names are those of the published
score_sde networks (Song et al., 2021, arXiv 2011.13456), so that their state dicts load unchanged.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HALF = math.sqrt(0.5)  # the rescaling that keeps the variance of a sum of two branches


def variance_scaling(shape: tuple[int, ...], scale: float, generator: torch.Generator) -> nn.Parameter:
    """A weight of shape (out, in, ...), uniform with variance ``scale / mean(fan_in, fan_out)``.

    A scale of 0 stands for 1e-10, as published: branches start as good as closed, but not dead.
    """
    fan = (shape[0] + shape[1]) / 2 * math.prod(shape[2:])
    bound = math.sqrt(3 * max(scale, 1e-10) / fan)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))


def split(h: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The primal (B, ...) and the tangents (k, B, ...) of a stack of shape ((1 + k) B, ...)."""
    n = h.shape[0] // (1 + k)
    return h[:n], h[n:].unflatten(0, (k, n))


def join(primal: Tensor, tangents: Tensor) -> Tensor:
    """The stack of a primal (B, ...) and its tangents (k, B, ...).

    Images that are kept channels last stay so: of single ones `torch.cat` makes something else, and not the
    same in eager mode and in a trace, so the channels are moved explicitly.
    """
    parts = (primal, tangents.flatten(0, 1))
    if primal.ndim == 4 and primal.is_contiguous(memory_format=torch.channels_last):
        return torch.cat([part.permute(0, 2, 3, 1) for part in parts]).permute(0, 3, 1, 2)
    return torch.cat(parts)


def shift(h: Tensor, bias: Tensor, k: int) -> Tensor:
    """Add a bias of shape (C,) or (B, C), one number per channel, to the primal of a stack of images."""
    bias = bias.to(h.dtype).reshape(1, -1, h.shape[1], 1, 1)
    stacked = F.pad(bias, (0, 0) * 4 + (0, k))
    return (h.unflatten(0, (1 + k, -1)) + stacked).flatten(0, 1)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The type in which statistics of `dtype` are computed."""
    return torch.promote_types(dtype, torch.float32)


class Linear(nn.Module):
    """``W x + b`` on the noise-level embedding, which has no tangents."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = variance_scaling((outputs, inputs), 1.0, generator)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, t: Tensor) -> Tensor:
        """Map (B, inputs) to (B, outputs)."""
        return F.linear(t, self.weight, self.bias)


class Fourier(nn.Module):
    """Random Fourier features of the noise level, ``[sin, cos](2 pi W log sigma)``; W is not trained."""

    def __init__(self, features: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        W = torch.empty(features).normal_(generator=generator) * scale
        self.W = nn.Parameter(W, requires_grad=False)

    def forward(self, sigma: Tensor) -> Tensor:
        """Map (B,) to (B, 2 features)."""
        W = self.W.to(at_least_float32(self.W.dtype))
        phase = 2 * math.pi * torch.log(sigma.to(W.dtype))[:, None] * W
        return torch.cat([phase.sin(), phase.cos()], dim=1).to(self.W.dtype)


class Conv(nn.Module):
    """A convolution with odd kernel `size`, padded to keep the resolution."""

    def __init__(
        self, inputs: int, outputs: int, size: int, generator: torch.Generator, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.weight = variance_scaling((outputs, inputs, size, size), scale, generator)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def product(self, h: Tensor) -> Tensor:
        """The linear part, for callers that add the bias together with something else."""
        return F.conv2d(h, self.weight, padding=self.weight.shape[-1] // 2)

    def forward(self, h: Tensor, k: int = 0) -> Tensor:
        """Convolve the stack, with the bias on its primal."""
        return shift(self.product(h), self.bias, k)


class GroupNorm(nn.Module):
    """Group normalisation with at most 32 groups of at least 4 channels, followed by SiLU if asked."""

    def __init__(self, channels: int, *, silu: bool) -> None:
        super().__init__()
        self.groups = min(channels // 4, 32)
        if self.groups == 0 or channels % self.groups:
            raise ValueError(
                f"group norm needs a multiple of 4 channels (of 32 above 128), got {channels}; "
                "choose another width or other multipliers"
            )
        self.silu = silu
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def _mean(self, h: Tensor) -> Tensor:
        """The mean over each group, repeated for its channels: (..., C, H, W) to (..., C, 1, 1)."""
        mean = h.mean((-2, -1)).unflatten(-1, (self.groups, -1))
        return mean.mean(-1, keepdim=True).expand_as(mean).flatten(-2)[..., None, None]

    def forward(self, h: Tensor, k: int = 0) -> Tensor:
        """Normalise the primal and map its tangents by the derivative."""
        x, d = split(h, k)
        x = x.to(at_least_float32(h.dtype))
        y = x - self._mean(x)
        r = torch.rsqrt(self._mean(y * y) + 1e-6)
        y = y * r
        weight = self.weight.to(x.dtype)[:, None, None]
        z = y * weight + self.bias.to(x.dtype)[:, None, None]
        value = (F.silu(z) if self.silu else z).to(h.dtype)
        if k == 0:
            return value
        slope = weight * r
        if self.silu:
            gate = torch.sigmoid(z)
            slope = slope * gate * (1 + z * (1 - gate))
        d = d.to(x.dtype)
        d = slope * (d - self._mean(d) - y * self._mean(y * d))
        return join(value, d.to(h.dtype))


class Fir(nn.Module):
    """The binomial filter [1, 3, 3, 1] in both directions, as one depthwise convolution, with resampling.

    Zero insertion followed by the filter is a transposed convolution, filter followed by decimation a strided
    one: neither the zeros nor the discarded values are computed.
    """

    kernel: Tensor

    def __init__(self) -> None:
        super().__init__()
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
        self.register_buffer("kernel", torch.outer(taps, taps)[None, None], persistent=False)

    def _taps(self, h: Tensor) -> Tensor:
        return self.kernel.to(h.dtype).expand(h.shape[1], 1, 4, 4)

    def down(self, h: Tensor) -> Tensor:
        """Filter and keep every second value: (N, C, H, W) to (N, C, H/2, W/2)."""
        return F.conv2d(h, self._taps(h), stride=2, padding=1, groups=h.shape[1])

    def up(self, h: Tensor) -> Tensor:
        """Interpolate: (N, C, H, W) to (N, C, 2H, 2W)."""
        return F.conv_transpose2d(h, 4 * self._taps(h), stride=2, padding=1, groups=h.shape[1])

    def smooth(self, h: Tensor) -> Tensor:
        """Filter only, with one row and column more: (N, C, H, W) to (N, C, H + 1, W + 1)."""
        return F.conv2d(h, self._taps(h), padding=2, groups=h.shape[1])


class Down(Fir):
    """Halve the resolution."""

    def forward(self, h: Tensor) -> Tensor:
        """See `Fir.down`."""
        return self.down(h)


class Up(Fir):
    """Double the resolution."""

    def forward(self, h: Tensor) -> Tensor:
        """See `Fir.up`."""
        return self.up(h)


class PyramidConv(Fir):
    """Filter, then convolve with stride 2: how the input pyramid is brought to the next resolution."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.Conv2d_0 = Conv(inputs, outputs, 3, generator)

    def forward(self, h: Tensor, k: int = 0) -> Tensor:
        """Map (N, inputs, H, W) to (N, outputs, H/2, W/2)."""
        h = F.conv2d(self.smooth(h), self.Conv2d_0.weight, stride=2)
        return shift(h, self.Conv2d_0.bias, k)


class ResBlock(nn.Module):
    """The BigGAN residual block, conditioned on the noise level, with optional resampling in both branches.

    Args:
        inputs: channels coming in.
        outputs: channels going out.
        embedding: length of the noise-level embedding.
        resample: `Down`, `Up` or None.
        generator: what the weights are drawn from.
        dropout: the probability with which masks drop an activation.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        embedding: int,
        resample: Fir | None,
        generator: torch.Generator,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.keep = 1 - dropout
        self.GroupNorm_0 = GroupNorm(inputs, silu=True)
        self.resample = resample
        self.Conv_0 = Conv(inputs, outputs, 3, generator)
        self.Dense_0 = Linear(embedding, outputs, generator)
        self.GroupNorm_1 = GroupNorm(outputs, silu=True)
        self.Conv_1 = Conv(outputs, outputs, 3, generator, scale=0.0)
        self.Conv_2: Conv | None = None
        if inputs != outputs or resample is not None:
            self.Conv_2 = Conv(inputs, outputs, 1, generator)

    def forward(self, h: Tensor, t: Tensor, k: int = 0, mask: Tensor | None = None) -> Tensor:
        """Apply the block.

        Args:
            h: the stack, ((1 + k) B, inputs, H, W).
            t: the activated embedding, (B, embedding).
            k: number of tangents.
            mask: which activations dropout keeps, (B, outputs, H', W'), the same for primal and tangents;
                None for no dropout.
        """
        x, h = h, self.GroupNorm_0(h, k)
        if self.resample is not None:
            x, h = self.resample(x), self.resample(h)
        h = shift(self.Conv_0.product(h), self.Dense_0(t) + self.Conv_0.bias, k)
        h = self.GroupNorm_1(h, k)
        if mask is not None:
            h = (h.unflatten(0, (1 + k, -1)) * mask.to(h.dtype) * (1 / self.keep)).flatten(0, 1)
        bias: Tensor = self.Conv_1.bias
        h = self.Conv_1.product(h)
        if self.Conv_2 is not None:
            x, bias = self.Conv_2.product(x), bias + self.Conv_2.bias
        return shift(x + h, bias, k) * HALF


class Nin(nn.Module):
    """A linear map of the channels ("network in network"), kept as (in, out) like the published weights."""

    def __init__(self, channels: int, generator: torch.Generator, scale: float) -> None:
        super().__init__()
        self.W = variance_scaling((channels, channels), scale, generator)
        self.b = nn.Parameter(torch.zeros(channels))


class Attention(nn.Module):
    """Single-head self-attention over the pixels of an image, as explicit matrix products."""

    def __init__(self, channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.GroupNorm_0 = GroupNorm(channels, silu=False)
        self.NIN_0 = Nin(channels, generator, scale=0.1)
        self.NIN_1 = Nin(channels, generator, scale=0.1)
        self.NIN_2 = Nin(channels, generator, scale=0.1)
        self.NIN_3 = Nin(channels, generator, scale=0.0)

    def forward(self, h: Tensor, k: int = 0) -> Tensor:
        """Attend, and add to the input."""
        parts = (self.NIN_0, self.NIN_1, self.NIN_2)
        W = torch.cat([part.W for part in parts], dim=1)
        b = torch.cat([part.b for part in parts])
        pixels = self.GroupNorm_0(h, k).flatten(2).transpose(1, 2) @ W
        x, d = split(pixels, k)
        query, key, value = (x + b.to(x.dtype)).chunk(3, dim=-1)
        scale = query.shape[-1] ** -0.5
        precise = at_least_float32(x.dtype)
        weights = torch.softmax((query @ key.mT).to(precise) * scale, dim=-1)
        w = weights.to(x.dtype)
        out = w @ value
        if k:
            dquery, dkey, dvalue = d.chunk(3, dim=-1)
            ds = (dquery @ key.mT + query @ dkey.mT).to(precise) * scale
            dweights = weights * (ds - (weights * ds).sum(-1, keepdim=True))
            out = join(out, dweights.to(x.dtype) @ value + w @ dvalue)
        out = (out @ self.NIN_3.W).mT.unflatten(2, h.shape[2:])
        return shift(h + out, self.NIN_3.b, k) * HALF
