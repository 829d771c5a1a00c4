"""The page of training runs: one run, or several side by side, from their files alone.

The page holds what the runs' configurations differ in, where training got to, every metric with its standard
error, the number of samples behind it and how it was computed, and the figures of `curlfree.run_figures`.
What was not measured is "not run"; what does not exist for the data is a dash.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from curlfree.config import RunConfig, ToyData, encode, flatten
from curlfree.experiments.records import Cell, Page, Table
from curlfree.run_figures import Runs, asymmetry_rows, draw
from curlfree.run_record import Row, RunRecord, read_runs

METRICS = (
    "loss",
    "score_error",
    "nll",
    "asym",
    "nasym",
    "work_nats",
    "nfe",
    "fid",
    "kid",
    "inception_score",
    "precision",
    "recall",
)
OF_POINTS, OF_IMAGES = {"score_error"}, {"fid", "kid", "inception_score"}
# Parts of an entry that are numbers of their own.
PARTS = {
    "exact": "of the true density",
    "excess": "above the true density's",
    "probe_se": "the probes' part of se",
    "solver_error": "the solver's error",
}
NOT_RUN = "not run"


def run_page(folders: Sequence[Path], out: Path) -> Page:
    """Draw the figures of training runs into a folder, and say what their page shows.

    Args:
        folders: of the runs.
        out: the folder for the figures; made if missing.

    Returns:
        The page.

    Raises:
        FileNotFoundError: a folder is not a run's.
        ValueError: a run is given twice, or one of its files is damaged.
    """
    runs = read_runs(folders)
    out.mkdir(parents=True, exist_ok=True)
    names = [run.name for run in runs]
    configs = {run.name: encode(run.config) for run in runs}
    tables = [_training(runs), _metrics(runs)]
    if len(runs) > 1:
        tables.insert(0, _differences(runs))
    return Page(
        title=f"Training run{'s' if len(runs) > 1 else ''} {_listed(names)}",
        facts=f"curlfree report {' '.join(names)}",
        summary=[_sentence(run) for run in runs],
        tables=[*tables, _provenance(runs)],
        plots=draw(runs, out),
        disagreements=None,
        config=configs if len(runs) > 1 else configs[names[0]],
        provenance={},
        source="All numbers of this page are in the runs' config.json, log.jsonl and metrics.json.",
        methods=_methods(runs),
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _sentence(run: RunRecord) -> str:
    """Where training got to."""
    if not run.log.steps:
        return f"{run.name} ({run.config.name}): nothing logged yet."
    last, (trained, held_out) = run.log.steps[-1], asymmetry_rows(run)
    parts = [f"score matching {last['score_matching']:.4g} in training"]
    if run.log.held_out:
        parts.append(f"{run.log.held_out[-1]['held_out_score_matching']:.4g} held out")
    for rows, where in ((trained, "on penalised samples"), (held_out, "held out")):
        if rows and rows[-1]["nats"] is not None:
            parts.append(f"asymmetry {rows[-1]['nats']:.3g} nats {where}")
    start = f", from the weights of {Path(run.config.init).name}" if run.config.init else ""
    return (
        f"{run.name} ({run.config.name}{start}): {last['step']} of {run.config.train.steps} steps in "
        f"{last['seconds']:.3g} s; {', '.join(parts)}."
    )


def _differences(runs: Runs) -> Table:
    flat = [flatten(encode(run.config)) for run in runs]
    rows: list[list[Cell]] = []
    for key in sorted({key for entries in flat for key in entries}):
        values = [entries.get(key) for entries in flat]
        if any(value != values[0] for value in values):
            rows.append([key, *map(_setting, values)])
    note = "All other fields are equal; all are at the end." if rows else "The configurations are equal."
    return Table("What the runs differ in", ["field", *(run.name for run in runs)], rows, note)


def _setting(value: Any) -> Cell:
    return value if value is None or type(value) in (int, float, str) else json.dumps(value)


def _training(runs: Runs) -> Table:
    """Where training got to, as numbers."""

    def last(rows: Callable[[RunRecord], list[Row]], key: str) -> list[Cell]:
        return [
            next((row[key] for row in reversed(rows(run)) if row.get(key) is not None), None) for run in runs
        ]

    def steps(run: RunRecord) -> list[Row]:
        return run.log.steps

    def held_out(run: RunRecord) -> list[Row]:
        return run.log.held_out

    rows: list[list[Cell]] = [
        ["steps made", *last(steps, "step")],
        ["steps asked for", *(run.config.train.steps for run in runs)],
        ["samples per step", *(run.config.train.batch_size for run in runs)],
        ["seconds of training", *last(steps, "seconds")],
        ["steps per second, latest", *last(steps, "steps_per_second")],
        ["loss", *last(steps, "loss")],
        ["score matching", *last(steps, "score_matching")],
        ["score matching, held out", *last(held_out, "held_out_score_matching")],
        ["weighted penalty, without lambda", *last(steps, "qc")],
        ["asymmetry of penalised samples, nats", *last(lambda run: asymmetry_rows(run)[0], "nats")],
        ["asymmetry, held out, nats", *last(lambda run: asymmetry_rows(run)[1], "nats")],
        ["norm of the gradient", *last(steps, "grad_norm")],
    ]
    note = (
        "The latest line of log.jsonl that has the number: means over the steps since the line before. Held "
        "out: at the latest checkpoint, with the averaged weights. Asymmetries: rms over noise levels."
    )
    return Table("Training", ["", *(run.name for run in runs)], rows, note)


def _applies(name: str, config: RunConfig) -> bool:
    """Whether a metric exists for a run's data."""
    return name not in (OF_IMAGES if isinstance(config.data, ToyData) else OF_POINTS)


