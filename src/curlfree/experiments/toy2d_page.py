"""What the two-dimensional experiment shows: its tables and sentences, from its values.

`values` is that of the record: "published" holds, by set and arm, a list over seeds of the cells of Table 1
by the authors' rules, "corrected" the same by the exact score, "sets" what is known about the sets.
"""

from collections.abc import Sequence
from typing import Any

from curlfree.experiments.records import Cell, Disagreement, Table, mean_cell, mean_interval
from curlfree.experiments.toy2d_figures import lambda_sweep
from curlfree.experiments.toy2d_train import PAPER_ARMS, PROBLEMS

EXACT = "exact score"
PUBLISHED_EXACT = "exact score by the authors' rules"

PAPER: dict[str, dict[str, dict[str, tuple[float, float]]]] = {  # Table 1: mean and half-width
    "8gaussian": {
        "C": {"asym": (0, 0), "nasym": (0, 0), "score_error": (0.434, 0.006), "nll": (5.24, 0.03),
              "precision": (0.9107, 0.0151), "recall": (0.9057, 0.0094)},
        "U": {"asym": (1.06e-2, 0.16e-2), "nasym": (1.42e-3, 0.43e-3), "score_error": (0.414, 0.013),
              "nll": (5.02, 0.03), "precision": (0.9453, 0.0061), "recall": (0.8969, 0.0191)},
        "QC": {"asym": (9.49e-3, 3.07e-3), "nasym": (1.38e-3, 0.41e-3), "score_error": (0.420, 0.007),
               "nll": (5.01, 0.09), "precision": (0.9558, 0.0022), "recall": (0.9116, 0.0154)},
    },
    "spirals": {
        "C": {"asym": (0, 0), "nasym": (0, 0), "score_error": (1.59, 0.05), "nll": (5.61, 0.17),
              "precision": (0.6221, 0.0300), "recall": (0.7725, 0.0624)},
        "U": {"asym": (0.735, 0.041), "nasym": (8.19e-2, 1.82e-2), "score_error": (1.50, 0.18),
              "nll": (5.11, 0.11), "precision": (0.5911, 0.0573), "recall": (0.8230, 0.0119)},
        "QC": {"asym": (0.318, 0.016), "nasym": (5.73e-2, 1.64e-2), "score_error": (1.56, 0.08),
               "nll": (5.04, 0.04), "precision": (0.6489, 0.0167), "recall": (0.8244, 0.0204)},
    },
    "checkerboard": {
        "C": {"asym": (0, 0), "nasym": (0, 0), "score_error": (0.765, 0.036), "nll": (5.19, 0.08),
              "precision": (0.8990, 0.0072), "recall": (0.9217, 0.0309)},
        "U": {"asym": (0.105, 0.018), "nasym": (2.51e-2, 0.43e-2), "score_error": (0.679, 0.027),
              "nll": (5.09, 0.02), "precision": (0.9209, 0.0089), "recall": (0.9409, 0.0302)},
        "QC": {"asym": (7.06e-2, 0.43e-2), "nasym": (1.70e-2, 0.18e-2), "score_error": (0.679, 0.026),
               "nll": (5.08, 0.02), "precision": (0.9216, 0.0027), "recall": (0.9496, 0.0156)},
    },
}  # fmt: skip
METRICS = {
    "asym": "Asym",
    "nasym": "NAsym",
    "score_error": "Score error",
    "nll": "NLL in nats",
    "precision": "Precision",
    "recall": "Recall",
}
Runs = Sequence[dict[str, Any]]


def column(runs: Runs, name: str) -> list[float]:
    """One quantity of all seeds."""
    return [float(run[name]) for run in runs]


def mean(runs: Runs, name: str) -> float:
    """The mean over seeds."""
    return sum(column(runs, name)) / len(runs)


def interval(runs: Runs, name: str) -> tuple[float, float]:
    """Mean and half-width of the 95 % interval over seeds, 0 for one seed."""
    return mean_interval(column(runs, name)) if len(runs) > 1 else (mean(runs, name), 0.0)


def agrees(printed: tuple[float, float], runs: Runs, name: str) -> bool:
    """Whether our interval and the printed one overlap; the zeros of C are zeros to rounding."""
    value, half = interval(runs, name)
    return abs(value - printed[0]) <= half + printed[1] + 5e-6


def tables(values: dict[str, Any]) -> list[Table]:
    """The tables of the report."""
    found = [_truth_table(values, key) for key in values["corrected"]]
    found += [_sweep_table(values)] if _has_sweep(values) else []
    found += [_table1(values, name) for name in METRICS] if values["published"] else []
    return found


