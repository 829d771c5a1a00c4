"""What the autoencoder shows: its tables, figures and sentences, from its values.

`values` is that of the record: "without_data" always, "with_data" in corrected mode.
"""

import math
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from curlfree import figures
from curlfree.experiments.autoencoder import (
    ARMS,
    DATA_HIDDEN,
    FALLING,
    MERGED,
    NEARLY,
    OTHERWISE,
    OUTCOMES,
    PAPER,
    PAPER_SEED,
    PARALLEL,
    SAME_LINE,
    reached,
)
from curlfree.experiments.records import Cell, Disagreement, Plot, Table, mean_cell
from curlfree.figures import Figure, Theme

SYM, DIFFERENCE = "||WR' - RW'||", "||W - R||"


def tables(values: dict[str, Any]) -> list[Table]:
    """The tables of the report."""
    found = [_seed_table(values["without_data"]), _outcome_table(values["without_data"])]
    return [*found, _arm_table(values["with_data"])] if "with_data" in values else found


def summary(values: dict[str, Any]) -> list[str]:
    """What came out."""
    run = values["without_data"]
    counts = _counts(run)
    conservative = counts[PARALLEL] + counts[MERGED] + counts[OTHERWISE]
    sentences = [
        f"{_reached(run)} of {len(run['seeds'])} seeds end as Fig. 3 shows: loss below 1e-9, {SYM} below "
        f"1e-6, {DIFFERENCE} above 0.1. Seed {PAPER_SEED} of the published run "
        f"{'is one of them' if reached(_final(run, PAPER_SEED)) else 'is not one of them'}.",
        f"Of the {conservative} conservative ones, {counts[PARALLEL]} have parallel columns of W and R, unit "
        f"by unit, and in {counts[MERGED]} two units became one, in {_merged_parallel(run)} of them with "
        f"parallel sums of columns. {counts[OTHERWISE]} use more freedom than one number per unit beyond "
        "tied weights.",
    ]
    if "with_data" in values:
        arms = values["with_data"]["arms"]
        each = ", ".join(
            f"{arm.name} {_mean(arms[arm.name]['asym'])} and {_mean(arms[arm.name]['esm'])}" for arm in ARMS
        )
        sentences.append(f"With data, asymmetry and score error, means over the seeds: {each}.")
    return sentences


def disagreements(values: dict[str, Any]) -> list[Disagreement]:
    """Where the result differs from the paper, and why."""
    run = values["without_data"]
    final, counts = _final(run, PAPER_SEED), _counts(run)
    conservative = counts[PARALLEL] + counts[MERGED] + counts[OTHERWISE]
    found = [
        Disagreement(
            "Figs. 3 and A4: training leads to a conservative field, shown for five seeds.",
            f"{conservative} of {len(run['seeds'])} seeds get there in the published number of steps.",
            f"{_falling(run)} of the others are still falling: a squared loss flattens as it vanishes.",
        ),
        Disagreement(
            "The field is conservative if and only if WR' = RW' (after Im et al., 2016).",
            "Enough only for a linear h. The exact condition is that paired columns are parallel (angle 0).",
            "J = sum_i h_i'(x) R_i W_i' is symmetric at every x only term by term if the h_i' differ.",
        ),
        Disagreement(
            "QC learns conservative fields that tied weights cannot represent; this is its advantage over C.",
            f"In {counts[PARALLEL]} of {conservative} conservative runs R_i = a_i W_i, in {counts[MERGED]} "
            f"two units with equal h' act as one, {_merged_parallel(run)} of them as one such unit; "
            f"{counts[OTHERWISE]} are another kind.",
            f"One number per unit gives {_simple(run)} of the {conservative} by construction, with Asym = 0 "
            "exactly.",
        ),
        Disagreement(
            f"Fig. 3 shows the Frobenius norm {SYM}.",
            "The published program logs that norm divided by the square root of 2.",
            "It takes one of the two non-zero entries. Tables and figures here show the norm.",
        ),
    ]
    if reached(final):
        found.append(
            Disagreement(
                f"The loss of seed {PAPER_SEED} ends at {PAPER['last']['loss']:.1e}.",
                f"The same formula gives {final['trace_loss']:.1e} here; the squared difference "
                f"{final['loss']:.1e}.",
                "tr(JJ') - tr(JJ) in single precision cancels: both are rounding, and may be negative.",
            )
        )
    if "with_data" not in values:
        return found
    data = values["with_data"]
    tied, parallel, seeds = _below(data, "QC", "C tied"), _below(data, "C parallel", "QC"), len(data["seeds"])
    if 2 * parallel <= seeds:
        return found
    return [
        *found,
        Disagreement(
            "An unconstrained QC model is preferable to a constrained C model.",
            f"QC has a lower score error than tied weights on {tied} of {seeds} seeds; parallel columns have "
            f"a lower one than QC on {parallel}, and Asym of at most "
            f"{max(data['arms']['C parallel']['asym']):.2g}.",
            "The trace of the exact score's Jacobian is negative at "
            f"{data['score']['negative_trace']:.0%} of the test points; that of the tied one, W diag(h') W' "
            f"with h' > -0.1, at {_share(data, 'C tied')}, that of the parallel one, with a factor of either "
            f"sign for each unit, at {_share(data, 'C parallel')} (QC {_share(data, 'QC')}).",
        ),
    ]


