"""What the files of a training run say, for its report: configuration, log, metrics and samples.

Only files are read, no checkpoint and no data, so that a run can be reported on while it goes on, or where
nothing of it but these files is. The log holds rates: the seconds of a line are the sum of steps / rate over
the lines before it, of training itself, without the time between two starts.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from curlfree.config import RunConfig, load_config

Row = dict[str, Any]
CONFIG, LOG, METRICS = "config.json", "log.jsonl", "metrics.json"
_TRAINED = {"loss", "score_matching", "grad_norm", "lr", "levels", "steps_per_second"}


@dataclass(frozen=True)
class Log:
    """The lines of a log by what they tell.

    Args:
        steps: means over the steps since the line before, with "seconds".
        held_out: what was measured at checkpoints, with "seconds".
        starts: the provenance of each start.
    """

    steps: list[Row]
    held_out: list[Row]
    starts: list[Row]


@dataclass(frozen=True)
class Drawn:
    """Samples that were drawn from a run.

    Args:
        folder: with ``grid.png`` and ``samples.npz``.
        about: their ``samples.json``.
    """

    folder: Path
    about: Row

    def points(self) -> np.ndarray:
        """Points (N, D), or images (N, H, W, C).

        Raises:
            ValueError: the file is missing or damaged.
        """
        path = self.folder / "samples.npz"
        try:
            with np.load(path) as arrays:
                return np.asarray(arrays["x"])
        except Exception as error:  # a damaged archive may raise anything
            raise ValueError(
                f"{path}: expected samples ({error}); draw them with `curlfree sample`"
            ) from error


@dataclass(frozen=True)
class RunRecord:
    """A training run as its files tell it.

    Args:
        name: in the report.
        folder: of the run.
        config: of the run.
        log: what `log.jsonl` holds.
        model: the weights that were measured; None if nothing was.
        metrics: of the evaluation, by name.
        samples: all that were drawn into the run's folder.
    """

    name: str
    folder: Path
    config: RunConfig
    log: Log
    model: Row | None
    metrics: dict[str, Row]
    samples: list[Drawn]


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Runs, named by their folders.

    Raises:
        FileNotFoundError: a folder has no ``config.json``.
        ValueError: a folder is given twice, or a file is damaged.
    """
    places = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"{folder}: expected each run once, found it {places.count(place)} times")
    names = [place.name for place in places]
    unique = len(set(names)) == len(names)
    return [
        read_run(folder, name if unique else str(folder)) for folder, name in zip(folders, names, strict=True)
    ]


def read_run(folder: Path, name: str) -> RunRecord:
    """A run from its files; what was not logged, measured or drawn is empty.

    Raises:
        FileNotFoundError: there is no ``config.json``.
        ValueError: a file is damaged.
    """
    config = load_config(folder / CONFIG)
    model, metrics = read_metrics(folder / METRICS)
    drawn = [Drawn(path.parent, _json(path)) for path in sorted(folder.glob("samples/*/samples.json"))]
    return RunRecord(name, folder, config, read_log(folder / LOG), model, metrics, drawn)


def read_log(path: Path) -> Log:
    """A log; empty if there is none yet. A last line that is being written is left out.

    Raises:
        ValueError: a line is damaged.
    """
    log = Log([], [], [])
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, seconds = 0, 0.0
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            row = json.loads(line)
            step = row["step"]
            if "provenance" in row:
                log.starts.append(row["provenance"])
                before = step
            elif "held_out_score_matching" in row:
                log.held_out.append(row)
            else:
                if absent := sorted(_TRAINED - row.keys()):
                    raise ValueError(f"no {absent[0]!r}")
                seconds += (step - before) / row["steps_per_second"]
                before = step
                log.steps.append({**row, "seconds": seconds})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: line {number}: expected a line of a run's log ({error!r})") from error
    steps, times = ([0, *(row[key] for row in log.steps)] for key in ("step", "seconds"))
    for row in log.held_out:
        row["seconds"] = float(np.interp(row["step"], steps, times))
    return log


def read_metrics(path: Path) -> tuple[Row | None, dict[str, Row]]:
    """The weights that an evaluation measured and its metrics; None and nothing if there was none.

    Raises:
        ValueError: the file is damaged, or another kind of file.
    """
    if not path.is_file():
        return None, {}
    found = _json(path)
    model, metrics = found.get("model"), found.get("metrics")
    if not isinstance(model, dict) or not isinstance(metrics, dict):
        raise ValueError(f'{path}: expected {{"model", "metrics"}} as `curlfree evaluate` writes it')
    for name, metric in metrics.items():
        if not isinstance(metric, dict) or not {"value", "n", "how"} <= metric.keys():
            raise ValueError(f'{path}: {name}: expected "value", "n" and "how"; evaluate the run again')
    return model, metrics


def _json(path: Path) -> Row:
    """A JSON object.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON ({error}); make it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(found).__name__}; make it again")
    return found
