"""The paper's experiments, each in one command: `reproduce("gaussian", out=Path("runs/gaussian"))`.

An experiment is a module with one entry, ``run(mode, seeds, quick, out) -> Record``. It computes, draws its
figures into `out` and returns a `Record`: what was asked, what came out (raw values and tables), how each
figure was computed and where the result disagrees with the paper. `reproduce` writes that record as
``metrics.json`` and the report beside it; the report is made from those files alone.

``mode="paper"`` is bug-compatible with the published numbers; ``mode="corrected"`` (the default) computes
the same and, beside it, what the experiment should have measured.
"""

from importlib import import_module
from pathlib import Path
from typing import Literal, get_args

from curlfree.experiments.records import Record

Mode = Literal["corrected", "paper"]
EXPERIMENTS = ("gaussian", "toy2d", "autoencoder")


def reproduce(
    experiment: str, *, out: Path, mode: Mode = "corrected", seeds: int | None = None, quick: bool = False
) -> Record:
    """Run one experiment and write ``metrics.json``, figures and ``report.html`` into `out`.

    Args:
        experiment: one of `EXPERIMENTS`.
        out: the folder to write into; made if missing.
        mode: the published constants ("paper"), or those and what should have been measured ("corrected").
        seeds: how many consecutive seeds to train; None takes the experiment's own number.
        quick: a small version for a first look; its numbers are not the paper's.

    Returns:
        The record that was written.

    Raises:
        ValueError: an unknown experiment or mode, or fewer than one seed.
    """
    if experiment not in EXPERIMENTS:
        raise ValueError(f"experiment must be one of {', '.join(EXPERIMENTS)}, got {experiment!r}")
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}; leave it out for the usual number")
    from curlfree.report import write_report

    out.mkdir(parents=True, exist_ok=True)
    run = import_module(f"curlfree.experiments.{experiment}").run
    record: Record = run(mode=mode, seeds=seeds, quick=quick, out=out)
    record.save(out)
    write_report(out)
    return record