def _final(run: dict[str, Any], seed: int) -> dict[str, float]:
    index = run["seeds"].index(seed)
    return {name: value[index] for name, value in run["final"].items()}


def _reached(run: dict[str, Any]) -> int:
    return sum(reached(_final(run, seed)) for seed in run["seeds"])


def _falling(run: dict[str, Any]) -> int:
    """How many of the seeds that are not conservative lowered their loss in the last fifth of the run."""
    loss = np.array(run["history"]["loss"])
    lower = loss[-1] < loss[len(loss) * 4 // 5]
    return sum(
        bool(fell) for fell, kind in zip(lower, run["outcome"], strict=True) if kind in (NEARLY, FALLING)
    )


def _counts(run: dict[str, Any]) -> dict[str, int]:
    return {kind: run["outcome"].count(kind) for kind in OUTCOMES}


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3g}"


def _share(data: dict[str, Any], arm: str) -> str:
    shares = data["arms"][arm]["negative_trace"]
    return f"{sum(shares) / len(shares):.0%}"


def _below(data: dict[str, Any], one: str, other: str) -> int:
    """On how many seeds the score error of an arm is below that of another."""
    pairs = zip(data["arms"][one]["esm"], data["arms"][other]["esm"], strict=True)
    return sum(a < b for a, b in pairs)


def _merged_parallel(run: dict[str, Any]) -> int:
    """How many of the runs whose units became one have parallel sums of the columns of W and R."""
    angles = zip(run["outcome"], run["final"]["joint_angle"], strict=True)
    return sum(kind == MERGED and angle < SAME_LINE for kind, angle in angles)


def _simple(run: dict[str, Any]) -> int:
    """How many conservative runs need one number per unit beyond tied weights."""
    return _counts(run)[PARALLEL] + _merged_parallel(run)


