r"""The two-dimensional sets of Sec. 3.2: what is trained, how, and all seeds at once.

An *arm* is a parametrisation with its loss. U, C and QC have the network of the paper and its recipe; QC is U
with the penalty, ``L_DSM + lambda sigma^2 1/2 ||J - J^T||^2`` (Eq. A5). The authors' code minimises the
denoising loss without the 1/2 of Eq. 5 (`Recipe.scale` = 2), so that its lambda of 0.1 is one of 0.05 here.
U+, C+ and QC+ are the same three on a denoiser of unit variance (`curlfree.fields.Preconditioned`).

The seeds of an arm are one program: stacked networks see S * B points, B of each seed. Every seed draws its
weights, points (or the order of the paper's fixed ones), levels, noise and probes from streams of its own
(`curlfree.seeds.stream`), a hundred steps at a time; clipping and averaging are per seed, and Adam works on
each number alone. So each seed's run is the run that it would be by itself.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from curlfree.distributions import Checkerboard, Distribution, Spirals, eight_gaussians
from curlfree.ema import Ema
from curlfree.estimators import rademacher
from curlfree.fast import Recorded
from curlfree.fields import (
    DenoiserEnergy,
    DenoiserField,
    EnergyField,
    PaperEnergy,
    PaperField,
    Preconditioned,
)
from curlfree.nets.mlp import FilmMLP, FilmMLPConfig, PaperMLP, PaperMLPConfig
from curlfree.nets.stacked import Stacked, clip_gradients
from curlfree.objectives import dsm
from curlfree.penalty import estimates
from curlfree.processes import VE
from curlfree.seeds import stream

CHUNK = 100  # steps whose random numbers are drawn together
TRAINING_POINTS = 50_000


@dataclass(frozen=True)
class Problem:
    """A set of Sec. 3.2.

    Args:
        title: its name in the paper.
        data: its distribution.
        published: the same as the authors' code draws it (the spirals' points come in pairs x, -x).
        steps: the paper's number of training steps, plus the one by which its loop overruns.
        activation: what the authors put behind the network of C, but not of U.
        extent: half the side of the square to plot.
    """

    title: str
    data: Distribution
    published: Distribution
    steps: int
    activation: Callable[[Tensor], Tensor]
    extent: float


def leaky_relu(x: Tensor) -> Tensor:
    """The authors' activation behind C's network on the 8-Gaussian set."""
    return nn.functional.leaky_relu(x, 0.1)


PROBLEMS: dict[str, Problem] = {
    "8gaussian": Problem("8-Gaussian", eight_gaussians(), eight_gaussians(), 2001, leaky_relu, 9.0),
    "spirals": Problem("Spirals", Spirals(), Spirals(paired=True), 2001, nn.functional.elu, 9.0),
    "checkerboard": Problem("Checkerboard", Checkerboard(), Checkerboard(), 4001, nn.functional.elu, 7.5),
}


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Args:
        sigma_min: the smallest noise level.
        sigma_max: the largest.
        steps: optimisation steps.
        batch: points per step and seed.
        rate: Adam's learning rate, at its largest.
        annealed: raise the rate over 100 steps and lower it to zero along a cosine; else it is constant.
        scale: factor on the denoising loss; 2 drops the 1/2 of Eq. 5.
        points: size of the training set; None for fresh points in every step.
        fraction: the part of the batch that the penalty is evaluated on.
        clip: largest norm of a seed's gradient.
        ema: decay of the average of the weights.
    """

    sigma_min: float
    sigma_max: float
    steps: int
    batch: int
    rate: float
    annealed: bool
    scale: float
    points: int | None
    fraction: float
    clip: float = 1.0
    ema: float = 0.99

    def process(self, data_std: float = 0.0) -> VE:
        """The noise process, with a prior of the moments that the data have after it."""
        return VE(self.sigma_min, self.sigma_max, data_std=data_std)

    def rate_at(self, step: int) -> float:
        """The learning rate of a step."""
        if not self.annealed:
            return self.rate
        return self.rate * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def paper_recipe(steps: int) -> Recipe:
    """The published constants."""
    return Recipe(0.1, 3.0, steps, 5000, 7.5e-4, False, 2.0, TRAINING_POINTS, 1.0)


