"""Runs with fields whose answers are known, for the tests of sampling and evaluation."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from curlfree.config import FieldConfig, PackedData, RunConfig, ToyData
from curlfree.nets.ncsnpp import NCSNppConfig
from curlfree.presets import PRESETS
from curlfree.processes import VE, Process
from curlfree.runs import Run


class GaussianScore(nn.Module):
    """The score of N(mean, std^2 I), whose mean may depend on a class."""

    means: Tensor

    def __init__(self, means: Tensor, std: float) -> None:
        super().__init__()
        self.register_buffer("means", means)
        self.std = std
        self.calls = 0

    def forward(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
        self.calls += 1
        shape = (-1, *(1,) * (x.ndim - 1))
        mean = 0.0 if labels is None else self.means[labels].to(x.dtype).view(shape)
        return -(x - mean) / (self.std**2 + sigma.square()).view(shape)


def toy_run(
    folder: Path, field: nn.Module, process: Process | None = None, name: str = "8gaussians-u"
) -> Run:
    config = PRESETS[name]
    assert isinstance(config.data, ToyData)
    return Run(folder, config, process or VE(0.05, 5.0), field, 7, "ema")


def image_config(size: int = 4, channels: int = 1, classes: int | None = None, path: str = "") -> RunConfig:
    network = NCSNppConfig(
        size=size, channels=channels, width=8, multipliers=(1,), blocks=1, attention=(), classes=classes
    )
    data = PackedData(path=path)
    return replace(PRESETS["tiny-u"], field=FieldConfig(network=network), data=data)


def image_run(folder: Path, field: nn.Module, config: RunConfig, process: Process | None = None) -> Run:
    return Run(folder, config, process or VE(0.01, 5.0), field, 7, "ema")
