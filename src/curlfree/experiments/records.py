"""Records: what an experiment hands to its report, as plain data that survives a JSON file.

A `Record` holds everything that the report shows, so that a report can be made again, or compared, without
running anything. Numbers are stored as computed; a value that does not exist (a time never reached) is None,
because JSON has no infinity. A `Page` is what a report shows, of an experiment or of training runs.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

FILE_NAME = "metrics.json"
Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """A table of the report.

    Args:
        title: what it shows.
        columns: the heads; the first column labels the rows.
        rows: cells, as many in each row as there are columns; None is shown as a dash.
        note: how the numbers were computed.
    """

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse rows of another length than the heads.

        Raises:
            ValueError: a row has too few or too many cells.
        """
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r} has {len(self.columns)} columns, got {len(row)} cells: {row}"
                )


@dataclass(frozen=True)
class Plot:
    """A figure of the report, stored beside it as ``NAME.svg`` and ``NAME.png`` (and dark versions).

    Args:
        name: the file name without its ending.
        title: what it shows, in a few words; also the text alternative.
        caption: what to see in it.
        how: how it was computed.
        wide: several panels, which a narrow screen scrolls; otherwise it is fitted to the screen.
    """

    name: str
    title: str
    caption: str
    how: str
    wide: bool = True


@dataclass(frozen=True)
class Disagreement:
    """A point where the result and the paper differ.

    Args:
        paper: what the paper says.
        ours: what came out here.
        why: the cause, as far as it was measured.
    """

    paper: str
    ours: str
    why: str


@dataclass(frozen=True)
class Page:
    """What a report shows.

    Args:
        title: the heading.
        facts: how the page came about, in a line.
        summary: what came out, a few sentences.
        tables: the tables.
        plots: the figures, which lie in a folder.
        disagreements: where it differs from the paper, and why; None where there is nothing to compare.
        config: every constant.
        provenance: software, commit and hardware (`curlfree.provenance`).
        source: which files hold the numbers.
        methods: how numbers were computed whose table cannot hold it: what, and how.
    """

    title: str
    facts: str
    summary: list[str]
    tables: list[Table]
    plots: list[Plot]
    disagreements: list[Disagreement] | None
    config: dict[str, Any]
    provenance: dict[str, Any]
    source: str
    methods: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Record:
    """One run of one experiment.

    Args:
        experiment: its name.
        title: the heading of its report.
        mode: "paper" or "corrected".
        quick: whether it was the small version.
        summary: what came out, a few sentences.
        config: every constant of the run.
        seeds: the training seeds.
        values: the raw values, plain JSON.
        tables: the tables of the report.
        plots: the figures of the report.
        disagreements: where it differs from the paper, and why.
        provenance: software, commit and hardware (`curlfree.provenance`).
    """

    experiment: str
    title: str
    mode: str
    quick: bool
    summary: list[str]
    config: dict[str, Any]
    seeds: list[int]
    values: dict[str, Any]
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    disagreements: list[Disagreement] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def page(self) -> Page:
        """What its report shows."""
        small = " --quick (a small version: its numbers are not the paper's)" if self.quick else ""
        seeds = f" · {len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}" if self.seeds else ""
        return Page(
            title=self.title,
            facts=f"curlfree reproduce {self.experiment} --mode {self.mode}{small}{seeds}",
            summary=self.summary,
            tables=self.tables,
            plots=self.plots,
            disagreements=self.disagreements,
            config=self.config,
            provenance=self.provenance,
            source=f"All numbers of this page, and the raw values behind them, are in {FILE_NAME} beside it.",
        )

    def save(self, folder: Path) -> Path:
        """Write the record as ``metrics.json`` into `folder`, whole or not at all.

        Raises:
            ValueError: a number is NaN or infinite.
        """
        text = json.dumps(asdict(self), indent=1, allow_nan=False)
        path = folder / FILE_NAME
        part = path.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
        return path

    @classmethod
    def load(cls, folder: Path) -> "Record":
        """Read the record of a folder.

        Raises:
            ValueError: the folder holds no record, or another kind of file.
        """
        path = folder / FILE_NAME
        if not path.is_file():
            raise ValueError(f"expected a record at {path}, found none; make one with `curlfree reproduce`")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            tables = [Table(**table) for table in data.pop("tables")]
            plots = [Plot(**plot) for plot in data.pop("plots")]
            disagreements = [Disagreement(**item) for item in data.pop("disagreements")]
            return cls(tables=tables, plots=plots, disagreements=disagreements, **data)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is not the record of an experiment ({error!r}); run it again"
            ) from error


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds and the half-width of its 95 % interval (Student's t).

    Raises:
        ValueError: fewer than two values: there is no interval.
    """
    from scipy.stats import t

    if len(values) < 2:
        raise ValueError(f"an interval over seeds needs at least two of them, got {len(values)}")
    error = stdev(values) / math.sqrt(len(values))
    return fmean(values), float(t.ppf(0.975, len(values) - 1)) * error


def mean_cell(values: Sequence[float]) -> str:
    """The mean over seeds with its 95 % interval, as text for a table; alone where all values are equal."""
    if len(set(values)) == 1:
        return f"{values[0]:.3g}"
    mean, half = mean_interval(values)
    return f"{mean:.3g} ± {half:.1g}"