def _truth_table(values: dict[str, Any], key: str) -> Table:
    arms, known = values["corrected"][key], values["sets"][key]
    rows: list[list[Cell]] = []
    for name, runs in {EXACT: known[EXACT], **arms}.items():
        cells = [
            mean_cell(column(runs, q))
            for q in ("score_error", "dsm", "asym", "nasym_pooled", "nll", "nll_gap")
        ]
        cells += [mean_cell(column(runs, q)) for q in ("precision", "recall", "nfe")]
        rows.append([name, cells[0], mean_cell([2 * v for v in column(runs, "score_error")]), *cells[1:]])
    return Table(
        f"{PROBLEMS[key].title}: corrected",
        ["model", "score error (Eq. 1)", "paper's convention (no 1/2)", "denoising loss", "Asym", "NAsym",
         "NLL in nats", "NLL minus the exact density's", "precision", "recall", "evaluations (ODE)"],
        rows,
        f"Mean over seeds ± 95 % interval (Student's t). Entropy at σ = 0.1: {known['entropy']:.4f} nats; "
        f"the exact score's NLL has a standard error of {known[EXACT][0]['nll_se']:.4f} from its test "
        "points, and the gap is paired on them. Score error, Asym, NAsym (pooled) and the σ²-weighted "
        "denoising loss: means over the 11 levels from 0.1 to 3. Averaged weights, RK45 with both tolerances "
        "1e-5 everywhere; precision and recall with k = 3 against fresh data with noise 0.1.",
    )  # fmt: skip


def _has_sweep(values: dict[str, Any]) -> bool:
    return any(len(lambda_sweep(arms)) > 2 for arms in values["corrected"].values())


def _sweep_table(values: dict[str, Any]) -> Table:
    rows: list[list[Cell]] = []
    for key, arms in values["corrected"].items():
        for lmbda, name in lambda_sweep(arms).items():
            cells = [mean_cell(column(arms[name], q)) for q in ("asym", "score_error", "dsm", "nll_gap")]
            rows.append([f"{PROBLEMS[key].title}, λ = {lmbda:g}", *cells])
    return Table(
        "The penalty's factor",
        ["set and λ", "Asym", "score error (Eq. 1)", "denoising loss", "NLL minus the exact density's"],
        rows,
        "U+ (λ = 0) and QC+ with the exact penalty, as above.",
    )


def _table1(values: dict[str, Any], metric: str) -> Table:
    rows: list[list[Cell]] = []
    for key, printed_arms in PAPER.items():
        arms = values["published"].get(key, {})
        rescored = values["corrected"].get(key, {})
        perfect = values["sets"].get(key, {}).get(PUBLISHED_EXACT)
        if perfect:
            row: list[Cell] = [
                f"{PROBLEMS[key].title}: the exact score",
                None,
                mean_cell(column(perfect, metric)),
            ]
            rows.append([*row, None, *([None, None] if values["corrected"] else [])])
        for name, cells in printed_arms.items():
            if not arms and not rescored:
                continue
            printed = cells[metric]
            row = [f"{PROBLEMS[key].title}: {name}", f"{printed[0]:.4g} ± {printed[1]:.2g}"]
            if name in arms:
                overlap = agrees(printed, arms[name], metric)
                row += [mean_cell(column(arms[name], metric)), "overlap" if overlap else "differ"]
            else:
                row += ["not run", None]
            if values["corrected"]:
                for arm in (name, f"{name}+"):
                    row.append(mean_cell(column(rescored[arm], metric)) if arm in rescored else "not run")
            rows.append(row)
    head = ["set and model", "paper", "paper mode", "intervals"]
    head += ["corrected", "corrected, ours (+)"] if values["corrected"] else []
    return Table(
        f"Table 1: {METRICS[metric]}",
        head,
        rows,
        "Paper mode: the published constants and the authors' evaluation, ± 95 % interval over seeds. "
        "Corrected: the same models with averaged weights, and ours, by the exact score, density and data at "
        "the model's own level; NLL is then that of data with noise 0.1. The exact score: what a perfect "
        "model would get by the authors' rules.",
    )


