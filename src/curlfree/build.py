r"""What a configuration describes, made: fields, processes, data.

These functions are the only places where a kind in a configuration decides what is made.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from curlfree.config import PackedData, RunConfig, ToyData
from curlfree.distributions import Checkerboard, Distribution, Spirals, eight_gaussians
from curlfree.fields import (
    DenoiserEnergy,
    DenoiserField,
    EnergyField,
    PaperEnergy,
    PaperField,
    Preconditioned,
    ScoreNormEnergy,
)
from curlfree.nets.mlp import FilmMLP, FilmMLPConfig, PaperMLP, PaperMLPConfig
from curlfree.nets.ncsnpp import NCSNpp, NCSNppConfig
from curlfree.operators import per_sample
from curlfree.processes import Process
from curlfree.seeds import stream, stream_seed

DISTRIBUTIONS: dict[str, Callable[[], Distribution]] = {
    "8gaussians": eight_gaussians,
    "spirals": Spirals,
    "checkerboard": Checkerboard,
}


class ScoreDenoiser(nn.Module):
    """The denoiser of a network that returns a score, ``D = x + sigma^2 s`` (Tweedie)."""

    def __init__(self, score: nn.Module) -> None:
        super().__init__()
        self.score = score

    def forward(self, x: Tensor, sigma: Tensor, **condition: Any) -> Tensor:
        """The denoised x."""
        return x + per_sample(sigma, x).square() * self.score(x, sigma, **condition)


def build_field(config: RunConfig) -> nn.Module:
    """The untrained field of a run, on the CPU; its weights depend on the seed alone.

    Raises:
        ValueError: the network does not exist in this form.
    """
    field = _field(config)
    return field.double() if config.train.precision == "float64" else field


def _field(config: RunConfig) -> nn.Module:
    generator = stream(config.seed, "weights")
    match config.field.network, config.field.form:
        case NCSNppConfig() as network, form:
            score = NCSNpp(network, seed=stream_seed(config.seed, "weights"))
            match form:
                case "score":
                    return score
                case "energy":
                    return EnergyField(DenoiserEnergy(ScoreDenoiser(score)))
                case "paper-energy":
                    return EnergyField(ScoreNormEnergy(score))
        case FilmMLPConfig() as network, ("score" | "energy") as form:
            F = FilmMLP(network, generator)
            D = Preconditioned(F, data_std=network.data_std, data_mean=network.data_mean)
            return DenoiserField(D) if form == "score" else EnergyField(DenoiserEnergy(D))
        case PaperMLPConfig() as network, "score":
            return PaperField(PaperMLP(network, generator), printed_sign=True)
        case PaperMLPConfig() as network, "paper-energy":
            activation = _paper_activation(config.data)
            return EnergyField(PaperEnergy(PaperMLP(network, generator, activation=activation)))
    raise ValueError(
        f"field.form: expected a form that {type(config.field.network).__name__} has, "
        f"found {config.field.form!r}"
    )


def _paper_activation(data: ToyData | PackedData) -> nn.Module:
    """What the authors' energy applies to its network's output."""
    match data:
        case ToyData(name="8gaussians"):
            return nn.LeakyReLU(0.1)
        case _:
            return nn.ELU()


def build_process(config: RunConfig) -> Process:
    """The process of a run."""
    return config.process


def build_distribution(data: ToyData) -> Distribution:
    """The distribution that a toy run is trained on."""
    return DISTRIBUTIONS[data.name]()


def event_shape(config: RunConfig) -> tuple[int, ...]:
    """The shape of one sample."""
    match config.field.network:
        case NCSNppConfig(channels=channels, size=size):
            return (channels, size, size)
        case FilmMLPConfig(dimension=dimension) | PaperMLPConfig(dimension=dimension):
            return (dimension,)


def classes(config: RunConfig) -> int | None:
    """The number of classes of a conditional network, or None."""
    network = config.field.network
    return network.classes if isinstance(network, NCSNppConfig) else None
