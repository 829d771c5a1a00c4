"""What the Gaussian example shows: its tables, figures and sentences, from its values.

`values` is that of the record: "paper_mode" always, "corrected" and "wide" in corrected mode.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from curlfree import figures
from curlfree.experiments.gaussian import (
    ARRIVED,
    DIRECTIONS,
    EPSILONS,
    GRID,
    PAPER,
    STEP,
    STEP_DECAY,
    STEP_WITHOUT_ERROR,
    STOP,
    PerturbedGaussian,
    descend,
    flow,
    plane_grid,
    starting_points,
    stop_radius,
)
from curlfree.experiments.progress import Advance, silent
from curlfree.experiments.records import Cell, Disagreement, Plot, Table
from curlfree.figures import Figure, Theme
from curlfree.operators import jacobian


def tables(values: dict[str, Any]) -> list[Table]:
    """The tables of the report."""
    found = [_step_table(values), _asymmetry_table(values)]
    if "corrected" in values:
        found += [_flow_table(values["corrected"]), _wide_table(values["wide"])]
    return found


def figure_names(corrected: bool) -> tuple[str, ...]:
    """The names of the figures of a mode."""
    return ("fields_c", "fields_u", *(("step_limit", "radius", "rotation") if corrected else ()))


def draw(values: dict[str, Any], out: Path, advance: Advance = silent) -> list[Plot]:
    """Draw the figures of the report into `out`."""
    plots = _draw_fields(out, advance)
    return plots + (_draw_corrected(out, values["corrected"], advance) if "corrected" in values else [])


def summary(values: dict[str, Any]) -> list[str]:
    """What came out."""
    matches = all(values["paper_mode"][arm]["steps"] == list(PAPER[arm]["steps"]) for arm in DIRECTIONS)
    ending = "digit for digit" if matches else "differently from the printed ones"
    counted = f"With the authors' constants the step counts of Fig. 1 come out {ending}."
    return [counted, *(_findings(values["corrected"]) if "corrected" in values else [])]


def _step_table(values: dict[str, Any]) -> Table:
    columns = ["ε"]
    lists: list[list[Any]] = [[f"{e:g}" for e in EPSILONS]]
    for arm in ("C", "U"):
        columns += [f"{arm}: paper", f"{arm}: paper mode"]
        lists += [list(PAPER[arm]["steps"]), values["paper_mode"][arm]["steps"]]
        if "corrected" in values:
            columns.append(f"{arm}: corrected")
            lists.append(values["corrected"][arm]["steps"])
    return Table(
        "Steps until all ten points have arrived (Fig. 1)",
        columns,
        _transpose(lists),
        f"Paper mode: first step {STEP_WITHOUT_ERROR:g} at ε = 0, where it reaches the centre exactly, "
        f"being the variance, and {STEP:g} elsewhere; it falls by e in {STEP_DECAY:g} steps. Corrected: "
        f"{STEP:g} everywhere. Arrived: mean of max(-log p, 0) below {STOP:g}.",
    )


def _asymmetry_table(values: dict[str, Any]) -> Table:
    ours = values["paper_mode"]["U"]
    columns = ["ε", "Asym: paper", "Asym: paper mode", "NAsym: paper", "NAsym: paper mode"]
    printed = PAPER["U"]
    lists: list[list[Any]] = [
        [f"{e:g}" for e in EPSILONS],
        list(printed["asym"]),
        ours["asym"],
        list(printed["nasym"]),
        ours["nasym"],
    ]
    if "corrected" in values:
        expected = values["corrected"]["U"]
        columns += ["Asym: corrected", "NAsym: corrected", "loss (Eq. 1): corrected"]
        lists += [expected["asym"], expected["nasym"], expected["esm"]]
    return Table(
        "Asymmetry of U, and the score-matching loss that is meant to be ε",
        columns,
        _transpose(lists),
        "The printed columns stand under each other's heads in Fig. 1; they are put right here. Paper mode: "
        f"sums of p times the metric over a {GRID} x {GRID} grid on [-3, 3]², no cell area. Corrected: "
        "expectations under p by Gauss-Legendre quadrature in polar coordinates; the loss is the same for C"
        f"{_asymmetry_of_c(values)}.",
    )


def _asymmetry_of_c(values: dict[str, Any]) -> str:
    if "corrected" not in values:
        return ""
    return f", whose Asym is at most {max(values['corrected']['C']['asym']):.1g}"


def _flow_table(corrected: dict[str, Any]) -> Table:
    columns = ["ε"]
    lists: list[list[Any]] = [[f"{e:g}" for e in EPSILONS]]
    for arm in ("U", "C"):
        columns += [f"{arm}: rule of Fig. 1", f"{arm}: |x| < {ARRIVED:g}"]
        lists += [corrected[arm]["time_to_rule"], corrected[arm]["time_to_centre"]]
    columns.append("C as printed: farthest start that arrives")
    lists.append(corrected["basin"])
    return Table(
        "The same flow with the step going to zero: time until all ten points have arrived",
        columns,
        _transpose(lists),
        "dx/dt = s(x) with the authors' field, DOP853 at relative tolerance 1e-10; the rule of Fig. 1 is "
        f"|x| < {stop_radius():.3f} in the limit. Last column: the radius beyond which Eq. A6 without the "
        "authors' stabilising constants pushes C outwards; the points start at 1.7 to 3.0.",
    )


def _wide_table(wide: dict[str, Any]) -> Table:
    return Table(
        "Eq. A6 as printed with standard deviation 1: time from (3, 3) to |x| < 0.1",
        ["ε", "U", "C"],
        _transpose([[f"{e:g}" for e in wide["epsilons"]], wide["U"], wide["C"]]),
        "No stabilising constants; DOP853 at relative tolerance 1e-10. A dash: it leaves |x| < 10. "
        "Closed form for U at every ε: ln(|x0|/0.1) = 3.7478.",
    )


def _transpose(lists: list[list[Any]]) -> list[list[Cell]]:
    return [list(row) for row in zip(*lists, strict=True)]


def _findings(corrected: dict[str, Any]) -> list[str]:
    u, c = corrected["U"]["time_to_rule"], corrected["C"]["time_to_rule"]
    return [
        f"With small steps the order is reversed: U arrives at time {u[0]:.4f} for every ε (to "
        f"{max(abs(t - u[0]) for t in u):.0e}), C is late by a factor of up to {c[-1] / u[-1]:.1f}.",
        "What Fig. 1 shows is the stability limit of one explicit step of 1.25 times the target's variance, "
        "not a cost of rotation in the flow that the step approximates.",
    ]


def disagreements(values: dict[str, Any]) -> list[Disagreement]:
    """Where the result differs from the paper, and why."""
    ours = values["paper_mode"]["U"]
    found = [
        Disagreement(
            f"Fig. 1 heads {PAPER['U']['nasym'][1]:.2e} with Asym, {PAPER['U']['asym'][1]:.2e} with NAsym.",
            f"Asym is {ours['asym'][1]:.2e}, NAsym {ours['nasym'][1]:.2e} at ε = 5e-4.",
            "The two columns are exchanged in print.",
        ),
        Disagreement(
            "Asym and NAsym are expectations under p.",
            "The printed numbers are sums over a 20 x 20 grid.",
            "No cell area, and cells of 0.32 for a target of width 0.1: no approximation of the integral.",
        ),
    ]
    if "corrected" not in values:
        return found
    u, c = values["corrected"]["U"], values["corrected"]["C"]
    return [
        *found,
        Disagreement(
            "The score-matching loss of both models is ε.",
            f"It is {u['esm'][-1] / EPSILONS[-1]:.2e} ε (both models) in the program that made the figure.",
            "The 1e-8 added to the denominator removes the error wherever p is small, where mu lies.",
        ),
        Disagreement(
            "Non-conservativeness decelerates sampling: U needs 238 steps where C needs 16.",
            f"In the flow U needs time {u['time_to_rule'][-1]:.4f}, as without error, C "
            f"{c['time_to_rule'][-1]:.4f}.",
            f"A step a multiplies U's radius by |1 - a/std² + i a A|. With a = {STEP:g} that exceeds 1 for A "
            f"above 77.5; A reaches {u['amplitude'][-1]:.0f} at the last ε. With half that step U needs "
            f"{u['time_by_steps'][-1][1] / values['corrected']['step_sizes'][1]:.0f} steps.",
        ),
        Disagreement(
            "Eq. A6 defines C for every ε > 0.",
            "Without the stabilising constants no starting point of the figure ever arrives under C.",
            "The error grows as 1/sqrt(p) and beats the score beyond the radius in the table's last column.",
        ),
        Disagreement(
            "Asym of U is finite.",
            "For Eq. A6 as printed the expectation diverges logarithmically.",
            "At the centre the error has length sqrt(2 ε mu(0)/p(0)) and no direction: |J| grows as 1/|x|.",
        ),
    ]


def _draw_fields(out: Path, advance: Advance) -> list[Plot]:
    plots = []
    for arm, direction in DIRECTIONS.items():

        def draw(theme: Theme, arm: str = arm, direction: Callable[[Tensor], Tensor] = direction) -> Figure:
            figure, axes = figures.panels(2, 4, width=2.3, height=2.4)
            grid, _ = plane_grid(3.0, GRID)
            for ax, epsilon in zip(axes, EPSILONS, strict=False):
                field = PerturbedGaussian(epsilon, direction)
                step = STEP if epsilon else STEP_WITHOUT_ERROR
                count, path, _ = descend(field, starting_points(), step=step)
                figures.vector_field(ax, theme, grid, field(grid))
                figures.trajectories(ax, theme, path, color=0 if arm == "C" else 1)
                figures.plane(ax, 3.6, f"ε = {epsilon:g}: {count} steps")
            axes[-1].set_axis_off()
            return figure

        name = f"fields_{arm.lower()}"
        figures.save(draw, out, name)
        advance("figures")
        plots.append(
            Plot(
                name,
                f"Field and steps of {arm}",
                f"The field s of {arm} on a grid and the steps of the ten points, as in Fig. 1"
                f" ({'a' if arm == 'C' else 'b'}). Rings mark the starting points.",
                "The authors' constants (paper mode). Arrows are scaled by the longest in each panel.",
            )
        )
    return plots


def _draw_corrected(out: Path, corrected: dict[str, Any], advance: Advance) -> list[Plot]:
    sizes = corrected["step_sizes"]

    def limit(theme: Theme) -> Figure:
        figure, axes = figures.panels(1, 2, width=3.6, height=3.2)
        for ax, arm in zip(axes, ("U", "C"), strict=True):
            for i, epsilon in enumerate(EPSILONS):
                times = [math.nan if t is None else t for t in corrected[arm]["time_by_steps"][i]]
                figures.curve(ax, theme, sizes, times, color=i, label=f"ε = {epsilon:g}", marker="o", ms=3)
                ax.axhline(corrected[arm]["time_to_rule"][i], color=theme.color(i), lw=0.6, ls=":")
            ax.set(
                xscale="log", yscale="log", ylim=(0.015, 0.3), xlabel="step size", title=arm,
                ylabel="time until all have arrived",
            )  # fmt: skip
            ax.grid()
        axes[0].legend(fontsize=7)
        return figure

    def radii(theme: Theme) -> Figure:
        figure, axes = figures.panels(1, 2, width=3.6, height=3.2)
        start = starting_points()[:1]
        for ax, arm in zip(axes, ("U", "C"), strict=True):
            for i, epsilon in enumerate(EPSILONS):
                field = PerturbedGaussian(epsilon, DIRECTIONS[arm])
                _, path = flow(field, start, radii=(ARRIVED,), until=0.06, times=200)
                t = np.linspace(0.0, 0.06, 200)[: len(path)]
                radius = np.linalg.norm(path[:, 0], axis=1)
                figures.curve(ax, theme, t, radius, color=i, label=f"ε = {epsilon:g}")
            ax.set(yscale="log", xlabel="time", ylabel="|x|", title=arm)
            ax.grid()
        axes[1].legend(fontsize=7)
        return figure

    def rotation(theme: Theme) -> Figure:
        figure, axes = figures.panels(1, 2, width=3.8, height=3.2)
        points, axis = plane_grid(1.5, 121)
        for ax, arm in zip(axes, ("U", "C"), strict=True):
            _, J = jacobian(PerturbedGaussian(EPSILONS[-1], DIRECTIONS[arm]), points)
            dense = J.dense().detach()
            density = (dense[:, 0, 1] - dense[:, 1, 0]).view(len(axis), len(axis)).T
            limit = None if arm == "U" else 1.0
            figures.rotation_density(ax, theme, axis, axis, density, limit=limit)
            figures.plane(ax, 1.5, f"{arm}, ε = {EPSILONS[-1]:g}")
        return figure

    for draw, name in ((limit, "step_limit"), (radii, "radius"), (rotation, "rotation")):
        figures.save(draw, out, name)
        advance("figures")
    return [
        Plot(
            "step_limit",
            "Arrival time against step size",
            "Right to left: the step shrinks. U's times meet in the one without error; C's stay apart. "
            "A missing point: no arrival within time 0.6.",
            "Sum of constant steps until the rule of Fig. 1 is met; dotted: the continuous flow.",
        ),
        Plot(
            "radius",
            "Radius of the first point in the continuous flow",
            "U: all seven curves coincide, rotation leaves the radius alone. C: the error opposes the score.",
            "DOP853 at relative tolerance 1e-10, the authors' field.",
        ),
        Plot(
            "rotation",
            "Rotation density (Eq. 8)",
            "ds1/dx2 - ds2/dx1 (mind the scales). U rotates most where p is small; C rotates only far out, "
            "because mu is ten Gaussians and not a ring.",
            "Dense Jacobians (curlfree.jacobian) on a 121 x 121 grid, in double precision.",
        ),
    ]
