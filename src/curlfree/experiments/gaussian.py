r"""The Gaussian example of Sec. 3.1: Fig. 1, its table, and what is left of it when the step goes to zero.

The target is ``p = N(0, std^2 I)`` in the plane. Eq. A6 adds to its score an error of prescribed size along a
direction u(x) of length |x|: ``s(x) = grad log p(x) + sqrt(2 eps mu(x)/(|x|^2 p(x))) u(x)``, so that the
score-matching loss of Eq. 1 is eps. U takes u = (-x2, x1), a rotation, C takes u = x, away from the target;
mu is a mixture of ten Gaussians on a circle of radius 3. Deterministic steps ``x <- x + a s(x)`` move ten
points to the centre; Fig. 1 counts the steps and concludes that rotation slows sampling down.

The authors' program softens Eq. A6 by three constants (`softening` beside eps and |x|^2, `floor` beside p).
They do not leave the loss at eps: where p is below 1e-8, which is nearly all of mu's mass, the error vanishes
against sqrt(1/p), and the loss is some 300 times smaller (`expectations`).

What the step count measures is the step. With polar coordinates the flow ``dx/dt = s(x)`` of U has
``d|x|/dt = -|x|/std^2`` for every eps: the rotation is perpendicular to x, so the radius does not know of it,
and all arrive when they would without error. C has ``d|x|/dt = (amplitude - 1/std^2)|x|``: it is late or
never arrives. One Euler step of U instead multiplies the radius by ``|1 - a/std^2 + i a amplitude|``.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curlfree.estimators import asymmetry, normalized_asymmetry
from curlfree.experiments.progress import Advance, shown, silent
from curlfree.experiments.records import Record
from curlfree.operators import jacobian
from curlfree.provenance import provenance

EPSILONS = (0.0, 0.5e-3, 0.75e-3, 1e-3, 1.5e-3, 1.75e-3, 2.25e-3)
WIDE_EPSILONS = (0.0, 1e-3, 1e-2, 5e-2)
STD = 0.1
SOFTENING, FLOOR = 1e-6, 1e-8
STEP, STEP_WITHOUT_ERROR, STEP_DECAY, STEP_LIMIT = 0.0125, 0.01, 1000.0, 300
STOP = 1e-3
ARRIVED = 0.1
GRID = 20

PAPER: dict[str, dict[str, tuple[float, ...]]] = {
    "C": {"steps": (1, 2, 3, 3, 4, 5, 16)},
    "U": {
        "steps": (1, 4, 5, 6, 57, 121, 238),
        "asym": (0.0, 1.77e-2, 2.65e-2, 3.53e-2, 5.28e-2, 6.15e-2, 7.89e-2),
        "nasym": (0.0, 4.41e-7, 6.60e-7, 8.78e-7, 1.31e-6, 1.53e-6, 1.96e-6),
    },
}


def tangential(x: Tensor) -> Tensor:
    """u(x) of U: x turned by a right angle."""
    return torch.stack([-x[:, 1], x[:, 0]], dim=1)


def radial(x: Tensor) -> Tensor:
    """u(x) of C: away from the centre."""
    return x


DIRECTIONS: dict[str, Callable[[Tensor], Tensor]] = {"C": radial, "U": tangential}


@dataclass(frozen=True)
class PerturbedGaussian:
    """The field of Eq. A6, a callable ``field(x, sigma)`` that has no noise levels.

    Args:
        epsilon: the score-matching loss that the error is meant to have; 0 is the exact score.
        direction: u(x).
        std: standard deviation of the target.
        softening: added to epsilon and to |x|^2 by the authors' program; 0 is Eq. A6 as printed.
        floor: added to the denominator by the authors' program; 0 is Eq. A6 as printed.
    """

    epsilon: float
    direction: Callable[[Tensor], Tensor]
    std: float = STD
    softening: float = SOFTENING
    floor: float = FLOOR

    def density(self, x: Tensor) -> Tensor:
        """p(x), shape (B,)."""
        return _normal(x, self.std)

    def amplitude(self, x: Tensor) -> Tensor:
        """The factor of u(x), shape (B,)."""
        radius2 = x.square().sum(1)
        if self.epsilon == 0:
            return torch.zeros_like(radius2)
        epsilon = self.epsilon + self.softening
        room = radius2 + (epsilon if self.softening else 0.0)
        return (2 * epsilon * mixture(x) / (self.density(x) * room + self.floor)).sqrt()

    def error(self, x: Tensor) -> Tensor:
        """What is added to the score of p."""
        return self.amplitude(x)[:, None] * self.direction(x)

    def __call__(self, x: Tensor, sigma: Tensor | None = None, /, **condition: Any) -> Tensor:
        """The field's value at x, of shape (B, 2)."""
        return -x / self.std**2 + self.error(x)


