"""NCSN++ the way the paper's code runs it: the baseline that the speed of ours is measured against.

Written from facts about the public network (Song et al. 2021, arXiv 2011.13456), not from its text: images
channel by channel (NCHW), float32 throughout (TF32 as PyTorch is told), library modules for convolutions,
group norms and dropout, the FIR filter as zero insertion, padding, a convolution of single channels and
decimation, channel mixing and attention by einsum, nothing compiled. Parameter names and values are those of
`NCSNpp`, so that both compute the same function.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curlfree.nets import NCSNpp, NCSNppConfig


def fir(x: Tensor, *, up: int = 1, down: int = 1, pad: tuple[int, int]) -> Tensor:
    """Insert zeros, pad, filter with [1, 3, 3, 1] in both directions, keep every second value."""
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=x.dtype, device=x.device)
    kernel = torch.outer(taps, taps)
    kernel = kernel / kernel.sum() * up**2
    n, channels, height, width = x.shape
    x = x.reshape(n, channels, height, 1, width, 1)
    x = F.pad(x, (0, up - 1, 0, 0, 0, up - 1)).reshape(n, channels, height * up, width * up)
    x = F.pad(x, (*pad, *pad))
    height, width = x.shape[2:]
    x = F.conv2d(x.reshape(n * channels, 1, height, width), kernel.flip(0, 1)[None, None])
    return x.reshape(n, channels, *x.shape[2:])[:, :, ::down, ::down]


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(channels // 4, 32), channels, eps=1e-6)


class Nin(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.W, self.b = nn.Parameter(torch.zeros(channels, channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bhwi,ij->bhwj", x.permute(0, 2, 3, 1), self.W) + self.b
        return y.permute(0, 3, 1, 2)


class Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.GroupNorm_0 = norm(channels)
        self.NIN_0, self.NIN_1, self.NIN_2, self.NIN_3 = (Nin(channels) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        h = self.GroupNorm_0(x)
        q, k, v = self.NIN_0(h), self.NIN_1(h), self.NIN_2(h)
        w = torch.einsum("bchw,bcij->bhwij", q, k) * channels**-0.5
        w = F.softmax(w.reshape(n, height, width, height * width), dim=-1)
        h = torch.einsum("bhwij,bcij->bchw", w.reshape(n, height, width, height, width), v)
        return (x + self.NIN_3(h)) / math.sqrt(2)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, embedding: int, resample: str, dropout: float) -> None:
        super().__init__()
        self.GroupNorm_0, self.GroupNorm_1 = norm(inputs), norm(outputs)
        self.Conv_0 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.Conv_1 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.Dense_0 = nn.Linear(embedding, outputs)
        self.Dropout_0 = nn.Dropout(dropout)
        self.resample = resample
        if inputs != outputs or resample:
            self.Conv_2 = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = F.silu(self.GroupNorm_0(x))
        if self.resample == "up":
            h, x = fir(h, up=2, pad=(2, 1)), fir(x, up=2, pad=(2, 1))
        elif self.resample == "down":
            h, x = fir(h, down=2, pad=(1, 1)), fir(x, down=2, pad=(1, 1))
        h = self.Conv_0(h) + self.Dense_0(F.silu(t))[:, :, None, None]
        h = self.Conv_1(self.Dropout_0(F.silu(self.GroupNorm_1(h))))
        if hasattr(self, "Conv_2"):
            x = self.Conv_2(x)
        return (x + h) / math.sqrt(2)


class Fourier(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.zeros(features), requires_grad=False)

    def forward(self, level: Tensor) -> Tensor:
        phase = level[:, None] * self.W[None, :] * 2 * math.pi
        return torch.cat([torch.sin(phase), torch.cos(phase)], dim=-1)


class PyramidConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.Conv2d_0 = nn.Conv2d(inputs, outputs, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.Conv2d_0(fir(x, pad=(2, 2)))


class AuthorsNet(nn.Module):
    """The network; `AuthorsNet.like(net)` has the parameters of an `NCSNpp`."""

    def __init__(self, config: NCSNppConfig) -> None:
        super().__init__()
        self.config = config
        embedding = 4 * config.width
        widths = [config.width * m for m in config.multipliers]
        size, now, pyramid = config.size, config.width, config.channels
        layers: list[nn.Module] = [
            Fourier(config.width),
            nn.Linear(2 * config.width, embedding),
            nn.Linear(embedding, embedding),
            nn.Conv2d(config.channels, config.width, 3, padding=1),
        ]
        skips = [now]

        def block(inputs: int, outputs: int, resample: str = "") -> None:
            layers.append(Block(inputs, outputs, embedding, resample, config.dropout))

        for level, width in enumerate(widths):
            for _ in range(config.blocks):
                block(now, width)
                now = width
                if size in config.attention:
                    layers.append(Attention(now))
                skips.append(now)
            if level < len(widths) - 1:
                block(now, now, "down")
                layers.append(PyramidConv(pyramid, now))
                size, pyramid = size // 2, now
                skips.append(now)
        block(now, now)
        layers.append(Attention(now))
        block(now, now)
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(config.blocks + 1):
                block(now + skips.pop(), width)
                now = width
            if size in config.attention:
                layers.append(Attention(now))
            if level:
                block(now, now, "up")
                size *= 2
        layers += [norm(now), nn.Conv2d(now, config.channels, 3, padding=1)]
        self.all_modules = nn.ModuleList(layers)

    @classmethod
    def like(cls, net: NCSNpp) -> "AuthorsNet":
        """The same function as `net`, with its own copies of the parameters."""
        with torch.device(next(net.parameters()).device):
            mine = cls(net.config).to(next(net.parameters()).dtype)
        mine.load_state_dict(net.state_dict())
        return mine.train(net.training)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The score."""
        config, layer = self.config, iter(self.all_modules)
        t = next(layer)(torch.log(sigma))
        t = next(layer)(t)
        t = next(layer)(F.silu(t))
        pyramid = 2 * x - 1
        size = config.size
        h = next(layer)(pyramid)
        skips = [h]
        for level in range(len(config.multipliers)):
            for _ in range(config.blocks):
                h = next(layer)(h, t)
                if size in config.attention:
                    h = next(layer)(h)
                skips.append(h)
            if level < len(config.multipliers) - 1:
                h = next(layer)(h, t)
                pyramid = (next(layer)(pyramid) + h) / math.sqrt(2)
                h = pyramid
                size //= 2
                skips.append(h)
        h = next(layer)(h, t)
        h = next(layer)(h)
        h = next(layer)(h, t)
        for level in reversed(range(len(config.multipliers))):
            for _ in range(config.blocks + 1):
                h = next(layer)(torch.cat([h, skips.pop()], dim=1), t)
            if size in config.attention:
                h = next(layer)(h)
            if level:
                h = next(layer)(h, t)
                size *= 2
        h = F.silu(next(layer)(h))
        return next(layer)(h) / sigma[:, None, None, None]
