"""The figures of the two-dimensional experiment: samples, fields, rotation, curves over noise, lambda."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curlfree import figures
from curlfree.experiments.records import Plot, mean_interval
from curlfree.experiments.toy2d_train import PLUS_ARMS, PROBLEMS, Problem
from curlfree.figures import Axes, Figure, Theme
from curlfree.metrics import rotation_density
from curlfree.processes import Process
from curlfree.samplers import edm_levels, euler, probability_flow
from curlfree.seeds import stream

SHOWN = ("C", "U", "QC", "C+", "U+", "QC+")
SAMPLES, BINS = 8000, 75
ROTATION_LEVEL, FIELD_LEVEL = 0.2, 0.5
GRID, FINE_GRID = 21, 141
PATHS, PATH_STEPS = 24, 200

Fields = dict[str, dict[str, nn.Module]]


def draw(
    values: dict[str, Any], fields: Fields, processes: dict[tuple[str, str], Process], out: Path
) -> list[Plot]:
    """Draw all figures into `out`.

    Args:
        values: the values of the record.
        fields: for each set and arm the model of the first seed.
        processes: for each set and arm the levels that the model knows.
        out: the folder.
    """
    plots = []
    for key, arms in fields.items():
        shown = [name for name in SHOWN if name in arms]
        for maker in (_samples, _fields, _rotation):
            plots.append(maker(PROBLEMS[key], key, {n: arms[n] for n in shown}, processes, out))
    if values["corrected"]:
        plots.append(_curves(values, out, "asym", "asymmetry", "Asymmetry against the noise level", "Asym"))
        plots.append(
            _curves(
                values,
                out,
                "score_error",
                "score_error",
                "Score error against the noise level",
                "1/2 |s - score|²",
            )
        )
        if any(len(lambda_sweep(arms)) > 2 for arms in values["corrected"].values()):
            plots.append(_frontier(values, out))
    return plots


def _grid(problem: Problem, n: int) -> tuple[Tensor, Tensor]:
    """The points of an n x n grid over the plotted square, and its coordinates."""
    axis = torch.linspace(-problem.extent, problem.extent, n)
    return torch.cartesian_prod(axis, axis), axis


def _at(field: nn.Module, points: Tensor, level: float, of: Callable[..., Tensor]) -> Tensor:
    """A function of field, points and levels, on the field's device; the result on the processor."""
    device = next(field.parameters()).device
    points = points.to(device)
    return of(field, points, points.new_full((len(points),), level)).detach().cpu()


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    columns = min(count, 4)
    figure, axes = figures.panels(math.ceil(count / columns), columns, width=width, height=height)
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes


def _samples(problem: Problem, key: str, arms: dict[str, nn.Module], processes: Any, out: Path) -> Plot:
    points = {}
    for name, field in arms.items():
        device = next(field.parameters()).device
        start = processes[key, name].prior_sample((SAMPLES, 2), stream(0, "figure", device=device))
        points[name] = probability_flow(field, start, processes[key, name], rtol=1e-3, atol=1e-4).x.cpu()
    g = stream(0, "figure data")
    truth = problem.data.sample(SAMPLES, g) + 0.1 * torch.randn(SAMPLES, 2, generator=g)

    def figure(theme: Theme) -> Figure:
        made, axes = _panels(1 + len(points), 2.6, 2.7)
        for ax, (name, x) in zip(axes, {"data": truth, **points}.items(), strict=False):
            figures.samples(ax, theme, x.numpy(), extent=problem.extent, bins=BINS)
            ax.set_title(name)
        return made

    figures.save(figure, out, f"samples_{key}")
    return Plot(
        f"samples_{key}",
        f"{problem.title}: samples",
        "Data with noise 0.1, and samples of the models of the first seed.",
        f"{SAMPLES} samples of the probability-flow ODE, RK45 (rtol 1e-3), from the fitting prior.",
    )


def _fields(problem: Problem, key: str, arms: dict[str, nn.Module], processes: Any, out: Path) -> Plot:
    grid, _ = _grid(problem, GRID)
    with torch.no_grad():
        arrows = {
            name: _at(f, grid, FIELD_LEVEL, lambda s, x, sigma: s(x, sigma)) for name, f in arms.items()
        }
    paths = {name: _paths(field, processes[key, name]) for name, field in arms.items()}

    def figure(theme: Theme) -> Figure:
        made, axes = _panels(len(arms), 2.9, 3.0)
        for ax, name in zip(axes, arms, strict=False):
            length = arrows[name].norm(dim=1, keepdim=True)
            shown = arrows[name] / length.clamp(min=1e-9) * length.log1p()
            figures.vector_field(ax, theme, grid.numpy(), shown.numpy())
            figures.trajectories(ax, theme, paths[name].numpy(), color=1, markers=False)
            figures.plane(ax, problem.extent, name)
        return made

    figures.save(figure, out, f"fields_{key}")
    return Plot(
        f"fields_{key}",
        f"{problem.title}: field and trajectories",
        f"The field at σ = {FIELD_LEVEL:g} and {PATHS} trajectories of the probability flow from σ = 3 "
        "(rings) to 0.1.",
        f"Arrows: lengths log(1 + |s|), scaled by the longest. Trajectories: Euler, {PATH_STEPS} steps.",
    )