def mixture(x: Tensor) -> Tensor:
    """mu(x) of Sec. 3.1: ten unit Gaussians on a circle of radius 3."""
    angle = torch.arange(10, dtype=x.dtype) * (2 * math.pi / 10)
    centres = 3 * torch.stack([angle.cos(), angle.sin()], dim=1)
    return _normal((x[:, None] - centres).flatten(0, 1), 1.0).view(len(x), 10).mean(1)


def _normal(x: Tensor, std: float) -> Tensor:
    return torch.exp(-x.square().sum(1) / (2 * std**2)) / (2 * math.pi * std**2)


def starting_points() -> Tensor:
    """The ten points of Fig. 1, shape (10, 2), from NumPy's legacy generator as in the authors' program."""
    return torch.from_numpy(np.random.RandomState(0).normal(-2, 0.5, 20).reshape(10, 2))


def descend(
    field: PerturbedGaussian, x: Tensor, *, step: float, decay: float = STEP_DECAY, limit: int = STEP_LIMIT
) -> tuple[int | None, Tensor, float]:
    """Deterministic Langevin steps (Eq. 6 without noise) until all points have arrived.

    Arrived is, as in the authors' program, when the mean of ``max(-log p, 0)`` falls below 1e-3: with std 0.1
    a point within 0.235 of the centre counts as 0.

    Args:
        field: the score.
        x: starting points, shape (N, 2).
        step: the first step's size.
        decay: number of steps in which the step size falls by e; infinite for constant steps.
        limit: the largest number of steps.

    Returns:
        The number of steps, None if it was not reached; the path, shape (T, N, 2); the sum of step sizes.
    """
    path, elapsed = [x], 0.0
    for i in range(limit):
        if float((-torch.log(field.density(x) + 1e-16)).clamp(min=0).mean()) < STOP:
            return i, torch.stack(path), elapsed
        size = step * math.exp(-i / decay)
        x = x + size * field(x)
        elapsed += size
        path.append(x)
    return None, torch.stack(path), elapsed


def flow(
    field: PerturbedGaussian, x0: Tensor, *, radii: tuple[float, ...], until: float, times: int = 0
) -> tuple[list[list[float | None]], np.ndarray]:
    """Arrival times of the continuous flow ``dx/dt = s(x)``, at tolerance 1e-10.

    Args:
        field: the score.
        x0: starting points, shape (N, 2).
        radii: a point arrives where its |x| falls below such a radius; all are timed.
        until: when to give up; also where a point leaves |x| < 10.
        times: how many equally spaced positions on [0, until] to return.

    Returns:
        For each radius the time of each point, or None; positions of shape (T, N, 2) with T <= times: they
        end when all points are within the smallest radius.
    """
    from scipy.integrate import solve_ivp

    def velocity(_: float, x: np.ndarray) -> np.ndarray:
        return field(torch.from_numpy(x.reshape(-1, 2))).numpy().ravel()

    def norms(x: np.ndarray) -> np.ndarray:
        return np.linalg.norm(x.reshape(-1, 2), axis=1)

    def finished(_: float, x: np.ndarray) -> float:
        return (norms(x).max() - min(radii)) * (10.0 - norms(x).max())

    finished.terminal = True  # type: ignore[attr-defined]
    arrivals = [
        (lambda _, x, n=n, radius=radius: norms(x)[n] - radius) for radius in radii for n in range(len(x0))
    ]
    grid = np.linspace(0.0, until, times) if times else None
    done = solve_ivp(
        velocity, (0.0, until), x0.numpy().ravel(), "DOP853", grid,
        events=[*arrivals, finished], rtol=1e-10, atol=1e-12,
    )  # fmt: skip
    found = [float(t[0]) if len(t) else None for t in done.t_events[:-1]]
    last = done.t_events[-1]
    if len(last) and norms(done.y_events[-1][0]).max() < 1.0:  # its own crossing ends the integration
        found = [float(last[0]) if t is None else t for t in found]
    split = [found[i : i + len(x0)] for i in range(0, len(found), len(x0))]
    return split, done.y.T.reshape(-1, len(x0), 2)


