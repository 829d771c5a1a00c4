"""The figures of training runs: curves of the log, metrics by noise level, samples."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from curlfree import figures
from curlfree.experiments.records import Plot
from curlfree.figures import Axes, Figure, Theme
from curlfree.run_record import Row, RunRecord

Runs = Sequence[RunRecord]
Curve = tuple[list[float], list[float]]
# Metrics with "levels" (`curlfree.measures`), and what their axis says.
BY_LEVEL = {
    "loss": "score matching",
    "score_error": "score error",
    "asym": "Asym",
    "nasym": "NAsym",
    "work_nats": "loop work, nats",
}
_CLOCKS = {"step": "step", "seconds": "seconds of training"}


def draw(runs: Runs, out: Path) -> list[Plot]:
    """Draw all figures that the runs' files have numbers for into `out`."""
    makers = (_loss, _asymmetry, _loss_by_level, _asymmetry_by_level, _optimiser, _measured, _samples)
    return [plot for maker in makers for plot in maker(runs, out)]


def column(rows: Iterable[Row], x: str, y: str) -> Curve:
    """One quantity of a log against steps or seconds, where it was measured."""
    pairs = [(row[x], row[y]) for row in rows if row.get(y) is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


def rms_levels(row: Row, name: str) -> float | None:
    """The root mean square over the noise levels of a line; None where none was measured."""
    values = [level[name] for level in row["levels"] if level.get(name) is not None]
    return math.sqrt(sum(value**2 for value in values) / len(values)) if values else None


def asymmetry_rows(run: RunRecord) -> tuple[list[Row], list[Row]]:
    """The lines of training and of held-out samples with "nats", the rms asymmetry over levels."""
    kinds = ((run.log.steps, "asymmetry_nats"), (run.log.held_out, "work_nats"))
    trained, held_out = ([{**row, "nats": rms_levels(row, name)} for row in rows] for rows, name in kinds)
    return trained, held_out


def _logged(runs: Runs) -> list[tuple[int, RunRecord]]:
    """The runs with curves, each with the number of its colour."""
    return [(i, run) for i, run in enumerate(runs) if run.log.steps]


def _loss(runs: Runs, out: Path) -> list[Plot]:
    def panel(ax: Axes, theme: Theme, clock: str, quantity: str) -> None:
        for i, run in _logged(runs):
            figures.curve(ax, theme, *column(run.log.steps, clock, quantity), color=i, label=run.name)
            if quantity == "score_matching":
                held_out = column(run.log.held_out, clock, "held_out_score_matching")
                figures.curve(ax, theme, *held_out, color=i, marker="o", ms=4, ls=":")

    if not _logged(runs):
        return []
    rows = {"loss": "loss", "score_matching": "score matching"}
    _over_time(out, "loss", rows, panel)
    return [
        Plot(
            "loss",
            "Loss",
            "What is minimised (score matching and lambda times the penalty), and score matching alone. "
            "Dots: on held-out data with the averaged weights, at checkpoints.",
            "1/2 |sigma s + z|² summed over dimensions, means over the steps between two lines of log.jsonl.",
        )
    ]


def _asymmetry(runs: Runs, out: Path) -> list[Plot]:
    def panel(ax: Axes, theme: Theme, clock: str, quantity: str) -> None:
        for i, run in _logged(runs):
            trained, held_out = (column(rows, clock, quantity) for rows in asymmetry_rows(run))
            figures.curve(ax, theme, *held_out, color=i, label=run.name, marker="o", ms=4, ls=":")
            figures.curve(ax, theme, *trained, color=i)

    if not any(row["nats"] is not None for run in runs for rows in asymmetry_rows(run) for row in rows):
        return []
    _over_time(out, "asymmetry", {"nats": "asymmetry, nats"}, panel)
    return [
        Plot(
            "asymmetry",
            "Asymmetry",
            "By how much the log-density changes around a loop of noise: 0 for a gradient. Dots: on held-out "
            "data with the averaged weights, at checkpoints. Lines: penalised samples of the training, where "
            "there is a penalty.",
            "Root mean squares over the noise levels of log.jsonl, of work_nats (curlfree.loop_work) and of "
            "asymmetry_nats, 2 pi sigma² |K|.",
        )
    ]


def _over_time(
    out: Path,
    name: str,
    rows: dict[str, str],
    panel: Callable[[Axes, Theme, str, str], None],
) -> None:
    """Quantities, one in each row of panels, against steps and against seconds."""

    def figure(theme: Theme) -> Figure:
        made, axes = figures.panels(len(rows), len(_CLOCKS), width=4.0, height=2.8)
        cells = [(quantity, clock) for quantity in rows for clock in _CLOCKS]
        for ax, (quantity, clock) in zip(axes, cells, strict=True):
            panel(ax, theme, clock, quantity)
            ax.set(xlabel=_CLOCKS[clock], ylabel=rows[quantity])
            figures.log_scale(ax)
            ax.grid()
        axes[0].legend()
        return made

    figures.save(figure, out, name)


def _loss_by_level(runs: Runs, out: Path) -> list[Plot]:
    panels = [(run.name, run.log.steps, "score_matching") for run in runs if run.log.steps]
    plot = Plot(
        "loss_by_level",
        "Loss by noise level",
        "Score matching of the training samples in ranges of noise levels; the colour is the range's middle.",
        "Means over the steps between two lines of log.jsonl.",
        wide=len(panels) > 1,
    )
    return _levels(out, panels, plot, "score matching")


def _asymmetry_by_level(runs: Runs, out: Path) -> list[Plot]:
    panels = []
    for run in runs:
        trained, held_out = asymmetry_rows(run)
        for kind, rows, name in (
            ("penalised", trained, "asymmetry_nats"),
            ("held out", held_out, "work_nats"),
        ):
            if any(row["nats"] is not None for row in rows):
                panels.append((f"{run.name}, {kind}", rows, name))
    plot = Plot(
        "asymmetry_by_level",
        "Asymmetry by noise level",
        "Penalised training samples, and held-out data with the averaged weights.",
        "asymmetry_nats and work_nats of log.jsonl, root mean squares over samples.",
        wide=len(panels) > 1,
    )
    return _levels(out, panels, plot, "asymmetry, nats")


def _levels(out: Path, panels: list[tuple[str, list[Row], str]], plot: Plot, label: str) -> list[Plot]:
    """A panel for each title, with a curve against the steps for each noise level."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    if not panels:
        return []
    sigmas = [level["sigma"] for _, rows, _ in panels for row in rows for level in row["levels"]]
    scale = LogNorm(min(sigmas), max(sigmas))

    def figure(theme: Theme) -> Figure:
        made, axes = grid_of(len(panels), 3.4, 2.8)
        for ax, (title, rows, quantity) in zip(axes, panels, strict=False):
            for k, level in enumerate(rows[0]["levels"]):
                x, y = column(({**row["levels"][k], "step": row["step"]} for row in rows), "step", quantity)
                ax.plot(x, y, color=theme.sequential(scale(level["sigma"])), lw=1.2, marker=".", ms=3)
            ax.set(xlabel="step", title=title)
            figures.log_scale(ax)
            ax.grid()
        axes[0].set_ylabel(label)
        colors = ScalarMappable(scale, theme.sequential)
        made.colorbar(colors, ax=axes, label="noise level σ", aspect=30)
        return made

    figures.save(figure, out, plot.name)
    return [plot]


def grid_of(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """At least `count` panels, up to three in a row; those too many are blank."""
    columns = min(count, 3)
    figure, axes = figures.panels(math.ceil(count / columns), columns, width=width, height=height)
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes


def _optimiser(runs: Runs, out: Path) -> list[Plot]:
    shown = {
        "grad_norm": "norm of the gradient",
        "lr": "learning rate",
        "steps_per_second": "steps per second",
    }
    if not _logged(runs):
        return []

    def figure(theme: Theme) -> Figure:
        made, axes = figures.panels(1, len(shown), width=3.2, height=2.8)
        for ax, (quantity, label) in zip(axes, shown.items(), strict=True):
            for i, run in _logged(runs):
                figures.curve(ax, theme, *column(run.log.steps, "step", quantity), color=i, label=run.name)
            ax.set(xlabel="step", title=label)
            ax.grid()
        figures.log_scale(axes[0])
        axes[0].legend()
        return made

    figures.save(figure, out, "optimiser")
    return [
        Plot(
            "optimiser",
            "Gradients, learning rate, speed",
            "The gradient's norm is that before clipping; steps per second include checkpoints.",
            "Means over the steps between two lines of log.jsonl; the last step's learning rate.",
        )
    ]


def _measured(runs: Runs, out: Path) -> list[Plot]:
    names = [name for name in BY_LEVEL if any("levels" in run.metrics.get(name, {}) for run in runs)]
    nfe = any("tolerances" in run.metrics.get("nfe", {}) for run in runs)
    if not names and not nfe:
        return []

    def points(ax: Axes, theme: Theme, i: int, rows: list[Row], x: str) -> None:
        widths = [1.96 * (row["se"] or 0.0) for row in rows]
        at, values = [row[x] for row in rows], [row["value"] for row in rows]
        color = theme.color(i)
        ax.errorbar(
            at, values, yerr=widths, color=color, label=runs[i].name, marker="o", ms=3, capsize=2, lw=1
        )

    def figure(theme: Theme) -> Figure:
        made, axes = grid_of(len(names) + nfe, 3.2, 2.8)
        for ax, name in zip(axes, names, strict=False):
            for i, run in enumerate(runs):
                if name in run.metrics:
                    points(ax, theme, i, run.metrics[name]["levels"], "sigma")
            ax.set(xscale="log", xlabel="noise level σ", title=BY_LEVEL[name])
        if nfe:
            for i, run in enumerate(runs):
                if "nfe" in run.metrics:
                    points(
                        ax=axes[len(names)], theme=theme, i=i, rows=run.metrics["nfe"]["tolerances"], x="rtol"
                    )
            axes[len(names)].set(xscale="log", xlabel="tolerance of RK45", title="network evaluations")
        for ax in axes[: len(names) + nfe]:
            figures.log_scale(ax)
            ax.grid()
        axes[0].legend()
        return made

    figures.save(figure, out, "measured")
    return [
        Plot(
            "measured",
            "Measured by noise level and tolerance",
            "Held-out data, 95 % intervals over images or points.",
            "The levels of metrics.json, value ± 1.96 se.",
            wide=len(names) + nfe > 1,
        )
    ]


def _samples(runs: Runs, out: Path) -> list[Plot]:
    """One picture for each folder of samples."""
    return [
        _picture(run.name, drawn.folder, drawn.about, drawn.points(), out)
        for run in runs
        for drawn in run.samples
    ]


def _picture(run: str, folder: Path, about: Row, x: np.ndarray[Any, Any], out: Path) -> Plot:
    from PIL import Image

    name = re.sub(r"[^\w.-]+", "_", f"samples_{run}_{folder.name}")
    title = f"{run}: {about['sampler']}"
    flat = x.ndim == 2

    def figure(theme: Theme) -> Figure:
        if not flat:
            with Image.open(folder / "grid.png") as image:
                return figures.picture(np.asarray(image), title)
        made, (ax,) = figures.panels(1, 1, width=3.6, height=3.7)
        size = min(12.0, max(2.0, 3000 / len(x)))  # few points would hardly be seen
        ax.scatter(x[:, 0], x[:, 1], s=size, color=theme.color(0), lw=0, alpha=0.8, rasterized=True)
        figures.plane(ax, 1.05 * float(np.abs(x).max()), title)
        return made

    figures.save(figure, out, name)
    seen = f"{len(x)} points" if flat else f"The first {min(64, len(x))} of {len(x)} images"
    caption = f"{seen}, {about['nfe']['mean']:.4g} network evaluations each."
    weights = f"{about['weights']} weights of step {about['step']}"
    how = f"{weights}, {about['sampler']}, seed {about['seed']}; samples/{folder.name}"
    return Plot(name, f"Samples of {title}", caption, how, wide=False)