def _seed_table(run: dict[str, Any]) -> Table:
    index, root = run["seeds"].index(PAPER_SEED), math.sqrt(2)
    first, last = PAPER["first"], PAPER["last"]
    history = run["history"]
    row_of = max(i for i, step in enumerate(history["step"]) if step % 1000 == 0)
    ours = {
        label: {name: history[name][row][index] for name in ("loss", "sym", "difference", "angle")}
        for label, row in (("first", 0), ("last", row_of))
    }
    rows: list[list[Cell]] = [
        ["loss L_QC", *(side[label]["loss"] for label in ("first", "last") for side in (PAPER, ours))],
        [SYM, first["sym"] * root, ours["first"]["sym"], last["sym"] * root, ours["last"]["sym"]],
        [DIFFERENCE, *(side[label]["difference"] for label in ("first", "last") for side in (PAPER, ours))],
        ["largest angle between columns, degrees", None, ours["first"]["angle"], None, ours["last"]["angle"]],
    ]  # fmt: skip
    columns = [
        "",
        "step 0: paper",
        "step 0: paper mode",
        "step 10,000: paper",
        f"step {history['step'][row_of]:,}: paper mode",
    ]
    return Table(
        f"The published run, seed {PAPER_SEED}",
        columns,
        rows,
        "L_QC alone on a fixed 40 x 40 grid on [-10, 10]², no data; float32, Adam, clipped to norm 1. The "
        "published program logs the second row divided by the square root of 2; it is multiplied back. Our "
        "loss is the squared difference of the off-diagonal entries; the traces of Eq. 14 would cancel.",
    )


def _outcome_table(run: dict[str, Any]) -> Table:
    counts = _counts(run)
    rows: list[list[Cell]] = []
    for kind in OUTCOMES:
        chosen = [
            _final(run, seed) for seed, o in zip(run["seeds"], run["outcome"], strict=True) if o == kind
        ]
        middle = [
            median(f[name] for f in chosen) if chosen else None
            for name in ("loss", "sym", "difference", "angle", "gate_difference")
        ]
        rows.append([kind, counts[kind], f"{counts[kind] / len(run['seeds']):.0%}", *middle])
    return Table(
        f"Where {len(run['seeds'])} consecutive seeds end, without data",
        ["outcome", "seeds", "share", "loss", SYM, DIFFERENCE, "largest angle", "rms difference of h'"],
        rows,
        "Medians within each outcome. Angle: the largest between the lines of paired columns of W and R, in "
        "degrees, below 0.1 in the first row. Difference of h': between the two hidden units over the grid; "
        f"0 means that they act as one. {_reached(run)} seeds reach a loss below 1e-9 and {SYM} below 1e-6 "
        f"with {DIFFERENCE} above 0.1.",
    )


def _arm_table(data: dict[str, Any]) -> Table:
    heads = {
        "esm": "score error (Eq. 1)",
        "asym": "Asym",
        "nasym": "NAsym",
        "sym": SYM,
        "difference": DIFFERENCE,
        "angle": "largest angle",
        "negative_trace": "tr J < 0",
        "negative": "J < 0",
    }
    rows: list[list[Cell]] = [
        [arm.name, *(mean_cell(data["arms"][arm.name][name]) for name in heads)] for arm in ARMS
    ]
    gap = [q - p for p, q in zip(data["arms"]["C parallel"]["esm"], data["arms"]["QC"]["esm"], strict=True)]
    return Table(
        f"With a score-matching term: a Gaussian mixture, {len(data['seeds'])} seeds",
        ["model", *heads.values()],
        rows,
        "Mean over seeds with a 95 % interval. DSM (Eq. 5) plus lambda L_QC at one noise level, "
        f"{DATA_HIDDEN} hidden units; score error against the exact score of the smoothed mixture on fresh "
        f"points in double precision (the zero field has {data['score_norm']:.3g}). C parallel: "
        "R_i = a_i W_i. QC's score "
        f"error minus that of C parallel, seed by seed: {mean_cell(gap)}. Last columns: the share of the "
        "points at which the Jacobian has a negative trace, and at which its symmetric part has negative "
        f"eigenvalues only; of the exact score {data['score']['negative_trace']:.3g} and "
        f"{data['score']['negative']:.3g}.",
    )


