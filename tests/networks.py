"""Small networks with weights that make every layer matter, for several test files."""

import torch
from torch import Tensor

from curlfree.nets import NCSNpp, NCSNppConfig

SMALL = NCSNppConfig(channels=1, size=8, width=8, multipliers=(1, 2), blocks=1, attention=(4,), dropout=0.3)


def random_net(config: NCSNppConfig = SMALL, seed: int = 0) -> NCSNpp:
    """A float64 network in evaluation mode whose weights are all of order one, unlike the initial ones."""
    net = NCSNpp(config, seed).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            fan_in = max(p[0].numel(), 1)
            p.copy_(torch.randn(p.shape, generator=generator) / fan_in**0.5)
        net.all_modules[0].W.mul_(0.3)
    return net


def random_batch(config: NCSNppConfig = SMALL, batch: int = 2, extra: int = 1) -> tuple[Tensor, ...]:
    """x, sigma and `extra` directions, in float64."""
    generator = torch.Generator().manual_seed(1)
    shape = (batch, config.channels, config.size, config.size)
    sigma = torch.linspace(0.3, 2, batch, dtype=torch.float64)
    images = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(1 + extra)]
    return images[0], sigma, *images[1:]