def _names(runs: Runs) -> list[str]:
    """The metrics that any of the runs has or could have, the usual ones first."""
    usual = [name for name in METRICS if any(_applies(name, run.config) for run in runs)]
    return list(dict.fromkeys([*usual, *(name for run in runs for name in run.metrics)]))


def _metrics(runs: Runs) -> Table:
    rows: list[list[Cell]] = []
    for name in _names(runs):
        entries = [run.metrics.get(name) for run in runs]
        unit = next((f", {entry['unit']}" for entry in entries if entry and "unit" in entry), "")
        absent = [NOT_RUN if _applies(name, run.config) else None for run in runs]
        rows.append([f"{name}{unit}", *(_value(e) if e else a for e, a in zip(entries, absent, strict=True))])
        for part, meaning in PARTS.items():
            values = [(entry or {}).get(part) for entry in entries]
            if any(value is not None for value in values):
                rows.append([f"{name}: {meaning}", *map(_value, values)])
    model = [f"{run.model['weights']}, step {run.model['step']}" if run.model else NOT_RUN for run in runs]
    note = (
        "Value ± standard error over images or points of one trained model, which says nothing about another "
        "seed; in brackets the number of them. How each was computed is said below."
    )
    columns = ["", *(run.name for run in runs)]
    return Table("Metrics", columns, [["weights measured", *model], *rows], note)


def _value(entry: Any) -> Cell:
    """A number, or a metric with its error and the number of samples."""
    if not isinstance(entry, dict):
        return entry if entry is None else float(entry)
    text = f"{entry['value']:.4g}"
    if entry.get("se") is not None:
        text += f" ± {entry['se']:.2g}"
    elif entry.get("ci") is not None:
        text += " [{:.4g}, {:.4g}]".format(*entry["ci"])
    return f"{text} ({entry['n']})"


def _methods(runs: Runs) -> list[tuple[str, str]]:
    """How each metric was computed; once where it was the same for all runs."""
    methods = []
    for name in _names(runs):
        how = {run.name: run.metrics[name]["how"] for run in runs if name in run.metrics}
        if len(set(how.values())) == 1:
            methods.append((name, next(iter(how.values()))))
        else:
            methods += [(f"{name} of {run}", text) for run, text in how.items()]
    return methods


def _provenance(runs: Runs) -> Table:
    rows: list[list[Cell]] = []
    latest = [flatten(run.log.starts[-1]) if run.log.starts else {} for run in runs]
    keys = list(dict.fromkeys(key for entries in latest for key in entries))
    for key in keys:
        values = [entries.get(key) for entries in latest]
        if any(value is not None for value in values):
            rows.append([key.removeprefix("versions.").removeprefix("hardware."), *map(_setting, values)])
    rows.append(["starts", *(len(run.log.starts) for run in runs)])
    note = "Software and hardware of each run's latest start."
    return Table("Provenance", ["", *(run.name for run in runs)], rows, note)
