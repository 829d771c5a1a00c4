"""Report: one self-contained HTML page from the record and the figures in a folder.

Only files cross into it: ``metrics.json`` and the figures that it names. Nothing is computed here, so a
report can be made again anywhere, and the page that it makes needs neither network nor the folder: styles are
inline and figures are embedded, in a light and a dark version of which the reader's screen picks one. The
page of training runs is put together by `curlfree.run_page`.
"""

import base64
import json
from dataclasses import dataclass
from pathlib import Path

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


def write_report(folder: Path) -> Path:
    """Make ``report.html`` from ``metrics.json`` and the figures in `folder`.

    Args:
        folder: what an experiment wrote.

    Returns:
        The path of the page.

    Raises:
        ValueError: the record or a figure that it names is missing.
    """
    return write_page(Record.load(folder).page, folder, folder / FILE_NAME)


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
