r"""The two-dimensional sets of Sec. 3.2: how a model is measured, as it should be and as the authors did.

`corrected` asks the model and the exact score at the same point and level. Its points are fresh ones, with
noise, and its likelihood is that of the data with noise sigma_min, so that the exact score has error 0,
asymmetry 0 and an NLL that is the entropy. The gap to the entropy is paired: the same points through both
densities.

All seeds of an arm are measured at once: the field is that of S stacked networks, a batch S * B points, the
first B for the first seed. Draws and RK45's steps are each seed's own, so its values are those it has alone.

`published` repeats the authors' evaluation. Points and oracle are at time n/11, the model is asked at
(n+1)/10, a noise level larger by 1.40 to 1.86; the oracle is a kernel density estimate with bandwidth sigma
on points that have noise sigma already, so (for infinitely many points) the score of noise sqrt(2) sigma. NLL
is that of the 50,000 training points without noise, RK45 with rtol 1e-3, prior N(0, 9 I). All on weights that
are not averaged.
"""

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from curlfree.distributions import Distribution
from curlfree.estimators import moments, ratio
from curlfree.experiments.toy2d_train import TRAINING_POINTS, Problem, training_set
from curlfree.likelihood import log_prob
from curlfree.metrics import mean_estimate, ratio_estimate
from curlfree.neighbours import precision_recall
from curlfree.objectives import esm
from curlfree.ode import rk45_groups
from curlfree.operators import Field
from curlfree.processes import VE, Process
from curlfree.samplers import Solution, probability_flow
from curlfree.seeds import stream

LEVELS = tuple(0.1 * 30 ** (k / 10) for k in range(11)) + (5.5, 10.0)
COMMON = 11  # the levels that the paper's models know, 0.1 to 3
TOLERANCE = 1e-5
PUBLISHED, RTOL, ATOL = VE(0.1, 3.0, t_min=1e-5), 1e-3, 1e-5
BATCH = 10_000


@dataclass(frozen=True)
class Sizes:
    """How many points a measurement takes.

    Args:
        level: points at each noise level.
        nll: points of the likelihood.
        samples: samples for precision and recall, against as many points.
    """

    level: int = 5000
    nll: int = 10_000
    samples: int = 5000


def corrected(
    field: Field, problem: Problem, process: Process, seeds: Sequence[int], sizes: Sizes, device: torch.device
) -> list[dict[str, Any]]:
    """Measure a field against the exact score, entropy and data; all draws depend on the seed alone.

    Args:
        field: the score model, of one stacked network per seed.
        problem: the data.
        process: the levels that the model knows, and the prior.
        seeds: name the test points, which are the same for all fields.
        sizes: how many.
        device: where.

    Returns:
        For each seed: lists over the levels that the model knows; ``score_error`` with the 1/2 of Eq. 1, and
        the means over the common levels of all lists; NLL and its paired gap to the exact density; precision
        and recall; evaluations of the network.
    """
    copies, top = len(seeds), process.sigma_range[1] * (1 + 1e-6)
    test = test_set(problem, tuple(seeds), sizes, device)
    rows = [at_level(field, *level, copies) for level in test.levels if float(level.sigma[0]) <= top]
    model, _ = densities(field, test.x, process, copies, TOLERANCE, TOLERANCE)
    gaps = test.log_prob.view(copies, -1) - model
    drawn = draw_samples(field, process, sizes.samples, seeds, device, TOLERANCE, TOLERANCE)
    found = []
    for i in range(copies):
        lists = {name: [row[i][name] for row in rows] for name in rows[0][i]}
        gap, fake, truth = mean_estimate(gaps[i]), drawn.x.chunk(copies)[i], test.real.chunk(copies)[i]
        found.append(
            {
                "levels": LEVELS[: len(rows)],
                "lists": lists,
                **{name: sum(values[:COMMON]) / COMMON for name, values in lists.items()},
                "nll": -float(model[i].mean()),
                "nll_se": mean_estimate(model[i]).se,
                "nll_gap": gap.value,
                "nll_gap_se": gap.se,
                "nfe": int(drawn.evaluations.chunk(copies)[i][0]),
                **covered(truth, fake),
            }
        )
    return found


