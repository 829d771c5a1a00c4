r"""Networks for data in a few dimensions: the paper's, and one that is well conditioned.

`PaperMLP` is the network of the paper's Section 3.2 as the authors' public code has it
(https://github.com/chen-hao-chao/qcsbm): 42,509 parameters in two dimensions. The noise level itself goes
through three 1 x 1 layers and joins the features of x only before the last layer, so that
``f(x, sigma) = g(x) + h(sigma)``: noise can shift the field but not change its shape.

`FilmMLP` is conditioned on the noise level in every layer: Fourier features of c_noise = ln(sigma)/4 give a
scale and a shift of each feature (FiLM, Perez et al. 2018, arXiv:1709.07871), in residual blocks. It expects
inputs of unit variance and returns outputs of unit variance: use it inside `curlfree.fields.Preconditioned`.

Both are smooth, so that the penalty can differentiate them twice.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class PaperMLPConfig:
    """The paper's network; it has nothing to choose but the dimension.

    Args:
        dimension: D, the dimension of x.
    """

    dimension: int = 2

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise ValueError(f"dimension: expected at least 1, found {self.dimension}")


@dataclass(frozen=True, kw_only=True)
class FilmMLPConfig:
    """The shape of a `FilmMLP`.

    Args:
        dimension: D, the dimension of x.
        width: features of the hidden layers.
        blocks: residual blocks.
        frequencies: Fourier features of the noise level, in pairs.
        data_std: the standard deviation of the data, one number, for the scaling around the network.
        data_mean: the mean of the data, one number.
    """

    dimension: int = 2
    width: int = 128
    blocks: int = 3
    frequencies: int = 8
    data_std: float = 4.0
    data_mean: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dimension", "width", "blocks", "frequencies"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if not 0 < self.data_std < math.inf:
            raise ValueError(f"data_std: expected a positive number, found {self.data_std}")


def linear(inputs: int, outputs: int, generator: torch.Generator, *, scale: float = 1.0) -> nn.Linear:
    """A linear layer with PyTorch's default weights, times a scale, drawn from a generator."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    bound = scale / math.sqrt(inputs)
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        layer.bias.uniform_(-bound, bound, generator=generator)
    return layer


class Swish(nn.Module):
    """``x sigmoid(beta x)`` with one learned beta per feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(features))

    def forward(self, h: Tensor) -> Tensor:
        """Map (B, features) elementwise."""
        return h * torch.sigmoid(self.beta * h)


class PaperMLP(nn.Module):
    """The paper's network f(x, sigma) for data in D dimensions.

    Args:
        config: its dimension.
        generator: what the initial weights are drawn from.
        activation: applied to the output. The authors' energy has one here (leaky ReLU of slope 0.1 for
            8-Gaussian, ELU for the other sets), their unconstrained score none.
    """

    def __init__(
        self,
        config: PaperMLPConfig,
        generator: torch.Generator,
        *,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.points = nn.Sequential(
            linear(config.dimension, 64, generator),
            Swish(64),
            linear(64, 128, generator),
            Swish(128),
            linear(128, 256, generator),
        )
        self.level = nn.Sequential(
            linear(1, 1, generator),
            Swish(1),
            linear(1, 1, generator),
            Swish(1),
            linear(1, 1, generator),
        )
        self.joint = Swish(257)
        self.last = linear(257, config.dimension, generator)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Map x of shape (B, D) and sigma of shape (B,) to (B, D)."""
        h = torch.cat([self.points(x), self.level(sigma.to(x.dtype)[:, None])], dim=1)
        out = self.last(self.joint(h))
        return out if self.activation is None else self.activation(out)


class FilmBlock(nn.Module):
    """``h + W2 silu((1 + scale) * W1 silu(h) + shift)`` with scale and shift from the noise level."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.first = linear(width, width, generator)
        self.film = linear(width, 2 * width, generator)
        self.second = linear(width, width, generator, scale=0.1)

    def forward(self, h: Tensor, level: Tensor) -> Tensor:
        """Map h of shape (B, width), given the embedded level of the same shape."""
        scale, shift = self.film(level).chunk(2, dim=1)
        return h + self.second(F.silu((1 + scale) * self.first(F.silu(h)) + shift))


class FilmMLP(nn.Module):
    """The well-conditioned network F(x, c_noise); see the module's docstring.

    Args:
        config: its shape.
        generator: what the initial weights are drawn from.
    """

    frequencies: Tensor

    def __init__(self, config: FilmMLPConfig, generator: torch.Generator) -> None:
        super().__init__()
        width = config.width
        octaves = torch.linspace(0, 3, config.frequencies)
        self.register_buffer("frequencies", math.pi / 2 * 2**octaves, persistent=False)
        self.embed = nn.Sequential(linear(2 * config.frequencies, width, generator), nn.SiLU())
        self.inward = linear(config.dimension, width, generator, scale=math.sqrt(3))
        self.blocks = nn.ModuleList(FilmBlock(width, generator) for _ in range(config.blocks))
        self.outward = linear(width, config.dimension, generator, scale=0.1)

    def forward(self, x: Tensor, c_noise: Tensor) -> Tensor:
        """Map x of shape (B, D) and c_noise of shape (B,) to (B, D)."""
        phase = c_noise.to(x.dtype)[:, None] * self.frequencies.to(x.dtype)
        level = self.embed(torch.cat([phase.sin(), phase.cos()], dim=1))
        h = self.inward(x)
        for block in self.blocks:
            h = block(h, level)
        return self.outward(F.silu(h))