def summary(values: dict[str, Any]) -> list[str]:
    """What came out."""
    found = []
    if values["published"]:
        cells = [
            agrees(PAPER[key][name][metric], arms[name], metric)
            for key, arms in values["published"].items() for name in PAPER_ARMS if name in arms
            for metric in METRICS
        ]  # fmt: skip
        found.append(
            f"By the authors' rules the intervals of {sum(cells)} of {len(cells)} cells of Table 1 overlap."
        )
    for key, arms in values["corrected"].items():
        title, floor = PROBLEMS[key].title, mean(values["sets"][key][EXACT], "dsm")
        failed = [f"{name} ({n} of {len(runs)})" for name, runs in arms.items()
                  if (n := sum(loss > 2 * floor for loss in column(runs, "dsm")))]  # fmt: skip
        if failed:
            found.append(
                f"{title}: DID NOT TRAIN, with a denoising loss above twice the exact score's: "
                f"{', '.join(failed)}."
            )
        if not {"U+", "QC+", "C+"} <= set(arms):
            continue
        u, qc = arms["U+"], arms["QC+"]
        found.append(
            f"{title}: QC+ has {mean(qc, 'asym') / mean(u, 'asym'):.2f} times the asymmetry of U+, at "
            f"{mean(qc, 'dsm') / mean(u, 'dsm') - 1:+.2%} of its denoising loss; U+ is within "
            f"{mean(u, 'nll_gap'):.3f} nats of the entropy, QC+ {mean(qc, 'nll_gap'):.3f}, C+ "
            f"{mean(arms['C+'], 'nll_gap'):.3f}."
        )
        if "U" in arms:
            times = mean(arms["U"], "score_error") / mean(u, "score_error")
            found.append(
                f"{title}: U+'s score error is {times:.1f} times below that of the paper's own U, both by "
                "the exact score."
            )
    return found


def disagreements(values: dict[str, Any]) -> list[Disagreement]:
    """The cells of Table 1 that differ, and what the paper's evaluation measures."""
    found = [_cell(values, key, name, metric) for key, arms in values["published"].items()
             for name in PAPER_ARMS if name in arms for metric in METRICS
             if not agrees(PAPER[key][name][metric], arms[name], metric)]  # fmt: skip
    return found + [item for key in values["corrected"] for item in _measured(values, key)]


def _cell(values: dict[str, Any], key: str, name: str, metric: str) -> Disagreement:
    printed, runs = PAPER[key][name][metric], values["published"][key][name]
    value, half = interval(runs, metric)
    return Disagreement(
        f"{PROBLEMS[key].title}, {name}: {METRICS[metric]} {printed[0]:.4g} ± {printed[1]:.2g}.",
        f"{value:.4g} ± {half:.2g} in paper mode.",
        cause(printed, runs, metric),
    )


def cause(printed: tuple[float, float], runs: Runs, metric: str) -> str:
    """Which of the measured candidates would give the printed number: one rule changed, or the seed."""
    own = column(runs, metric)
    inside = min(own) - printed[1] <= printed[0] <= max(own) + printed[1]
    found = [f"our seeds ({len(runs)}) lie between {min(own):.4g} and {max(own):.4g}"]
    fitting = ["the spread over seeds"] if inside and len(runs) > 1 else []
    for rule, (name, factor) in CANDIDATES[metric].items():
        changed = [{name: factor * run[name]} for run in runs]
        found.append(f"{rule}: {mean_cell(column(changed, name))}")
        fitting += [rule] if agrees(printed, changed, name) else []
    verdict = (
        f"Would explain it: {' or '.join(fitting)}." if fitting else "None of what was varied explains it."
    )
    return f"{verdict} Measured: {'; '.join(found)}."


def _measured(values: dict[str, Any], key: str) -> list[Disagreement]:
    known, title = values["sets"][key], PROBLEMS[key].title
    found = [
        Disagreement(
            f"{title}: the prior is N(0, 9 I).",
            f"It misses the data with noise 3 by {known['mismatch_paper']:.3f} nats; a prior with the data's "
            f"variance by {known['mismatch_narrow']:.4f}, and at noise 10 by {known['mismatch']:.5f}.",
            "KL divergence from exact densities. It is part of every printed NLL, whatever the model.",
        )
    ]
    return found


MATCHED = "points at the level that the model is asked at"
PRIOR = "a prior of the right variance"
CANDIDATES: dict[str, dict[str, tuple[str, float]]] = {
    "asym": {MATCHED: ("asym_matched", 1.0)},
    "nasym": {
        MATCHED: ("nasym_matched", 1.0),
        "the ratio of means": ("nasym_pooled", 1.0),
        "no 1/2, as printed in Eq. A8": ("nasym", 2.0),
    },
    "score_error": {
        f"{MATCHED}, and the exact score there": ("score_error_matched", 1.0),
        "infinitely many kernels": ("score_error_limit", 1.0),
        "no 1/2, as printed": ("score_error", 2.0),
    },
    "nll": {PRIOR: ("nll_prior", 1.0)},
    "precision": {PRIOR: ("precision_prior", 1.0)},
    "recall": {PRIOR: ("recall_prior", 1.0)},
}