def _paths(field: nn.Module, process: Process) -> Tensor:
    device = next(field.parameters()).device
    states: list[Tensor] = []

    def observe(x: Tensor, sigma: float | None) -> None:
        if sigma is not None and sigma <= 3.0 + 1e-6:
            states.append(x.cpu())

    start = process.prior_sample((PATHS, 2), stream(1, "figure", device=device))
    levels = edm_levels(process, PATH_STEPS)
    euler(field, start, process, levels=levels, denoise=False, observe=observe)
    return torch.stack(states)


def _rotation(problem: Problem, key: str, arms: dict[str, nn.Module], processes: Any, out: Path) -> Plot:
    grid, axis = _grid(problem, FINE_GRID)
    sigma = torch.full((len(grid),), ROTATION_LEVEL)
    p = problem.data.log_prob(grid, sigma).exp()
    maps = {}
    for name, field in arms.items():
        turning = _at(field, grid, ROTATION_LEVEL, lambda s, x, level: rotation_density(s, x, level)[:, 0, 1])
        maps[name] = (turning * (p / p.max()).sqrt()).view(FINE_GRID, FINE_GRID).T
    limit = max(float(m.abs().quantile(0.995)) for m in maps.values())

    def figure(theme: Theme) -> Figure:
        made, axes = _panels(len(arms), 3.1, 2.8)
        for ax, name in zip(axes, arms, strict=False):
            shown = maps[name].clamp(-limit, limit).numpy()
            figures.rotation_density(ax, theme, axis.numpy(), axis.numpy(), shown, limit=limit)
            figures.plane(ax, problem.extent, name)
        return made

    figures.save(figure, out, f"rotation_{key}")
    return Plot(
        f"rotation_{key}",
        f"{problem.title}: rotation density",
        f"ds1/dx2 - ds2/dx1 at σ = {ROTATION_LEVEL:g}, times sqrt(p/max p), whose square integrates to Asym. "
        "One scale for all panels.",
        f"Exact Jacobians (curlfree.rotation_density) on a {FINE_GRID} x {FINE_GRID} grid, first seed.",
    )


def band(runs: Sequence[dict[str, Any]], name: str) -> tuple[list[float], list[float], list[float]]:
    """Mean over seeds and the ends of its 95 % interval, at each level; the ends meet for one seed."""
    columns = list(zip(*(run["lists"][name] for run in runs), strict=True))
    means = [sum(column) / len(column) for column in columns]
    halves = [mean_interval(column)[1] if len(column) > 1 else 0.0 for column in columns]
    low = [max(m - h, 1e-3 * m) for m, h in zip(means, halves, strict=True)]
    return means, low, [m + h for m, h in zip(means, halves, strict=True)]


def _curves(values: dict[str, Any], out: Path, quantity: str, name: str, title: str, label: str) -> Plot:
    sets = values["corrected"]

    def figure(theme: Theme) -> Figure:
        made, axes = _panels(len(sets), 3.8, 3.2)
        for ax, (key, arms) in zip(axes, sets.items(), strict=False):
            for arm in (n for n in SHOWN if n in arms and not (quantity == "asym" and n.startswith("C"))):
                means, low, high = band(arms[arm], quantity)
                levels = arms[arm][0]["levels"]
                color = SHOWN.index(arm)
                figures.curve(ax, theme, levels, means, color=color, label=arm, band=(low, high), marker=".")
            ax.set(xscale="log", yscale="log", xlabel="σ", ylabel=label, title=PROBLEMS[key].title)
            ax.grid()
        axes[0].legend(fontsize=7)
        return made

    figures.save(figure, out, name)
    return Plot(
        name,
        title,
        "σ = 0.1 · 30^t on the paper's levels, t from 0 to 1, and beyond. Bands: 95 % intervals over seeds."
        + (" C and C+ are zero to rounding." if quantity == "asym" else ""),
        "Exact 2 x 2 Jacobians and exact scores at fresh points, averaged weights.",
        wide=len(sets) > 1,
    )


def lambda_sweep(arms: Iterable[str]) -> dict[float, str]:
    """U+ and the QC+ arms with the exact loss, by lambda."""
    found = {
        PLUS_ARMS[n].lmbda: n
        for n in arms
        if n in PLUS_ARMS and n[0] != "C" and PLUS_ARMS[n].estimator == "exact"
    }
    return dict(sorted(found.items()))


def _frontier(values: dict[str, Any], out: Path) -> Plot:
    sets = values["corrected"]

    def figure(theme: Theme) -> Figure:
        made, axes = _panels(len(sets), 3.8, 3.2)
        for ax, (key, arms) in zip(axes, sets.items(), strict=False):
            for lmbda, name in lambda_sweep(arms).items():
                x, y = ([run[q] for run in arms[name]] for q in ("asym", "score_error"))
                ax.plot(x, y, "o", color=theme.color(0), ms=3, alpha=0.4, mew=0)
                centre = (sum(x) / len(x), sum(y) / len(y))
                ax.plot(*centre, "o", color=theme.color(1), ms=5)
                ax.annotate(f"{lmbda:g}", centre, xytext=(4, 4), textcoords="offset points", fontsize=8)
            ax.set(xscale="log", yscale="log", xlabel="Asym", ylabel="score error", title=PROBLEMS[key].title)
            ax.grid()
        return made

    figures.save(figure, out, "frontier")
    return Plot(
        "frontier",
        "What the penalty costs: score error against asymmetry",
        "U+ (λ = 0) and QC+ by λ, the numbers at the dots; large dots are means over seeds.",
        "Means over the common levels 0.1 to 3, exact scores and Jacobians.",
        wide=len(sets) > 1,
    )