def polar_nodes(edges: tuple[float, ...], nodes: int = 240, angles: int = 80) -> tuple[Tensor, Tensor]:
    """Points and weights that integrate over the disc: Gauss-Legendre in |x|, trapezoid in the angle.

    Args:
        edges: the radii between which the integrand is smooth; the first may exclude a disc.
        nodes: nodes between two radii.
        angles: nodes around the circle.

    Returns:
        Points of shape (N, 2) and weights of shape (N,), the area element included.
    """
    node, weight = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(nodes))
    pairs = list(pairwise(edges))
    r = torch.cat([(a + b) / 2 + (b - a) / 2 * node for a, b in pairs])
    w = torch.cat([(b - a) / 2 * weight for a, b in pairs]) * r * (2 * math.pi / angles)
    angle = torch.arange(angles, dtype=torch.float64) * (2 * math.pi / angles)
    points = r[:, None, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return points.flatten(0, 1), w.repeat_interleave(angles)


@torch.no_grad()
def expectations(
    field: PerturbedGaussian, edges: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0, 3.0, 11.0)
) -> dict[str, float]:
    """Expectations under p by quadrature: the loss of Eq. 1, Asym of Eq. 10 and NAsym.

    NAsym is the pooled ratio ``E||K||^2 / E||J||^2``.
    """
    x, weight = polar_nodes(edges)
    p = weight * field.density(x)
    asym = asymmetry(field, x, estimator="exact")
    _, J = jacobian(field, x)
    norm2 = J.dense().square().sum((1, 2))
    return {
        "esm": float((p * 0.5 * field.error(x).square().sum(1)).sum()),
        "asym": float((p * asym).sum()),
        "nasym": float((p * asym / 2).sum() / (p * norm2).sum()),
    }


@torch.no_grad()
def grid_sums(field: PerturbedGaussian) -> dict[str, float]:
    """Asym and NAsym as in the authors' program: sums of p times the metric over a grid, no cell area."""
    x, _ = plane_grid(3.0, GRID)
    p = field.density(x)
    return {
        "asym": float((p * asymmetry(field, x, estimator="trace")).sum()),
        "nasym": float((p * normalized_asymmetry(field, x, estimator="trace")).sum()),
    }


def plane_grid(extent: float, n: int) -> tuple[Tensor, Tensor]:
    """The points of an n x n grid on [-extent, extent]^2, shape (n^2, 2), and its coordinates."""
    axis = torch.linspace(-extent, extent, n, dtype=torch.float64)
    return torch.cartesian_prod(axis, axis), axis


def run(*, mode: str, seeds: int | None, quick: bool, out: Path) -> Record:
    """Fig. 1 with its table, and in corrected mode expectations and the limit of small steps.

    Args:
        mode: "paper" or "corrected".
        seeds: not used: nothing is trained and the ten starting points are those of the figure.
        quick: fewer step sizes in the limit.
        out: folder for the figures.

    Returns:
        The record.
    """
    from curlfree.experiments import gaussian_page as page

    begin = time.perf_counter()
    corrected, values = mode == "corrected", dict[str, Any]()
    fields = len(DIRECTIONS) * len(EPSILONS)
    work = fields + corrected * (fields + len(DIRECTIONS) * len(WIDE_EPSILONS))
    with shown(work + len(page.figure_names(corrected)), "parts") as advance:
        values["paper_mode"] = paper_mode(advance)
        if corrected:
            values["corrected"] = corrected_mode(3 if quick else 7, advance)
            values["wide"] = wide_target(advance)
        plots = page.draw(values, out, advance)
    config = {
        "epsilons": list(EPSILONS), "std": STD, "softening": SOFTENING, "floor": FLOOR, "step": STEP,
        "step_without_error": STEP_WITHOUT_ERROR, "step_decay": STEP_DECAY, "step_limit": STEP_LIMIT,
        "stop": STOP, "arrived": ARRIVED, "grid": GRID, "starting_points": starting_points().tolist(),
    }  # fmt: skip
    return Record(
        experiment="gaussian",
        title="Does rotation slow sampling down? The Gaussian example (Sec. 3.1, Fig. 1)",
        mode=mode,
        quick=quick,
        summary=page.summary(values),
        config=config,
        seeds=[],
        values=values,
        tables=page.tables(values),
        plots=plots,
        disagreements=page.disagreements(values),
        provenance=provenance(time.perf_counter() - begin),
    )


