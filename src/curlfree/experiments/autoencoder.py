r"""The one-layer autoencoder of Sec. 6: Figs. 3 and A4, over many seeds, without and with data.

The field is ``s(x) = R h(W^T x + b) + c`` in the plane, h Swish with a learned slope per unit. Its Jacobian
is ``J = R diag(h') W^T = sum_i h_i' R_i W_i^T``, so its only rotation density (Eq. 8) is ``ROT_12 = sum_i
h_i'(x) kappa_i`` with ``kappa_i = R_1i W_2i - R_2i W_1i``, and Asym = ROT_12^2: exact and closed, no
probes.

The paper minimises L_QC alone (Eq. 13) on a fixed grid, and reads off that ||WR^T - RW^T|| falls to zero
while ||W - R|| does not: conservative without tied weights. But ``WR^T = RW^T`` says only ``sum_i kappa_i =
0``. For a nonlinear h the field is conservative where ``sum_i kappa_i h_i'(x) = 0`` at every x, that is,
for units with different h_i', if every kappa_i is 0: the columns of W and R are parallel pair by pair
(angle 0). Units with the same h_i' act as one unit with the sum of their columns of R; it is that sum that
has to be parallel.

So what tied weights miss is one number per unit, ``R_i = a_i W_i``. The corrected mode adds what the
published run has not got, data: denoising score matching (Eq. 5) on a Gaussian mixture plus lambda L_QC
(Eq. 12), for U (lambda = 0), QC, C tied (R = W) and C parallel (R_i = a_i W_i), scored against the exact
score.

All seeds of an arm train as one batch of stacked weights, shape (S, ...). Nothing couples two seeds: each
has its own initial weights, data and clipping, and the optimiser works elementwise.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curlfree.distributions import GaussianMixture
from curlfree.experiments.progress import Advance, shown, silent
from curlfree.experiments.records import Record
from curlfree.operators import jacobian
from curlfree.provenance import provenance
from curlfree.seeds import stream

Weights = dict[str, Tensor]
Loss = Callable[[Weights, int], Tensor]
Decoder = Callable[[Weights], Tensor]

SEEDS = 50
PAPER_SEED = 8
PAPER = {  # printed by the authors' program with seed 8; sym is |(WR^T - RW^T)_12|
    "first": {"loss": 0.2625, "sym": 0.835, "difference": 0.999},
    "last": {"loss": 8.0e-11, "sym": 6.0e-8, "difference": 1.007},
}
HIDDEN, STEPS, LEARNING_RATE, LOG_EVERY = 2, 10_002, 1e-4, 200
GRID, EXTENT = 40, 10.0
SAME_LINE, SAME_UNIT = 0.1, 1e-4  # degrees; rms difference of two h' on the grid
REACHED = {"loss": 1e-9, "sym": 1e-6, "difference": 0.1}

DATA_MEANS = ((-1.5, -0.5), (1.5, 0.5), (0.0, 1.5))
DATA_STD, SIGMA = 0.5, 0.5
DATA_HIDDEN, DATA_STEPS, DATA_RATE, DATA_BATCH, DATA_CHUNK = 8, 5_000, 3e-3, 128, 100
DATA_LAMBDA = 1.0
TEST_POINTS = 4_000


@dataclass(frozen=True)
class Arm:
    """A model of the corrected mode.

    Args:
        name: its name in the tables.
        weight: lambda of Eq. 12.
        decoder: makes R, of shape (S, 2, H), from the weights.
    """

    name: str
    weight: float
    decoder: Decoder


def free(weights: Weights) -> Tensor:
    """R of its own."""
    return weights["R"]


def tied(weights: Weights) -> Tensor:
    """R = W."""
    return weights["W"]


def parallel(weights: Weights) -> Tensor:
    """``R_i = a_i W_i``; the numbers a are learned from the first row of the drawn R."""
    return weights["R"][:, :1] * weights["W"]


ARMS = (
    Arm("U", 0.0, free),
    Arm("QC", DATA_LAMBDA, free),
    Arm("C tied", 0.0, tied),
    Arm("C parallel", 0.0, parallel),
)


def draw_weights(seeds: Sequence[int], hidden: int = HIDDEN) -> Weights:
    """Initial weights in [-1, 1), stacked over seeds: R and W (S, 2, H), b and slope (S, H), c (S, 2).

    The numbers and their order are those of the authors' program, so that seed 8 is its run: a generator
    seeded with the seed, 2 x (2 H + H) numbers that the two layers' default initialisation uses up, then R,
    c, W^T and b. (Found by matching the three numbers printed at step 0.)
    """
    drawn: list[Weights] = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        torch.rand(2 * hidden + hidden + 2 * hidden + 2, generator=generator)

        def uniform(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.empty(shape).uniform_(-1, 1, generator=generator)

        R, c, W, b = uniform(2, hidden), uniform(2), uniform(hidden, 2).T, uniform(hidden)
        drawn.append({"R": R, "c": c, "W": W, "b": b, "slope": torch.ones(hidden)})
    return {name: torch.stack([w[name] for w in drawn]).contiguous() for name in drawn[0]}


def evaluate(weights: Weights, x: Tensor, decoder: Decoder = free) -> tuple[Tensor, Tensor]:
    """The field and its rotation density.

    Args:
        weights: stacked over S seeds.
        x: points as columns, of shape (2, N) for all seeds or (S, 2, N).
        decoder: makes R.

    Returns:
        s, of shape (S, 2, N), and ``ROT_12 = sum_i h_i' kappa_i`` (Eq. 8), of shape (S, N); squared, Asym.
    """
    R, (value, slope) = decoder(weights), _swish(weights, x)
    s = R @ value + weights["c"][..., None]
    return s, (torsion(weights, decoder)[:, None] @ slope)[:, 0]


def torsion(weights: Weights, decoder: Decoder = free) -> Tensor:
    """``kappa_i = R_1i W_2i - R_2i W_1i`` of every unit, shape (S, H)."""
    R, W = decoder(weights), weights["W"]
    return R[:, 0] * W[:, 1] - R[:, 1] * W[:, 0]


def _swish(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """``h(z) = z sigmoid(slope z)`` at z = W^T x + b and its derivative in z, each of shape (S, H, N)."""
    z = weights["W"].mT @ x + weights["b"][..., None]
    scaled = weights["slope"][..., None] * z
    gate = torch.sigmoid(scaled)
    return z * gate, gate * (1 + scaled * (1 - gate))


def rotation(weights: Weights, x: Tensor) -> Tensor:
    """ROT_12 alone, for free weights, shape (S, N)."""
    return (torsion(weights)[:, None] @ _swish(weights, x)[1])[:, 0]


def grid() -> Tensor:
    """The 40 x 40 grid on [-10, 10]^2 of the published run, as columns, shape (2, 1600)."""
    axis = torch.linspace(-EXTENT, EXTENT, GRID)
    return torch.cartesian_prod(axis, axis).T.contiguous()


def qc_on_grid(points: Tensor) -> Loss:
    """L_QC (Eq. 13) of every seed on fixed points, shape (S,)."""
    return lambda weights, step: rotation(weights, points).square().mean(1)


def train(
    weights: Weights,
    loss: Loss,
    *,
    steps: int,
    learning_rate: float,
    log_every: int,
    log: Callable[[Weights, Tensor], dict[str, Tensor]],
    advance: Callable[[], None] = lambda: None,
) -> tuple[Weights, dict[str, list[Any]]]:
    """Train all seeds side by side: Adam, gradients clipped to norm 1 seed by seed.

    Args:
        weights: initial weights; not changed.
        loss: (weights, step) -> one loss for each seed, shape (S,).
        steps: the number of steps.
        learning_rate: of Adam.
        log_every: steps between two rows of the history.
        log: (weights, losses) -> numbers to keep, each of shape (S,).
        advance: called after every step.

    Returns:
        The trained weights, and the history: steps and, for each number, lists over time of lists over seeds.
    """
    weights = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    optimiser = torch.optim.Adam(weights.values(), lr=learning_rate)
    history: dict[str, list[Any]] = {"step": []}
    for step in range(steps):
        losses = loss(weights, step)
        if step % log_every == 0 or step == steps - 1:
            with torch.no_grad():
                for name, value in log(weights, losses).items():
                    history.setdefault(name, []).append([float(f"{v:.6g}") for v in value.tolist()])
            history["step"].append(step)
        optimiser.zero_grad()
        losses.sum().backward()
        _clip([w.grad for w in weights.values() if w.grad is not None])
        optimiser.step()
        advance()
    return {name: w.detach() for name, w in weights.items()}, history


def _clip(gradients: list[Tensor], largest: float = 1.0) -> None:
    """Clip the gradient of every seed to norm 1, as `torch.nn.utils.clip_grad_norm_` does for one model."""
    norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(factor.view(-1, *[1] * (g.ndim - 1)))


def conditions(weights: Weights, decoder: Decoder = free) -> dict[str, Tensor]:
    """The conditions on the weights that are at issue, each of shape (S,).

    Returns:
        "sym": ||WR^T - RW^T||_F; "difference": ||W - R||_F; "angle": the largest angle in degrees between the
        lines of paired columns of W and R, units with a vanishing column left out; "norm": ||R||_F.
    """
    R, W = decoder(weights), weights["W"]
    product = W @ R.mT
    length = R.norm(dim=1) * W.norm(dim=1)
    sine = torch.where(length > 1e-3, torsion(weights, decoder).abs() / length, 0.0)
    return {
        "sym": (product - product.mT).flatten(1).norm(dim=1),
        "difference": (W - R).flatten(1).norm(dim=1),
        "angle": torch.rad2deg(torch.asin(sine.clamp(max=1.0))).amax(1),
        "norm": R.flatten(1).norm(dim=1),
    }


def gate_difference(weights: Weights, points: Tensor) -> Tensor:
    """Rms difference of h_1' and h_2' over points, shape (S,): 0 where two units act as one."""
    slope = _swish(weights, points)[1]
    return (slope[:, 0] - slope[:, 1]).square().mean(1).sqrt()


def joint_angle(weights: Weights) -> Tensor:
    """The angle in degrees between the lines of ``sum_i R_i`` and ``sum_i W_i``, shape (S,).

    It is what has to vanish where all units act as one.
    """
    R, W = weights["R"].sum(2), weights["W"].sum(2)
    sine = (R[:, 0] * W[:, 1] - R[:, 1] * W[:, 0]).abs() / (R.norm(dim=1) * W.norm(dim=1)).clamp(min=1e-9)
    return torch.rad2deg(torch.asin(sine.clamp(max=1.0)))


def _log(weights: Weights, losses: Tensor) -> dict[str, Tensor]:
    found = conditions(weights)
    return {"loss": losses} | {name: found[name] for name in ("sym", "difference", "angle")}


def without_data(seeds: Sequence[int], steps: int = STEPS, advance: Advance = silent) -> dict[str, Any]:
    """The published run for every seed: L_QC alone on the grid."""
    points = grid()
    weights, history = train(
        draw_weights(seeds), qc_on_grid(points), steps=steps, learning_rate=LEARNING_RATE,
        log_every=LOG_EVERY, log=_log, advance=partial(advance, "without data"),
    )  # fmt: skip
    with torch.no_grad():
        last = conditions(weights) | {
            "loss": rotation(weights, points).square().mean(1),
            "trace_loss": trace_form(weights, points),
            "gate_difference": gate_difference(weights, points),
            "joint_angle": joint_angle(weights),
        }
    final = {name: value.tolist() for name, value in last.items()}
    return {
        "seeds": list(seeds),
        "history": history,
        "final": final,
        "outcome": [outcome({name: value[i] for name, value in final.items()}) for i in range(len(seeds))],
    }


def trace_form(weights: Weights, points: Tensor) -> Tensor:
    """L_QC as the authors compute it, ``tr(J J^T) - tr(J J)`` (Eq. 14) in single precision, shape (S,)."""
    J = torch.einsum("sdh,shn,seh->snde", weights["R"], _swish(weights, points)[1], weights["W"])
    return (J.square().sum((2, 3)) - (J * J.mT).sum((2, 3))).mean(1)


PARALLEL, MERGED = "conservative: paired columns parallel", "conservative: two units became one"
OTHERWISE = "conservative in another way"
NEARLY, FALLING = "loss below 1e-9, ||WR'-RW'|| not yet below 1e-6", "loss still above 1e-9"
OUTCOMES = (PARALLEL, MERGED, OTHERWISE, NEARLY, FALLING)


def reached(final: dict[str, float]) -> bool:
    """Whether a run shows what Fig. 3 shows: loss and ||WR^T - RW^T|| at zero, ||W - R|| not."""
    return (
        final["loss"] < REACHED["loss"]
        and final["sym"] < REACHED["sym"]
        and final["difference"] > REACHED["difference"]
    )


def outcome(final: dict[str, float]) -> str:
    """Where a run ended: one of `OUTCOMES`."""
    if final["loss"] >= REACHED["loss"]:
        return FALLING
    if final["sym"] >= REACHED["sym"]:
        return NEARLY
    if final["angle"] < SAME_LINE:
        return PARALLEL
    return MERGED if final["gate_difference"] < SAME_UNIT else OTHERWISE


def mixture() -> GaussianMixture:
    """The data of the corrected mode: three Gaussians in the plane."""
    return GaussianMixture(torch.tensor(DATA_MEANS, dtype=torch.float64), DATA_STD)


def dsm_with_penalty(arm: Arm, seeds: Sequence[int]) -> Loss:
    """Eq. 12 with DSM (Eq. 5) times sigma^2 and L_QC times sigma^2, at one noise level, shape (S,).

    The data of a seed are a function of the seed and the step alone; a chunk of steps is drawn at once.
    """
    data = mixture()
    chunk: dict[int, tuple[Tensor, Tensor]] = {}

    def draw(index: int) -> tuple[Tensor, Tensor]:
        count = DATA_CHUNK * DATA_BATCH
        pairs = []
        for seed in seeds:
            generator = stream(seed, "autoencoder", index)
            pairs.append((data.sample(count, generator), torch.randn(count, 2, generator=generator)))
        x0, z = (
            torch.stack(part).view(len(seeds), DATA_CHUNK, DATA_BATCH, 2) for part in zip(*pairs, strict=True)
        )
        return x0.movedim(1, 0).mT.contiguous(), z.movedim(1, 0).mT.contiguous()

    def loss(weights: Weights, step: int) -> Tensor:
        index, row = divmod(step, DATA_CHUNK)
        if index not in chunk:
            chunk.clear()
            chunk[index] = draw(index)
        x0, z = (part[row].to(weights["W"].dtype) for part in chunk[index])
        s, rot = evaluate(weights, x0 + SIGMA * z, arm.decoder)
        dsm = 0.5 * (SIGMA * s + z).square().sum(1).mean(1)
        return dsm + arm.weight * SIGMA**2 * rot.square().mean(1)

    return loss


def with_data(seeds: Sequence[int], steps: int = DATA_STEPS, advance: Advance = silent) -> dict[str, Any]:
    """Every arm of the corrected mode on every seed, scored on fresh points against the exact score."""
    data = mixture()
    generator = stream(0, "autoencoder", "test")
    x = data.sample(TEST_POINTS, generator, torch.float64)
    x = x + SIGMA * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    exact, J = jacobian(data.score, x, torch.full((TEST_POINTS,), SIGMA, dtype=torch.float64))
    score = exact.detach().T
    result: dict[str, Any] = {
        "seeds": list(seeds),
        "arms": {},
        "score_norm": float(0.5 * score.square().sum(0).mean()),
        "score": {name: float(value) for name, value in signs(J.dense().detach()).items()},
    }
    for arm in ARMS:
        weights, _ = train(
            draw_weights(seeds, DATA_HIDDEN), dsm_with_penalty(arm, seeds), steps=steps,
            learning_rate=DATA_RATE, log_every=steps, log=lambda w, losses: {"loss": losses},
            advance=partial(advance, f"with data: {arm.name}"),
        )  # fmt: skip
        result["arms"][arm.name] = {
            name: value.tolist() for name, value in score_arm(arm, weights, x.T, score).items()
        }
    return result


def signs(J: Tensor) -> dict[str, Tensor]:
    """What share of Jacobians of shape (..., N, 2, 2) contract: in area, and in every direction.

    Returns:
        "negative_trace", and "negative": both eigenvalues of the symmetric part are negative. Shape (...).
    """
    trace = J.diagonal(dim1=-2, dim2=-1).sum(-1)
    largest = torch.linalg.eigvalsh((J + J.mT) / 2)[..., -1]
    return {
        "negative_trace": (trace < 0).double().mean(-1),
        "negative": (largest < 0).double().mean(-1),
    }


def score_arm(arm: Arm, weights: Weights, x: Tensor, score: Tensor) -> dict[str, Tensor]:
    """ESM (Eq. 1), Asym, NAsym (pooled), `signs` and the conditions on the weights, each of shape (S,)."""
    weights = {name: w.double() for name, w in weights.items()}
    s, rot = evaluate(weights, x, arm.decoder)
    J = torch.einsum("sdh,shn,seh->snde", arm.decoder(weights), _swish(weights, x)[1], weights["W"])
    asym = rot.square().mean(1)
    return {
        "esm": 0.5 * (s - score).square().sum(1).mean(1),
        "asym": asym,
        "nasym": 0.5 * asym / J.square().sum((2, 3)).mean(1),
        **signs(J),
        **conditions(weights, arm.decoder),
    }


def run(*, mode: str, seeds: int | None, quick: bool, out: Path) -> Record:
    """Figs. 3 and A4 over consecutive seeds, and in corrected mode the same with a score-matching term.

    Args:
        mode: "paper" or "corrected".
        seeds: how many, from 0; 50 by default. The paper's seed 8 is always among them.
        quick: a tenth of the steps and at most ten seeds.
        out: folder for the figures.

    Returns:
        The record.
    """
    from curlfree.experiments import autoencoder_page as page

    begin = time.perf_counter()
    count = min(seeds or SEEDS, 10) if quick else seeds or SEEDS
    chosen = sorted({*range(count), PAPER_SEED})
    steps, data_steps = (STEPS // 10, DATA_STEPS // 10) if quick else (STEPS, DATA_STEPS)
    corrected, values = mode == "corrected", dict[str, Any]()
    with shown(steps + corrected * len(ARMS) * data_steps, "steps") as advance:
        values["without_data"] = without_data(chosen, steps, advance)
        if corrected:
            values["with_data"] = with_data(chosen, data_steps, advance)
    config = {
        "hidden": HIDDEN, "steps": STEPS, "learning_rate": LEARNING_RATE, "clip_norm": 1.0, "grid": GRID,
        "extent": EXTENT, "paper_seed": PAPER_SEED, "reached": REACHED,
        "with_data": {
            "means": [list(mean) for mean in DATA_MEANS], "std": DATA_STD, "sigma": SIGMA,
            "hidden": DATA_HIDDEN, "steps": DATA_STEPS, "learning_rate": DATA_RATE, "batch": DATA_BATCH,
            "lambda": {arm.name: arm.weight for arm in ARMS}, "test_points": TEST_POINTS,
        },
    }  # fmt: skip
    return Record(
        experiment="autoencoder",
        title="Conservative without tied weights? The one-layer autoencoder (Sec. 6, Figs. 3 and A4)",
        mode=mode,
        quick=quick,
        summary=page.summary(values),
        config=config,
        seeds=chosen,
        values=values,
        tables=page.tables(values),
        plots=page.draw(values, out),
        disagreements=page.disagreements(values),
        provenance=provenance(time.perf_counter() - begin),
    )