def plus_recipe(steps: int, batch: int) -> Recipe:
    """Ours: noise until the prior fits, fresh points, an annealed rate."""
    return Recipe(0.1, 10.0, steps, batch, 5e-3, True, 1.0, None, 0.25)


@dataclass(frozen=True)
class Arm:
    """A parametrisation and its penalty.

    Args:
        build: makes the field, with all seeds' networks stacked.
        lmbda: the penalty's factor.
        estimator: a key of `curlfree.estimators.ESTIMATORS`.
    """

    build: Callable[[Problem, Sequence[int]], nn.Module]
    lmbda: float = 0.0
    estimator: str = "exact"


def paper_u(problem: Problem, seeds: Sequence[int]) -> nn.Module:
    """The paper's U with the sign of its code, ``(x - f)/sigma``."""
    networks = [PaperMLP(PaperMLPConfig(), stream(seed, "weights")) for seed in seeds]
    return PaperField(Stacked(networks), printed_sign=True)


def paper_c(problem: Problem, seeds: Sequence[int]) -> nn.Module:
    """The paper's C, the score of ``||x - f||^2/(2 sigma)``."""
    networks = [
        PaperMLP(PaperMLPConfig(), stream(seed, "weights"), activation=problem.activation) for seed in seeds
    ]
    return EnergyField(PaperEnergy(Stacked(networks)))


def denoiser(problem: Problem, seeds: Sequence[int]) -> Preconditioned:
    """A denoiser of unit variance inside and out, with about as many weights as the paper's network.

    The first layer starts three times as wide as usual: features of x that vary within the data's clusters
    halve the error of a short training on all sets.
    """
    networks = [FilmMLP(FilmMLPConfig(width=64), stream(seed, "weights")) for seed in seeds]
    with torch.no_grad():
        for network in networks:
            network.inward.weight.mul_(3)
            network.inward.bias.mul_(3)
    return Preconditioned(Stacked(networks), data_std=problem.data.data_std)


def plus_u(problem: Problem, seeds: Sequence[int]) -> nn.Module:
    """U+, ``(D - x)/sigma^2``."""
    return DenoiserField(denoiser(problem, seeds))


def plus_c(problem: Problem, seeds: Sequence[int]) -> nn.Module:
    """C+, the score of ``||x - D||^2/(2 sigma^2)``."""
    return EnergyField(DenoiserEnergy(denoiser(problem, seeds)))


PAPER_ARMS: dict[str, Arm] = {
    "C": Arm(paper_c),
    "U": Arm(paper_u),
    "QC": Arm(paper_u, lmbda=0.1),
}
PLUS_ARMS: dict[str, Arm] = {
    "C+": Arm(plus_c),
    "U+": Arm(plus_u),
    "QC+": Arm(plus_u, lmbda=0.1),
    "QC+ skew": Arm(plus_u, lmbda=0.1, estimator="skew"),
    "QC+ est~": Arm(plus_u, lmbda=0.1, estimator="paper"),
    "QC+ 0.01": Arm(plus_u, lmbda=0.01),
    "QC+ 0.03": Arm(plus_u, lmbda=0.03),
    "QC+ 0.3": Arm(plus_u, lmbda=0.3),
    "QC+ 1": Arm(plus_u, lmbda=1.0),
}


class Draws(NamedTuple):
    """What a step is made from, the seeds one after another: clean points, levels, noise, probes."""

    x0: Tensor
    sigma: Tensor
    z: Tensor
    v: Tensor


def training_set(problem: Problem, points: int, device: torch.device) -> Tensor:
    """The fixed training points, shape (points, 2), the same for all seeds: the authors drew them once."""
    return problem.published.sample(points, stream(0, "training set", device=device))


def draws(recipe: Recipe, problem: Problem, seeds: Sequence[int], device: torch.device) -> Iterator[Draws]:
    """The random numbers of every step; a seed's are the same whatever the other seeds."""
    sources = [clean_points(recipe, problem, seed, device) for seed in seeds]
    process, shape = recipe.process(), (CHUNK, recipe.batch)
    for chunk in range(math.ceil(recipe.steps / CHUNK)):

        def generators(what: str, chunk: int = chunk) -> list[torch.Generator]:
            return [stream(seed, chunk, what, device=device) for seed in seeds]

        x0 = torch.stack([next(source) for source in sources], 1)
        levels = [process.sample_sigma(math.prod(shape), g).view(shape) for g in generators("levels")]
        noise = [torch.randn(*shape, 2, generator=g, device=device) for g in generators("noise")]
        probes = [rademacher(noise[0], g) for g in generators("probes")]
        sigma, z, v = (torch.stack(parts, 1) for parts in (levels, noise, probes))
        for k in range(min(CHUNK, recipe.steps - chunk * CHUNK)):
            yield Draws(x0[k].flatten(0, 1), sigma[k].flatten(), z[k].flatten(0, 1), v[k].flatten(0, 1))


