"""The same loop with the quasi-conservative penalty: two lines more than train_before.py."""

import torch
from torch import nn

import curlfree as cf


class Net(nn.Module):
    """A score network: x and log sigma in, the score out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2)
        )

    def forward(self, x, sigma):
        s = sigma[:, None]
        return self.layers(torch.cat([x / (1 + s**2) ** 0.5, s.log() / 4], dim=1)) / s


def data(n, generator):
    """Two rings of radius 1 and 2 with a little noise."""
    angle = 2 * torch.pi * torch.rand(n, generator=generator)
    radius = 1 + torch.randint(0, 2, (n,), generator=generator) + 0.1 * torch.randn(n, generator=generator)
    return radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)


def batch(n, generator):
    """Clean points, noise levels from 0.1 to 10, unit noise."""
    sigma = 10 ** (2 * torch.rand(n, generator=generator) - 1)
    return data(n, generator), sigma, torch.randn(n, 2, generator=generator)


def train(steps=2000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        x0, sigma, z = batch(256, generator)
        x = x0 + sigma[:, None] * z
        loss = 0.5 * (sigma[:, None] * net(x, sigma) + z).square().sum(1).mean()
        loss = loss + cf.qc_loss(net, x, sigma, weight=sigma**2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net


if __name__ == "__main__":
    train()