def _over_epsilons(
    one: Callable[[PerturbedGaussian], dict[str, Any]], what: str, advance: Advance
) -> dict[str, Any]:
    """For each arm what `one` finds for its fields, as lists over `EPSILONS`."""
    result: dict[str, Any] = {}
    for arm, direction in DIRECTIONS.items():
        rows = []
        for epsilon in EPSILONS:
            rows.append(one(PerturbedGaussian(epsilon, direction)))
            advance(f"{what}: {arm}")
        result[arm] = {key: [row[key] for row in rows] for key in rows[0]}
    return result


def paper_mode(advance: Advance = silent) -> dict[str, Any]:
    """Step counts and grid sums of Fig. 1, for each arm a list over `EPSILONS`."""

    def one(field: PerturbedGaussian) -> dict[str, Any]:
        step = STEP if field.epsilon else STEP_WITHOUT_ERROR
        return {"steps": descend(field, starting_points(), step=step)[0], **grid_sums(field)}

    return _over_epsilons(one, "paper mode", advance)


def corrected_mode(halvings: int, advance: Advance = silent) -> dict[str, Any]:
    """What Fig. 1 should have measured, for each arm a list over `EPSILONS`.

    Args:
        halvings: how often the step is halved on the way to the continuous flow.
        advance: called after each field.

    Returns:
        Expectations under p; steps with the same first step for every epsilon; for each step size the flow
        time (sum of constant steps) until all have arrived; the same for the continuous flow, with the
        authors' stopping rule (|x| < 0.235) and at |x| < 0.1; the largest amplitude at a starting point.
    """
    sizes = [STEP / 2**k for k in range(halvings)]
    until = 0.6

    def one(field: PerturbedGaussian) -> dict[str, Any]:
        (rule, centre), _ = flow(field, starting_points(), radii=(stop_radius(), ARRIVED), until=until)
        return expectations(field) | {
            "steps": descend(field, starting_points(), step=STEP)[0],
            "amplitude": float(field.amplitude(starting_points()).max()),
            "time_by_steps": [_time_by_steps(field, size, until) for size in sizes],
            "time_to_rule": _latest(rule),
            "time_to_centre": _latest(centre),
        }

    found = _over_epsilons(one, "corrected mode", advance)
    return {"step_sizes": sizes, "basin": basin_radii()} | found


def _time_by_steps(field: PerturbedGaussian, size: float, until: float) -> float | None:
    limit = math.ceil(until / size)
    count, _, elapsed = descend(field, starting_points(), step=size, decay=math.inf, limit=limit)
    return None if count is None else elapsed


def _latest(times: list[float | None]) -> float | None:
    known = [t for t in times if t is not None]
    return max(known) if len(known) == len(times) else None


def stop_radius() -> float:
    """The radius at which p = 1, within which a point counts as arrived by the authors' rule."""
    return STD * math.sqrt(-2 * math.log(2 * math.pi * STD**2))


def basin_radii() -> list[float | None]:
    """For each epsilon the radius beyond which C of Eq. A6 as printed moves outwards at some angle."""
    r = torch.linspace(STD, 2.0, 200_000, dtype=torch.float64)
    x = torch.stack([r, torch.zeros_like(r)], dim=1)  # on the ray to a centre of mu, where mu is largest
    radii: list[float | None] = []
    for epsilon in EPSILONS:
        amplitude = PerturbedGaussian(epsilon, radial, softening=0.0, floor=0.0).amplitude(x)
        outward = amplitude > 1 / STD**2
        radii.append(float(r[outward][0]) if bool(outward.any()) else None)
    return radii


def wide_target(advance: Advance = silent) -> dict[str, Any]:
    """Eq. A6 as printed, with std 1, where it can be integrated: times from (3, 3) to |x| < 0.1."""
    start = torch.tensor([[3.0, 3.0]], dtype=torch.float64)
    result: dict[str, Any] = {"epsilons": list(WIDE_EPSILONS), "start": start[0].tolist()}
    for arm, direction in DIRECTIONS.items():
        result[arm] = []
        for epsilon in WIDE_EPSILONS:
            field = PerturbedGaussian(epsilon, direction, std=1.0, softening=0.0, floor=0.0)
            result[arm].append(flow(field, start, radii=(ARRIVED,), until=20.0)[0][0][0])
            advance(f"standard deviation 1: {arm}")
    return result
