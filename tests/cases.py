"""Fields with known facts, on several event shapes, and dense oracles, for the tests of the core."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import curlfree as cf

B = 3


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=torch.float64)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Set PyTorch's own generator inside, so that dropout draws the same masks; restore it after."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """A float64 module all of whose parameters are of order one."""
    generator = rng(seed)
    for p in module.double().parameters():
        fan_in = max(p[0].numel(), 1)
        p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) / fan_in**0.5
    return module


class MLP(nn.Module):
    """A network on vectors of any event shape that also takes ln(sigma)."""

    def __init__(self, size: int, hidden: int = 6, out: int | None = None) -> None:
        super().__init__()
        self.first, self.level = nn.Linear(size, hidden), nn.Linear(1, hidden)
        self.last = nn.Linear(hidden, size if out is None else out)

    def forward(self, x: Tensor, sigma: Tensor | None = None, **condition: Tensor) -> Tensor:
        h = self.first(x.reshape(len(x), -1))
        if sigma is not None:
            h = h + self.level(sigma.log()[:, None])
        for c in condition.values():
            h = h + torch.sin(c.to(h.dtype).reshape(len(x), -1)[:, :1])
        y = self.last(torch.tanh(h))
        return y.view_as(x) if y.shape[1] * len(x) == x.numel() else y


class UNet(nn.Module):
    """A convolutional U-Net with GroupNorm, softmax attention and dropout."""

    def __init__(self, channels: int = 2, width: int = 4, dropout: float = 0.3) -> None:
        super().__init__()
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, width), nn.GroupNorm(2, width)
        self.down = nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.qkv, self.project = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)
        self.leave = nn.Conv2d(2 * width, channels, 3, padding=1)
        self.dropout = nn.Dropout(dropout)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v

    def forward(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        skip = nn.functional.silu(self.norm1(self.enter(x)))
        h = self.dropout(self.down(skip))
        q, k, v = self.qkv(self.norm2(h)).flatten(2).mT.chunk(3, dim=-1)
        h = h + self.project(self.attend(q, k, v).mT.unflatten(-1, h.shape[2:]))
        y = self.leave(torch.cat([skip, nn.functional.interpolate(h, scale_factor=2.0)], dim=1))
        return y if sigma is None else y / sigma.view(-1, 1, 1, 1)


class FusedUNet(UNet):
    """The same with PyTorch's fused attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t[:, None].contiguous() for t in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]


@dataclass(frozen=True)
class Case:
    """A field in float64.

    Args:
        make: builds the field.
        event: the shape of one sample.
        levels: whether it takes sigma.
        conservative: whether it is a gradient.
    """

    make: Callable[[], Callable[..., Tensor]]
    event: tuple[int, ...]
    levels: bool = True
    conservative: bool = False

    def batch(self) -> tuple[Tensor, Tensor | None]:
        """x and sigma."""
        sigma = torch.linspace(0.5, 1.5, B, dtype=torch.float64)
        return randn(B, *self.event, seed=1), sigma if self.levels else None


def mixture(size: int = 2) -> cf.GaussianMixture:
    return cf.GaussianMixture(randn(3, size, seed=5), std=0.6)


def autoencoder(tied: bool) -> nn.Module:
    return cf.Autoencoder(4, 7, generator=rng(), tied=tied).double()


def scalar_energy() -> cf.ScalarEnergy:
    return cf.ScalarEnergy(randomised(MLP(12, out=1)))


CASES: dict[str, Case] = {
    "linear": Case(lambda: cf.LinearField(randn(5, 5)), (5,), levels=False),
    "rotation": Case(cf.Rotation, (2,), levels=False),
    "scalar": Case(lambda: lambda x, sigma: torch.sin(x) / sigma, (), conservative=True),
    "mlp": Case(lambda: randomised(MLP(4)), (4,)),
    "force": Case(lambda: randomised(MLP(12)), (4, 3), levels=False),
    "unet": Case(lambda: randomised(UNet()), (2, 4, 4)),
    "fused": Case(lambda: randomised(FusedUNet()), (2, 4, 4)),
    "paper": Case(lambda: cf.PaperField(randomised(UNet())), (2, 4, 4)),
    "energy": Case(lambda: cf.EnergyField(cf.DenoiserEnergy(randomised(MLP(4)))), (4,), conservative=True),
    "convolutional energy": Case(
        lambda: cf.EnergyField(cf.PaperEnergy(randomised(UNet()))), (2, 4, 4), conservative=True
    ),
    "force energy": Case(lambda: cf.EnergyField(scalar_energy()), (4, 3), levels=False, conservative=True),
    "autoencoder": Case(lambda: autoencoder(False), (4,), levels=False),
    "tied autoencoder": Case(lambda: autoencoder(True), (4,), levels=False, conservative=True),
    "mixture score": Case(lambda: mixture().score, (2,), conservative=True),
}


def dense(field: Callable[..., Tensor], x: Tensor, sigma: Tensor | None, **condition: Tensor) -> Tensor:
    """The per-sample Jacobians (B, D, D) by PyTorch's own function, differentiable; no sample mixes."""
    whole = torch.autograd.functional.jacobian(lambda y: field(y, sigma, **condition), x, create_graph=True)
    n, size = len(x), x[0].numel()
    whole = whole.reshape(n, size, n, size)
    blocks = torch.stack([whole[i, :, i] for i in range(n)])
    assert not any(whole[i, :, j].any() for i in range(n) for j in range(n) if i != j)
    return blocks