def test_points(
    data: Distribution, level: float, n: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh clean points, the same with noise, and the noise level for each."""
    x0 = data.sample(n, generator)
    sigma = x0.new_full((n,), level)
    return x0, x0 + level * torch.randn(x0.shape, generator=generator, device=x0.device), sigma


class Level(NamedTuple):
    """Points of one noise level, the seeds one after another.

    Args:
        x: noisy points.
        sigma: the level that a model is asked at.
        target: -z/sigma, the target of denoising score matching.
        score: what its score is compared with.
    """

    x: Tensor
    sigma: Tensor
    target: Tensor
    score: Tensor


class TestSet(NamedTuple):
    """What all models are measured on in corrected mode: a level each, points of density, real samples."""

    levels: tuple[Level, ...]
    x: Tensor
    log_prob: Tensor
    real: Tensor


@functools.lru_cache(maxsize=2)
def test_set(problem: Problem, seeds: tuple[int, ...], sizes: Sizes, device: torch.device) -> TestSet:
    """Fresh points with exact scores and densities; kept, since all arms of a set are measured on them."""
    data = problem.data

    def points(level: float, n: int, *name: str | int) -> tuple[Tensor, Tensor, Tensor]:
        parts = [test_points(data, level, n, stream(seed, *name, device=device)) for seed in seeds]
        x0, x, sigma = (torch.cat(column) for column in zip(*parts, strict=True))
        return x0, x, sigma

    levels = []
    for k, level in enumerate(LEVELS):
        x0, x, sigma = points(level, sizes.level, "level", k)
        levels.append(Level(x, sigma, (x0 - x) / sigma.square()[:, None], data.score(x, sigma)))
    _, x, sigma = points(0.1, sizes.nll, "likelihood")
    log_prob = data.log_prob(x.double(), sigma.double())
    return TestSet(tuple(levels), x, log_prob, points(0.1, sizes.samples, "real")[1])


@torch.no_grad()
def at_level(
    field: Field, x: Tensor, sigma: Tensor, target: Tensor, score: Tensor, copies: int
) -> list[dict[str, float]]:
    """Each seed's errors and asymmetry at the points of one noise level.

    Args:
        field: the model.
        x: noisy points.
        sigma: the level that the model is asked at.
        target: -z/sigma, the target of denoising score matching.
        score: what the score is compared with.
        copies: the number of seeds.

    Returns:
        ``score_error`` 1/2 ||s - score||^2; ``dsm``, the weighted denoising loss; ``asym``; NAsym as the mean
        of ratios and pooled; each a mean over the points.
    """
    asym, norm2 = moments(field, x, sigma, estimator="exact")
    means = {
        "score_error": esm(field, x, sigma, score),
        "dsm": sigma.square() * esm(field, x, sigma, target),
        "asym": asym,
        "nasym": ratio(asym, norm2),
    }
    columns = {name: each.double().view(copies, -1).mean(1).tolist() for name, each in means.items()}
    pairs = zip((0.5 * asym).double().chunk(copies), norm2.double().chunk(copies), strict=True)
    columns["nasym_pooled"] = [ratio_estimate(a, b).value for a, b in pairs]
    return [{name: column[i] for name, column in columns.items()} for i in range(copies)]


def densities(
    field: Field, x: Tensor, process: Process, copies: int, rtol: float, atol: float
) -> tuple[Tensor, Tensor]:
    """Log-densities (S, B) and ends (S, B, 2) of the trajectories of x, at most `BATCH` of a seed at once."""
    parts = [
        log_prob(field, part.flatten(0, 1), process, solver=rk45_groups(copies), rtol=rtol, atol=atol)
        for part in x.unflatten(0, (copies, -1)).split(BATCH, dim=1)
    ]
    ends = torch.cat([part.x.unflatten(0, (copies, -1)) for part in parts], 1)
    return torch.cat([part.value.view(copies, -1) for part in parts], 1), ends


def draw_samples(
    field: Field,
    process: Process,
    n: int,
    seeds: Sequence[int],
    device: torch.device,
    rtol: float,
    atol: float,
    *,
    denoise: bool = False,
) -> Solution:
    """Samples of the probability flow at sigma_min, that is, of data with that noise, n for each seed."""
    start = torch.cat([process.prior_sample((n, 2), stream(seed, "prior", device=device)) for seed in seeds])
    solver = rk45_groups(len(seeds))
    return probability_flow(field, start, process, solver=solver, rtol=rtol, atol=atol, denoise=denoise)


def covered(real: Tensor, fake: Tensor) -> dict[str, float]:
    """Precision and recall with k = 3."""
    found = precision_recall(real, fake)
    return {"precision": found.precision, "recall": found.recall}


def published(
    field: Field, problem: Problem, seeds: Sequence[int], sizes: Sizes, device: torch.device
) -> list[dict[str, Any]]:
    """Measure a field as the authors' program does.

    Args:
        field: the score model with the weights of the last step, of one stacked network per seed.
        problem: the data.
        seeds: name the noise; the training set, which is also the test set, is one.
        sizes: how many points; the likelihood takes five times as many as the corrected one, all 50,000.
        device: where.

    Returns:
        For each seed the cells of Table 1; the same with one of the rules mended, to see what each does:
        score error and asymmetry with points and oracle at the level that the model is asked at
        (``..._matched``), score error against the limit of the kernel density estimate (``..._limit``), NLL,
        precision and recall with a prior of the right variance (``..._prior``).
    """
    copies = len(seeds)
    test = published_set(problem, tuple(seeds), sizes, device)
    rows: list[list[dict[str, float]]] = []
    for level in test.levels:
        row = at_level(field, *level.published, copies)
        matched = at_level(field, *level.matched, copies)
        with torch.no_grad():
            limit = esm(field, level.published.x, level.published.sigma, level.limit)
        for own, mended, error in zip(row, matched, limit.double().view(copies, -1).mean(1), strict=True):
            own |= {f"{name}_matched": value for name, value in mended.items()}
            own["score_error_limit"] = float(error)
        rows.append(row)
    wanted = [f"{name}{ending}" for name in ("asym", "nasym", "score_error") for ending in ("", "_matched")]
    wanted += ["nasym_pooled", "score_error_limit"]
    likelihoods = published_likelihood(field, problem, test.points[:, : 5 * sizes.nll])
    samples = published_samples(field, problem, test.points[:, : sizes.samples], seeds)
    return [
        {name: sum(row[i][name] for row in rows) / 10 for name in wanted} | likelihoods[i] | samples[i]
        for i in range(copies)
    ]


class PublishedLevel(NamedTuple):
    """One level by the authors' rules, and with one of them changed.

    Args:
        published: points at time n/11, asked at (n+1)/10, compared with the kernel density estimate's score.
        limit: what that is for infinitely many points, the score of noise sqrt(2) sigma.
        matched: points with the noise of the level that the model is asked at, and the exact score there.
    """

    published: Level
    limit: Tensor
    matched: Level


class PublishedSet(NamedTuple):
    """What all models are measured on by the authors' rules; `points` S times the training set."""

    levels: tuple[PublishedLevel, ...]
    points: Tensor


@functools.lru_cache(maxsize=1)
def published_set(
    problem: Problem, seeds: tuple[int, ...], sizes: Sizes, device: torch.device
) -> PublishedSet:
    """The training set with noise and the scores to compare with; kept, since all arms need them.

    As in the authors' program the points and the kernels' centres get independent noise.
    """
    points, levels = training_set(problem, TRAINING_POINTS, device), []
    clean = points[: sizes.level].repeat(len(seeds), 1)

    def noise(like: Tensor, *name: str | int) -> Tensor:
        sources = (stream(seed, *name, device=device) for seed in seeds)
        return torch.stack([torch.randn(like.shape, generator=g, device=device) for g in sources])

    for n in range(10):
        blur, asked = 0.1 * 30 ** (n / 11), 0.1 * 30 ** ((n + 1) / 10)
        z, sigma = (
            noise(points[: sizes.level], "published", n).flatten(0, 1),
            clean.new_full((len(clean),), asked),
        )
        x, matched = clean + blur * z, clean + asked * z
        centres = points + blur * noise(points, "published kernels", n)
        pairs = zip(x.chunk(len(seeds)), centres, strict=True)
        kernel = torch.cat([kernel_score(own, blurred, blur) for own, blurred in pairs])
        levels.append(
            PublishedLevel(
                Level(x, sigma, -z / blur, kernel),
                problem.data.score(x, torch.full_like(sigma, math.sqrt(2) * blur)),
                Level(matched, sigma, -z / asked, problem.data.score(matched, sigma)),
            )
        )
    return PublishedSet(tuple(levels), points.expand(len(seeds), -1, -1))


def published_likelihood(field: Field, problem: Problem, x: Tensor) -> list[dict[str, float]]:
    """NLL by the authors' rules, and with the end of the same trajectories in a prior that fits."""
    fitting = replace(PUBLISHED, data_std=problem.data.data_std)
    value, end = densities(field, x.flatten(0, 1), PUBLISHED, len(x), RTOL, ATOL)
    end = end.double().flatten(0, 1)
    change = (fitting.prior_log_prob(end) - PUBLISHED.prior_log_prob(end)).view(value.shape)
    pairs = zip(-value.mean(1), -(value + change).mean(1), strict=True)
    return [{"nll": float(a), "nll_prior": float(b)} for a, b in pairs]


def published_samples(
    field: Field, problem: Problem, real: Tensor, seeds: Sequence[int]
) -> list[dict[str, float]]:
    """Precision and recall by the authors' rules, and with a prior that fits."""
    found: list[dict[str, float]] = [{} for _ in seeds]
    for ending, process in (("", PUBLISHED), ("_prior", replace(PUBLISHED, data_std=problem.data.data_std))):
        drawn = draw_samples(field, process, real.shape[1], seeds, real.device, RTOL, ATOL, denoise=True)
        for i, fake in enumerate(drawn.x.chunk(len(seeds))):
            found[i] |= {f"{name}{ending}": value for name, value in covered(real[i], fake).items()}
            found[i][f"nfe{ending}"] = int(drawn.evaluations.chunk(len(seeds))[i][0])
    return found


def kernel_score(x: Tensor, centres: Tensor, bandwidth: float, rows: int = 250) -> Tensor:
    """The score of a Gaussian kernel density estimate, in blocks of rows of x."""
    parts = []
    for block in x.split(rows):
        logits = torch.cdist(block, centres).square_().mul_(-0.5 / bandwidth**2)
        parts.append((logits.softmax(1) @ centres - block) / bandwidth**2)
    return torch.cat(parts)


def prior_mismatch(data: Distribution, process: Process) -> float:
    """KL of the data with noise sigma_max from the prior, a Gaussian, in nats: cross-entropy less entropy."""
    top = process.sigma_range[1]
    ratio = (data.data_std**2 + top**2) / process.prior_std**2
    return math.log(2 * math.pi * process.prior_std**2) + ratio - data.entropy(top)


def with_weights(field: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A copy of the field with other weights."""
    other = copy.deepcopy(field)
    other.load_state_dict(weights, strict=False)
    return other
