r"""NCSN++, the score network of the paper's Section 5, in pure torch operations.

The continuous variance-exploding network of Song et al. (2021, arXiv 2011.13456): a U-Net of BigGAN blocks
with FIR resampling, attention at one resolution, a residual pyramid of the input, Fourier features of
log sigma, and an output divided by sigma, ``s(x, sigma) = h(2 x - 1, log sigma) / sigma`` for data in [0, 1].
The modules are kept in one flat list in the published order, so that published weights load by name
(`all_modules.N.…`); `NCSNppConfig()` is the deep configuration that the paper trains, of 107,587,075
parameters.

`NCSNpp.tangents` returns the score and its products with the Jacobian along given directions from one pass
in which every convolution acts once on primal and tangents; `NCSNpp.forward` is that pass without tangents.
The Jacobian is that of the network as it stands: in training mode, with the dropout masks of this call.
Masks are drawn before the pass (`NCSNpp.draw_masks`), so several passes can share them.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curlfree.nets.layers import (
    HALF,
    Attention,
    Conv,
    Down,
    Fir,
    Fourier,
    GroupNorm,
    Linear,
    PyramidConv,
    ResBlock,
    Up,
    variance_scaling,
)


@dataclass(frozen=True)
class NCSNppConfig:
    """The shape of an NCSN++.

    Args:
        channels: colour channels of the images.
        size: height and width of the images.
        width: channels of the first level.
        multipliers: channels of each level, in units of `width`; the resolution halves between levels.
        blocks: residual blocks per level (one more on the way up).
        attention: resolutions with self-attention.
        dropout: probability to drop an activation in training mode.
        classes: number of classes of a conditional network, or None.
        fourier_scale: standard deviation of the frequencies of the Fourier features.
    """

    channels: int = 3
    size: int = 32
    width: int = 128
    multipliers: tuple[int, ...] = (1, 2, 2, 2)
    blocks: int = 8
    attention: tuple[int, ...] = (16,)
    dropout: float = 0.1
    classes: int | None = None
    fourier_scale: float = 16.0

    def __post_init__(self) -> None:
        smallest = 2 ** (len(self.multipliers) - 1)
        positive = (self.channels, self.size, self.width, self.blocks, *self.multipliers)
        if not self.multipliers or min(positive) < 1:
            raise ValueError(
                f"channels, size, width, blocks and multipliers must be positive integers, got {self}"
            )
        if self.size % smallest:
            raise ValueError(
                f"{len(self.multipliers)} levels need a size that is a multiple of {smallest}, "
                f"got {self.size}; pad the images or give fewer multipliers"
            )
        if unused := set(self.attention) - {self.size >> i for i in range(len(self.multipliers))}:
            raise ValueError(
                f"attention at resolutions {sorted(unused)}, which a size of {self.size} and "
                f"{len(self.multipliers)} levels do not have"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.classes is not None and self.classes < 1:
            raise ValueError(f"classes must be at least 1, or None, got {self.classes}")


PRESETS = {
    "ncsnpp-deep": NCSNppConfig(),
    "ncsnpp": NCSNppConfig(blocks=4),
    "ncsnpp-small": NCSNppConfig(width=64, blocks=3),
    "ncsnpp-tiny": NCSNppConfig(width=16, multipliers=(1, 2), blocks=1),
}


class NCSNpp(nn.Module):
    """The network; see the module's docstring.

    Args:
        config: its shape.
        seed: what the initial weights are drawn from, on the CPU.
    """

    def __init__(self, config: NCSNppConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.mask_shapes: list[tuple[int, int, int]] = []
        generator = torch.Generator().manual_seed(seed)
        widths = [config.width * m for m in config.multipliers]
        embedding = 4 * config.width
        modules: list[nn.Module] = [
            Fourier(config.width, config.fourier_scale, generator),
            Linear(2 * config.width, embedding, generator),
            Linear(embedding, embedding, generator),
            Conv(config.channels, config.width, 3, generator),
        ]
        size, now, pyramid = config.size, config.width, config.channels
        skips = [now]

        def block(inputs: int, outputs: int, resample: Fir | None = None) -> None:
            modules.append(ResBlock(inputs, outputs, embedding, resample, generator, config.dropout))
            self.mask_shapes.append((outputs, size, size))

        def attend(channels: int) -> None:
            if size in config.attention:
                modules.append(Attention(channels, generator))

        for width in widths:
            for _ in range(config.blocks):
                block(now, width)
                attend(width)
                now = width
                skips.append(now)
            if size > self._smallest:
                size //= 2
                block(now, now, Down())
                modules.append(PyramidConv(pyramid, now, generator))
                pyramid = now
                skips.append(now)
        block(now, now)
        modules.append(Attention(now, generator))
        block(now, now)
        for width in reversed(widths):
            for _ in range(config.blocks + 1):
                block(now + skips.pop(), width)
                now = width
            attend(now)
            if size < config.size:
                size *= 2
                block(now, now, Up())
        modules += [GroupNorm(now, silu=True), Conv(now, config.channels, 3, generator, scale=0.0)]
        self.all_modules = nn.ModuleList(modules)
        self.class_embedding: nn.Parameter | None = None
        if config.classes is not None:
            self.class_embedding = variance_scaling((config.classes + 1, embedding), 1.0, generator)

    @property
    def _smallest(self) -> int:
        """The lowest resolution."""
        return self.config.size >> (len(self.config.multipliers) - 1)

    def draw_masks(self, batch: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Draw the dropout masks of one pass, one per residual block; none if the dropout is 0.

        Args:
            batch: number of samples.
            generator: what to draw from, on the network's device; None stands for torch's global generator,
                as in `torch.nn.Dropout`, whose state then has to be replayed to repeat a pass.

        Returns:
            Boolean tensors of shape (batch, C, H, W), true where an activation is kept; the blocks scale it.
        """
        if self.config.dropout == 0:
            return ()
        keep = 1 - self.config.dropout
        like = torch.empty(0, dtype=torch.bool, device=next(self.parameters()).device)
        return tuple(
            like.new_empty((batch, *shape)).bernoulli_(keep, generator=generator)
            for shape in self.mask_shapes
        )

    def forward(
        self,
        x: Tensor,
        sigma: Tensor,
        labels: Tensor | None = None,
        masks: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """The score at x; see `tangents`."""
        return self.tangents(x, sigma, (), labels, masks)[0]

    def tangents(
        self,
        x: Tensor,
        sigma: Tensor,
        vs: tuple[Tensor, ...],
        labels: Tensor | None = None,
        masks: tuple[Tensor, ...] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The score and its Jacobian's products with given directions.

        Args:
            x: noisy images, ``x0 + sigma z`` with x0 in [0, 1], of shape (B, channels, size, size).
            sigma: noise levels, of shape (B,).
            vs: k directions shaped like x.
            labels: classes of a conditional network, integers of shape (B,); the value `config.classes`
                means "any class", and so does None.
            masks: dropout masks from `draw_masks`; None draws them in training mode, and means no dropout
                in evaluation mode.

        Returns:
            The score, shaped like x, and ``J v`` for each v.

        Raises:
            ValueError: a shape or the masks do not fit, or labels were given to an unconditional network.
        """
        config, k = self.config, len(vs)
        self._check(x, sigma, vs, labels)
        if masks is None:
            masks = self.draw_masks(x.shape[0]) if self.training else ()
        if [mask.shape for mask in masks] not in ([], [(x.shape[0], *shape) for shape in self.mask_shapes]):
            raise ValueError(f"masks must be what draw_masks({x.shape[0]}) returns, for a batch of this size")
        mask: Iterator[Tensor | None] = iter(masks) if masks else itertools.repeat(None)
        layer = iter(self.all_modules)
        t = next(layer)(sigma)
        t = next(layer)(t)
        t = next(layer)(F.silu(t))
        if self.class_embedding is not None:
            null = torch.full(x.shape[:1], self.class_embedding.shape[0] - 1, device=x.device)
            t = t + F.embedding(null if labels is None else labels, self.class_embedding)
        t = F.silu(t)

        pyramid = torch.cat([2 * x - 1, *(2 * v for v in vs)])
        h = next(layer)(pyramid, k)
        size, skips = config.size, [h]
        for _ in config.multipliers:
            for _ in range(config.blocks):
                h = next(layer)(h, t, k, next(mask))
                if size in config.attention:
                    h = next(layer)(h, k)
                skips.append(h)
            if size > self._smallest:
                size //= 2
                h = next(layer)(h, t, k, next(mask))
                h = pyramid = (next(layer)(pyramid, k) + h) * HALF
                skips.append(h)
        h = next(layer)(h, t, k, next(mask))
        h = next(layer)(h, k)
        h = next(layer)(h, t, k, next(mask))
        for _ in config.multipliers:
            for _ in range(config.blocks + 1):
                h = next(layer)(torch.cat([h, skips.pop()], dim=1), t, k, next(mask))
            if size in config.attention:
                h = next(layer)(h, k)
            if size < config.size:
                size *= 2
                h = next(layer)(h, t, k, next(mask))
        h = next(layer)(h, k)
        h = next(layer)(h, k)
        out = h.to(x.dtype).unflatten(0, (1 + k, -1)) / sigma.to(x.dtype)[:, None, None, None]
        return out[0], tuple(out[1:])

    def _check(self, x: Tensor, sigma: Tensor, vs: tuple[Tensor, ...], labels: Tensor | None) -> None:
        image = (self.config.channels, self.config.size, self.config.size)
        if x.shape[1:] != image:
            raise ValueError(f"x must have shape (B, {', '.join(map(str, image))}), got {tuple(x.shape)}")
        if sigma is None or sigma.shape != x.shape[:1]:
            raise ValueError(
                f"sigma must have shape ({x.shape[0]},), got {None if sigma is None else tuple(sigma.shape)}"
            )
        for v in vs:
            if v.shape != x.shape:
                raise ValueError(
                    f"a direction must have the shape {tuple(x.shape)} of x, got {tuple(v.shape)}"
                )
        if labels is not None and self.class_embedding is None:
            raise ValueError("labels were given to a network without classes; set `classes` in its config")
        if labels is not None and labels.shape != x.shape[:1]:
            raise ValueError(f"labels must have shape ({x.shape[0]},), got {tuple(labels.shape)}")
