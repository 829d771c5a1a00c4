r"""The two-dimensional sets of Sec. 3.2: how a model is measured, as it should be and as the authors did.

`corrected` asks the model and the exact score at the same point and level. Its points are fresh ones, with
noise, and its likelihood is that of the data with noise sigma_min, so that the exact score has error 0,
asymmetry 0 and an NLL that is the entropy. The gap to the entropy is paired: the same points through both
densities.

`published` repeats the authors' evaluation. Points and oracle are at time n/11, the model is asked at
(n+1)/10, a noise level larger by 1.40 to 1.86; the oracle is a kernel density estimate with bandwidth sigma
on points that have noise sigma already, so the score of noise sqrt(2) sigma (its limit for infinitely many
points is used here; `kernel_score` is the estimate itself). NLL is that of the 50,000 training points
without noise, RK45 with rtol 1e-3, prior N(0, 9 I). All on weights that are not averaged.
"""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from curlfree.distributions import Distribution
from curlfree.estimators import moments, ratio
from curlfree.experiments.toy2d_train import TRAINING_POINTS, Problem, training_set
from curlfree.likelihood import log_prob
from curlfree.metrics import mean_estimate, ratio_estimate
from curlfree.neighbours import precision_recall
from curlfree.objectives import esm
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
    field: Field, problem: Problem, process: Process, seed: int, sizes: Sizes, device: torch.device
) -> dict[str, Any]:
    """Measure a field against the exact score, entropy and data; all draws depend on the seed alone.

    Args:
        field: the score model.
        problem: the data.
        process: the levels that the model knows, and the prior.
        seed: names the test points, which are the same for all fields.
        sizes: how many.
        device: where.

    Returns:
        Lists over the levels that the model knows; ``score_error`` with the 1/2 of Eq. 1, and the means over
        the common levels of all lists; NLL and its paired gap to the exact density; precision and recall;
        evaluations of the network.
    """
    data, found = problem.data, list[dict[str, float]]()
    for k, level in enumerate(LEVELS):
        if level <= process.sigma_range[1] * (1 + 1e-6):
            x0, x, sigma = test_points(data, level, sizes.level, stream(seed, "level", k, device=device))
            found.append(at_level(field, x, sigma, (x0 - x) / sigma.square()[:, None], data.score(x, sigma)))
    lists = {name: [row[name] for row in found] for name in found[0]}
    _, x, sigma = test_points(data, 0.1, sizes.nll, stream(seed, "likelihood", device=device))
    parts = [log_prob(field, part, process, rtol=TOLERANCE, atol=TOLERANCE) for part in x.split(BATCH)]
    model = torch.cat([part.value for part in parts])
    gap = mean_estimate(data.log_prob(x.double(), sigma.double()) - model)
    drawn = draw_samples(field, process, sizes.samples, seed, device)
    _, real, _ = test_points(data, 0.1, sizes.samples, stream(seed, "real", device=device))
    return {
        "levels": LEVELS[: len(found)],
        "lists": lists,
        **{name: sum(values[:COMMON]) / COMMON for name, values in lists.items()},
        "nll": -float(model.mean()),
        "nll_se": mean_estimate(model).se,
        "nll_gap": gap.value,
        "nll_gap_se": gap.se,
        "nfe": drawn.nfe,
        **covered(real, drawn.x),
    }  # fmt: skip