def clean_points(recipe: Recipe, problem: Problem, seed: int, device: torch.device) -> Iterator[Tensor]:
    """A seed's clean points for a hundred steps at a time, shape (CHUNK, B, 2).

    Fresh ones, or passes through the training set in ever new orders.
    """
    count, shape = CHUNK * recipe.batch, (CHUNK, recipe.batch, 2)
    fixed = None if recipe.points is None else training_set(problem, recipe.points, device)
    for chunk in range(math.ceil(recipe.steps / CHUNK)):
        if fixed is None:
            yield problem.data.sample(count, stream(seed, chunk, "data", device=device)).view(shape)
        else:
            g = stream(seed, chunk, "order", device=device)
            passes = math.ceil(count / len(fixed))
            order = [torch.randperm(len(fixed), generator=g, device=device) for _ in range(passes)]
            yield fixed[torch.cat(order)[:count]].view(shape)


def step_loss(field: nn.Module, draw: Draws, recipe: Recipe, arm: Arm, copies: int) -> Tensor:
    """The sum of the seeds' own losses (Eqs. A4 and A5, mean over each seed's batch)."""
    loss = recipe.scale * (draw.sigma.square() * dsm(field, draw.x0, draw.sigma, draw.z)).mean() * copies
    if arm.lmbda == 0:
        return loss
    count = round(recipe.fraction * recipe.batch)
    x0, sigma, z, v = (a.unflatten(0, (copies, -1))[:, :count].flatten(0, 1) for a in draw)
    x = x0 + sigma[:, None] * z
    asym = estimates(field, x, sigma, estimator=arm.estimator, form="double", probe=lambda like, _: v)
    return loss + arm.lmbda * (sigma.square() * asym).mean() * copies


class Trained(NamedTuple):
    """A trained field: the weights at the end are in `field`, their average in `average`."""

    field: nn.Module
    average: dict[str, Tensor]


def descend(
    field: nn.Module, draw: Draws, recipe: Recipe, arm: Arm, copies: int, optimizer: torch.optim.Optimizer
) -> Tensor:
    """One optimisation step of all seeds; returns the norms of their gradients before clipping."""
    parameters = list(field.parameters())
    gradients = torch.autograd.grad(step_loss(field, draw, recipe, arm, copies), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(gradient)  # in its layout: fused Adam reads memory
    norms = clip_gradients(field, copies, recipe.clip)
    optimizer.step()
    return norms


def train(
    arm: Arm,
    recipe: Recipe,
    problem: Problem,
    seeds: Sequence[int],
    *,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    dtype: torch.dtype = torch.float32,
    advance: Callable[[], None] = lambda: None,
) -> Trained:
    """Train an arm for all seeds side by side.

    Args:
        arm: what is trained.
        recipe: how.
        problem: on which data.
        seeds: the runs.
        device: where.
        dtype: the precision of weights and points; the random numbers are those of single precision.
        advance: called after every step.

    Raises:
        ArithmeticError: a seed's gradient is not finite.
    """
    field, copies = arm.build(problem, seeds).to(device, dtype), len(seeds)
    rate = torch.tensor(recipe.rate, device=device)
    optimizer = torch.optim.Adam(field.parameters(), lr=rate, fused=True, capturable=device.type == "cuda")
    ema = Ema(field, recipe.ema)
    update = Recorded(lambda *draw: descend(field, Draws(*draw), recipe, arm, copies, optimizer))
    norms = torch.zeros(copies)
    for step, draw in enumerate(draws(recipe, problem, seeds, device)):
        rate.fill_(recipe.rate_at(step))
        norms = update(*(a.to(dtype) for a in draw))
        ema.update(field, step + 1)
        advance()
    if not bool(norms.isfinite().all()):
        raise ArithmeticError(f"training diverged: gradient norms of the seeds {norms.tolist()}")
    return Trained(field.requires_grad_(False), ema.weights)