def draw(values: dict[str, Any], out: Path) -> list[Plot]:
    """Draw the figures of the report into `out`."""
    run = values["without_data"]
    index = run["seeds"].index(PAPER_SEED)
    step = np.array(run["history"]["step"])
    shown = (("loss", "L_QC"), ("sym", SYM), ("difference", DIFFERENCE), ("angle", "largest angle (degrees)"))

    def trends(theme: Theme) -> Figure:
        figure, axes = figures.panels(1, 4, width=2.6, height=2.8)
        for ax, (name, label) in zip(axes, shown, strict=True):
            history = _positive(run["history"][name])
            low, middle, high = np.quantile(history, [0.05, 0.5, 0.95], axis=1)
            figures.curve(ax, theme, step, middle, label="median over seeds", band=(low, high))
            figures.curve(ax, theme, step, history[:, index], color=1, label=f"seed {PAPER_SEED}")
            ax.set(title=label, xlabel="step", yscale="linear" if name == "difference" else "log")
            ax.grid()
        axes[2].set_ylim(bottom=0)
        axes[0].legend(fontsize=7)
        return figure

    def every_seed(theme: Theme) -> Figure:
        figure, axes = figures.panels(1, 2, width=4.0, height=3.2)
        for ax, (name, label) in zip(axes, shown[1:3], strict=True):
            history = _positive(run["history"][name])
            for i, kind in enumerate(run["outcome"]):
                figures.curve(ax, theme, step, history[:, i], color=OUTCOMES.index(kind), lw=0.6, alpha=0.7)
            ax.set(title=label, xlabel="step", yscale="linear" if name == "difference" else "log")
            ax.grid()
        for kind in OUTCOMES:
            figures.curve(axes[1], theme, [], [], color=OUTCOMES.index(kind), label=kind)
        figure.legend(loc="outside lower center", ncols=2, fontsize=7)
        return figure

    drawn = [(trends, "trends"), (every_seed, "seeds")]
    plots = [
        Plot(
            "trends",
            "Trends while L_QC is minimised (Fig. 3)",
            f"Seed {PAPER_SEED} is the published run; the band holds nine tenths of the seeds. The last "
            "panel is what conservativity needs: paired columns of W and R in line.",
            "Logged every 200 steps; float32, so that values below 1e-13 (loss) are rounding.",
        ),
        Plot(
            "seeds",
            "Every seed (Fig. A4 shows four)",
            f"Colours: where the run ended. The smallest {DIFFERENCE} at the end is "
            f"{min(run['final']['difference']):.2g}.",
            "As above, one line per seed.",
        ),
    ]
    if "with_data" in values:
        arms = values["with_data"]["arms"]

        def by_arm(theme: Theme) -> Figure:
            figure, axes = figures.panels(1, 3, width=3.0, height=3.0)
            columns = (("esm", "score error (Eq. 1)"), ("asym", "Asym"), ("angle", "largest angle (degrees)"))
            for ax, (name, label) in zip(axes, columns, strict=True):
                labels = [arm.name.replace(" ", "\n") for arm in ARMS]
                figures.strip(ax, theme, [arms[arm.name][name] for arm in ARMS], labels)
                ax.set(title=label)
                ax.grid(axis="y")
            axes[0].set_yscale("log")
            axes[1].set_yscale("symlog", linthresh=1e-5)
            return figure

        drawn.append((by_arm, "arms"))
        plots.append(
            Plot(
                "arms",
                "With a score-matching term",
                _by_arm_caption(arms),
                "Fresh points, exact score, exact Jacobian, double precision.",
            )
        )
    for function, name in drawn:
        figures.save(function, out, name)
    return plots


def _by_arm_caption(arms: dict[str, Any]) -> str:
    asym, angle = arms["QC"]["asym"], arms["QC"]["angle"]
    return (
        f"A dot is a seed. QC's asymmetry lies between {min(asym):.2g} and {max(asym):.2g}, its largest "
        f"angles between {min(angle):.2g} and {max(angle):.2g} degrees; the largest asymmetry of parallel "
        f"columns is {max(arms['C parallel']['asym']):.2g}."
    )


def _positive(history: list[list[float]]) -> np.ndarray:
    """A history over time and seeds, shape (T, S), its zeros lifted to the smallest other value."""
    values = np.array(history)
    return np.maximum(values, values[values > 0].min(initial=1.0))
