"""Report: one self-contained HTML page from the files of an experiment or of training runs.

Only files cross into it: an experiment's ``metrics.json`` and the figures that it names, or what training
runs wrote (`curlfree.run_page`, which draws their figures). Nothing is computed here, so a report can be made
again anywhere, and the page that it makes needs neither network nor the folder: styles are inline and figures
are embedded, in a light and a dark version of which the reader's screen picks one.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from curlfree.experiments.records import FILE_NAME as RECORD
from curlfree.experiments.records import Cell, Page, Plot, Record

FILE_NAME = "report.html"
LARGEST_SVG = 400_000


@dataclass(frozen=True)
class Image:
    """A figure as data URIs.

    Args:
        plot: its texts.
        light: for light screens.
        dark: for dark ones.
    """

    plot: Plot
    light: str
    dark: str


def report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Make ``report.html`` of training runs, one or several side by side, or of one experiment.

    Args:
        folders: runs (each has a ``config.json``), or what one experiment wrote.
        out: where to write the page, and beside it the figures of runs; by default the first folder.

    Returns:
        The path of the page.

    Raises:
        ValueError: folders of another or of both kinds, none at all, or a file that is missing or damaged.
    """
    from curlfree.run_page import run_page

    if not folders:
        raise ValueError("report: expected the folder of a run or of `curlfree reproduce`, found none")
    runs = [folder for folder in folders if (folder / "config.json").is_file()]
    out = out or folders[0]
    if out.is_file():
        raise ValueError(f"{out}: expected a folder for the page, found a file; choose another --out")
    if len(runs) == len(folders):
        return write_page(run_page(runs, out), out, out / FILE_NAME)
    other = next(folder for folder in folders if folder not in runs)
    if not (other / RECORD).is_file():
        raise ValueError(
            f"{other}: expected a training run (config.json) or what `curlfree reproduce` wrote ({RECORD}), "
            f"found neither"
        )
    if len(folders) > 1:
        raise ValueError(
            f"{other}: expected training runs, or one folder of `curlfree reproduce` alone, found it among "
            f"{len(folders)} folders; make its page by itself"
        )
    return write_report(other, out)


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Make ``report.html`` from ``metrics.json`` and the figures in `folder`.

    Args:
        folder: what an experiment wrote.
        out: where to write the page; by default the same folder.

    Returns:
        The path of the page.

    Raises:
        ValueError: the record or a figure that it names is missing.
    """
    page = Record.load(folder).page
    out = out or folder
    out.mkdir(parents=True, exist_ok=True)
    return write_page(page, folder, out / FILE_NAME)


def write_page(page: Page, figures: Path, path: Path) -> Path:
    """Write a page as HTML.

    Args:
        page: what it shows.
        figures: the folder of its figures.
        path: the file to write.

    Returns:
        The file.

    Raises:
        ValueError: a figure is missing.
    """
    path.write_text(render(page, figures), encoding="utf-8")
    return path


def render(page: Page, folder: Path) -> str:
    """A page whose figures are in `folder`, as HTML.

    Raises:
        ValueError: a figure is missing.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("curlfree", "templates"), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["cell"] = format_cell
    images = [
        Image(plot, embed(folder, plot.name), embed(folder, f"{plot.name}.dark")) for plot in page.plots
    ]
    config = json.dumps(page.config, indent=1, ensure_ascii=False)
    return environment.get_template("report.html.j2").render(page=page, images=images, config=config)


def embed(folder: Path, stem: str) -> str:
    """A figure as a data URI: its SVG, or its PNG where the SVG is large.

    Raises:
        ValueError: the figure is missing.
    """
    svg, png = folder / f"{stem}.svg", folder / f"{stem}.png"
    for path in (svg, png):
        if not path.is_file():
            raise ValueError(
                f"the record names a figure {stem!r}, but {path} is missing; run the experiment again"
            )
    path, kind = (svg, "svg+xml") if svg.stat().st_size <= LARGEST_SVG else (png, "png")
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def format_cell(cell: Cell) -> str:
    """A table cell as text: four significant digits, a dash for what does not exist."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return str(cell)
