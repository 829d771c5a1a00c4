r"""What a configuration describes, made: fields, processes, samplers, data.

These functions are the only places where a kind in a configuration decides what is made.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curlfree.config import PackedData, RunConfig, SampleConfig, ToyData
from curlfree.data.loading import Batch, Batches, to_unit
from curlfree.data.packed import open_packed
from curlfree.distributions import Checkerboard, Distribution, Spirals, eight_gaussians
from curlfree.fast import energy_dsm, prepare
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
from curlfree.noise import Noise
from curlfree.objectives import sigma2
from curlfree.ode import rk45, rk45_per_sample
from curlfree.operators import inner, per_sample
from curlfree.processes import Process
from curlfree.samplers import (
    Solution,
    euler,
    heun,
    predictor_corrector,
    probability_flow,
    reverse_sde,
)
from curlfree.seeds import shard, stream, stream_seed

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

    def tangents(
        self, x: Tensor, sigma: Tensor, vs: tuple[Tensor, ...], **condition: Any
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The denoised x and ``J_D v = v + sigma^2 J v`` for each v."""
        variance = per_sample(sigma, x).square()
        score: Any = self.score
        s, products = score.tangents(x, sigma, vs, **condition)
        return x + variance * s, tuple(v + variance * Jv for v, Jv in zip(vs, products, strict=True))


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


def compile_field(config: RunConfig, field: nn.Module, *, backend: str = "inductor") -> None:
    """Compile the network of a field, in place: an NCSN++ by regions, any other as a whole.

    A field that is differentiated twice, as the energy of such another network is, runs eagerly there.

    Args:
        config: of the run.
        field: the field, on its device.
        backend: of `torch.compile`.
    """
    match config.field.network:
        case NCSNppConfig():
            prepare(field, backend=backend)
        case FilmMLPConfig() | PaperMLPConfig():
            for part in field.modules():
                if isinstance(part, FilmMLP | PaperMLP):
                    part.compile(backend=backend)


def score_matching(config: RunConfig, field: nn.Module) -> Callable[..., Tensor]:
    """Score matching with the weight sigma^2 in its fastest form, ``loss(x0, sigma, z, condition)``."""
    match config.field.network, field:
        case NCSNppConfig(), EnergyField():
            energy: Any = field.energy
            return lambda x0, sigma, z, condition: (
                sigma2(sigma) * energy_dsm(energy, x0, sigma, z, condition=condition)
            )
        case _:
            return partial(_residual_loss, field)


def _residual_loss(
    field: nn.Module, x0: Tensor, sigma: Tensor, z: Tensor, condition: dict[str, Any]
) -> Tensor:
    """``1/2 ||sigma s(x, sigma) + z||^2``, which is `curlfree.dsm` with the weight sigma^2."""
    level = per_sample(sigma, x0)
    residual = level * field(x0 + level * z, sigma, **condition).to(x0.dtype) + z
    return 0.5 * inner(residual, residual)


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


def build_sampler(config: SampleConfig, noise: Noise) -> Callable[..., Solution]:
    """The sampler of a configuration, a function of field, starting points, process and ``condition=``."""
    steps, denoise = config.steps, config.denoise
    match config.sampler:
        case "pc":
            return partial(
                predictor_corrector,
                noise=noise,
                steps=steps or 1000,
                corrector_steps=config.corrector_steps,
                snr=config.snr,
                batch_norms=config.batch_norms,
                denoise=denoise,
            )
        case "sde":
            return partial(reverse_sde, noise=noise, steps=steps or 1000, denoise=denoise)
        case "ode":
            solver = rk45_per_sample if config.per_sample else rk45
            return partial(
                probability_flow, solver=solver, rtol=config.rtol, atol=config.atol, denoise=denoise
            )
        case "heun":
            return partial(heun, steps=steps or 18, churn=config.churn, noise=noise, denoise=denoise)
        case "euler":
            return partial(euler, steps=steps or 100, denoise=denoise)


def build_distribution(data: ToyData) -> Distribution:
    """The distribution that a toy run is trained on."""
    return DISTRIBUTIONS[data.name]()


class ToyBatches:
    """Fresh samples in every step, a function of (seed, step, position in the global batch).

    Args:
        distribution: what to draw from.
        batch_size: of the global batch, over all workers.
        seed: of the run.
        device: where to draw.
        rank: this worker.
        world: the number of workers.
    """

    def __init__(
        self,
        distribution: Distribution,
        *,
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.distribution, self.batch_size, self.seed, self.device = distribution, batch_size, seed, device
        self.mine = shard(batch_size, rank, world)

    def run(self, first: int, stop: int) -> Iterator[Batch]:
        """The batches of the steps first to stop (exclusive)."""
        rows = torch.arange(self.batch_size)[self.mine]
        for step in range(first, stop):
            generator = stream(self.seed, "data", step, device=self.device)
            x0 = self.distribution.sample(self.batch_size, generator)[self.mine]
            yield Batch(x0, torch.full((len(x0),), -1, device=self.device), rows)


@dataclass(frozen=True)
class TrainingData:
    """What a run trains on.

    Args:
        batches: gives the batches of any steps.
        identity: differs if the data do: the checksum of a packed file, the name of a distribution.
        held_out: clean samples that are not trained on, on the CPU; perhaps none.
    """

    batches: Batches | ToyBatches
    identity: str
    held_out: Tensor


def build_data(config: RunConfig, device: torch.device, rank: int = 0, world: int = 1) -> TrainingData:
    """Open a run's training data.

    Raises:
        ValueError: the packed file is missing, damaged, has no such split or images of another shape than the
            network's, or its labels are not those of the network's classes.
    """
    place: dict[str, Any] = {"device": device, "rank": rank, "world": world}
    size, seed, wanted = config.train.batch_size, config.seed, config.train.validation_samples
    match config.data:
        case ToyData() as data:
            distribution = build_distribution(data)
            held_out = distribution.sample(max(wanted, 1), stream(seed, "held out"))[:wanted]
            toys = ToyBatches(distribution, batch_size=size, seed=seed, **place)
            return TrainingData(toys, data.name, held_out)
        case PackedData() as data:
            packed = open_packed(data.path)
            images, labels = packed.split(data.split)
            _check_images(config, images, labels)
            held_out = torch.empty(0)
            if wanted and data.validation in packed.header.splits:
                held_out = to_unit(torch.tensor(packed.split(data.validation)[0][:wanted]))
            batches = Batches(images, labels, batch_size=size, seed=seed, flip=data.flip, **place)
            return TrainingData(batches, packed.header.sha256, held_out)


def _check_images(config: RunConfig, images: np.ndarray, labels: np.ndarray) -> None:
    found = (images.shape[3], *images.shape[1:3])
    if found != event_shape(config):
        raise ValueError(
            f"data.path: expected images of (channels, height, width) = {event_shape(config)} for this "
            f"network, found {found}; change field.network or use `curlfree prepare --size`"
        )
    number = classes(config)
    if number is not None and labels.max() >= number:
        raise ValueError(
            f"data.path: expected labels below field.network.classes = {number}, found {labels.max()}"
        )


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