def test_points(
    data: Distribution, level: float, n: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh clean points, the same with noise, and the noise level for each."""
    x0 = data.sample(n, generator)
    sigma = x0.new_full((n,), level)
    return x0, x0 + level * torch.randn(x0.shape, generator=generator, device=x0.device), sigma


@torch.no_grad()
def at_level(field: Field, x: Tensor, sigma: Tensor, target: Tensor, score: Tensor) -> dict[str, float]:
    """Errors and asymmetry at the points of one noise level.

    Args:
        field: the model.
        x: noisy points.
        sigma: the level that the model is asked at.
        target: -z/sigma, the target of denoising score matching.
        score: what the score is compared with.

    Returns:
        ``score_error`` 1/2 ||s - score||^2; ``dsm``, the weighted denoising loss; ``asym``; NAsym as the mean
        of ratios and pooled; each a mean over the points.
    """
    asym, norm2 = moments(field, x, sigma, estimator="exact")
    pooled = ratio_estimate((0.5 * asym).double(), norm2.double())
    return {
        "score_error": float(esm(field, x, sigma, score).double().mean()),
        "dsm": float((sigma.square() * esm(field, x, sigma, target)).double().mean()),
        "asym": float(asym.double().mean()),
        "nasym": float(ratio(asym, norm2).double().mean()),
        "nasym_pooled": pooled.value,
    }


def draw_samples(field: Field, process: Process, n: int, seed: int, device: torch.device) -> Solution:
    """Samples of the probability flow at sigma_min, that is, of data with that noise."""
    start = process.prior_sample((n, 2), stream(seed, "prior", device=device))
    return probability_flow(field, start, process, rtol=TOLERANCE, atol=TOLERANCE)


def covered(real: Tensor, fake: Tensor) -> dict[str, float]:
    """Precision and recall with k = 3."""
    found = precision_recall(real, fake)
    return {"precision": found.precision, "recall": found.recall}


def published(
    field: Field, problem: Problem, seed: int, sizes: Sizes, device: torch.device, *, kernel: bool = False
) -> dict[str, Any]:
    """Measure a field as the authors' program does.

    Args:
        field: the score model with the weights of the last step.
        problem: the data.
        seed: names the training set, which is also the test set.
        sizes: how many points; the likelihood takes five times as many as the corrected one, all 50,000.
        device: where.
        kernel: also compare with the kernel density estimate itself.

    Returns:
        The cells of Table 1; the same with one of the rules mended, to see what each does: score error and
        asymmetry with points and oracle at the level that the model is asked at (``..._matched``), score
        error against the kernel density estimate (``..._kernel``), NLL, precision and recall with a prior of
        the right variance (``..._prior``).
    """
    train = training_set(problem, seed, TRAINING_POINTS, device)
    rows: list[dict[str, float]] = []
    for n in range(10):
        blur, asked = 0.1 * 30 ** (n / 11), 0.1 * 30 ** ((n + 1) / 10)
        z = torch.randn(train.shape, generator=stream(seed, "published", n, device=device), device=device)
        centres, sigma = train + blur * z, train.new_full((sizes.level,), asked)
        clean, z = train[: sizes.level], z[: sizes.level]
        oracle = problem.data.score(centres[: sizes.level], torch.full_like(sigma, math.sqrt(2) * blur))
        row = at_level(field, centres[: sizes.level], sigma, -z / blur, oracle)
        matched = clean + asked * z
        exact = at_level(field, matched, sigma, -z / asked, problem.data.score(matched, sigma))
        row |= {f"{name}_matched": value for name, value in exact.items()}
        if kernel:
            with torch.no_grad():
                estimate = kernel_score(centres[: sizes.level], centres, blur)
                row["score_error_kernel"] = float(esm(field, centres[: sizes.level], sigma, estimate).mean())
        rows.append(row)
    wanted = ("asym", "nasym", "score_error", "asym_matched", "score_error_matched", "score_error_kernel")
    return {
        **{name: sum(row[name] for row in rows) / 10 for name in wanted if name in rows[0]},
        **published_likelihood(field, problem, train[: 5 * sizes.nll]),
        **published_samples(field, problem, train[: sizes.samples], seed),
    }


def published_likelihood(field: Field, problem: Problem, x: Tensor) -> dict[str, float]:
    """NLL by the authors' rules, and with the end of the same trajectories in a prior that fits."""
    fitting = replace(PUBLISHED, data_std=problem.data.data_std)
    parts = [log_prob(field, part, PUBLISHED, rtol=RTOL, atol=ATOL) for part in x.split(BATCH)]
    value, end = torch.cat([part.value for part in parts]), torch.cat([part.x for part in parts]).double()
    change = fitting.prior_log_prob(end) - PUBLISHED.prior_log_prob(end)
    return {"nll": -float(value.mean()), "nll_prior": -float((value + change).mean())}


def published_samples(field: Field, problem: Problem, real: Tensor, seed: int) -> dict[str, float]:
    """Precision and recall by the authors' rules, and with a prior that fits."""
    found: dict[str, float] = {}
    for ending, process in (("", PUBLISHED), ("_prior", replace(PUBLISHED, data_std=problem.data.data_std))):
        start = process.prior_sample((len(real), 2), stream(seed, "prior", device=real.device))
        drawn = probability_flow(field, start, process, rtol=RTOL, atol=ATOL, denoise=True)
        found |= {f"{name}{ending}": value for name, value in covered(real, drawn.x).items()}
        found[f"nfe{ending}"] = drawn.nfe
    return found


def kernel_score(x: Tensor, centres: Tensor, bandwidth: float, rows: int = 250) -> Tensor:
    """The score of a Gaussian kernel density estimate, in blocks of rows of x."""
    parts = []
    for block in x.split(rows):
        logits = torch.cdist(block, centres).square_().mul_(-0.5 / bandwidth**2)
        parts.append((logits.softmax(1) @ centres - block) / bandwidth**2)
    return torch.cat(parts)


def prior_mismatch(data: Distribution, process: Process, points: int = 2**17) -> float:
    """KL of the data with noise sigma_max from the prior, in nats, by a Monte-Carlo sum with a fixed seed."""
    _, x, sigma = test_points(data, process.sigma_range[1], points, stream(0, "mismatch"))
    x = x.double()
    return float((data.log_prob(x, sigma.double()) - process.prior_log_prob(x)).mean())


def with_weights(field: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A copy of the field with other weights."""
    other = copy.deepcopy(field)
    other.load_state_dict(weights, strict=False)
    return other
