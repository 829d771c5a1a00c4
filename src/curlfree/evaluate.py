"""Evaluation of a run: every metric with its standard error and how it was computed, in ``metrics.json``.

The file holds ``{"model": {...}, "metrics": {NAME: {"value", "se", "n", "how", ...}}}``. Metrics of an
earlier evaluation of the same weights stay. What is measured and how: `curlfree.measures`.
"""

import json
from typing import Any

from curlfree.evaluation import EvaluateConfig, Evaluation, Metric, open_data
from curlfree.measures import METRICS
from curlfree.pieces import ALONE, write_json
from curlfree.runs import Run
from curlfree.sample import identity
from curlfree.workers import Workers

__all__ = ["EvaluateConfig", "evaluate"]


def evaluate(
    run: Run, config: EvaluateConfig, *, team: Workers = ALONE, progress: bool = False
) -> dict[str, Metric]:
    """Measure a run and write ``metrics.json`` into its folder.

    Args:
        run: the trained field, with averaged or raw weights (`curlfree.runs.load_run`).
        config: what to measure.
        team: this process' place among those that share the work (and the file system).
        progress: show progress bars.

    Returns:
        The metrics by name, each with "value", "se", "n" and "how"; in rank 0 only.

    Raises:
        ValueError: the data or the reference features are missing or damaged, or a metric does not apply.
        ArithmeticError: the field's value was not finite, or the ODE's step too small.
    """
    data = open_data(run, split=config.split, n=max(config.n, config.audit_n), seed=config.seed)
    model = identity(run)
    task = Evaluation(run, config, data, model, team, progress)
    metrics = _earlier(run, model)
    for name in config.metrics or _applicable(task):
        summary = METRICS[name](task)
        if team.rank == 0:
            metrics.update(summary())
            write_json(run.folder / "metrics.json", {"model": model, "metrics": metrics})
    return metrics


def _applicable(task: Evaluation) -> list[str]:
    absent = {"score-error"} if task.data.distribution is None else set()
    if task.data.distribution is None and task.config.features is None:
        absent.add("samples")
    return [name for name in METRICS if name not in absent]


def _earlier(run: Run, model: dict[str, Any]) -> dict[str, Metric]:
    """What was measured before with the same weights."""
    path = run.folder / "metrics.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found["metrics"]) if found["model"] == model else {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected the metrics of an evaluation ({error}); move it away") from error
