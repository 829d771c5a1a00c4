"""Figures: the few plots that the experiments need, on plain matplotlib axes.

A figure is drawn by a function of a `Theme`; `save` calls it for the light and the dark one and writes SVG
and PNG of both, so that a report can show the one that the reader's screen asks for. Only
`matplotlib.figure.Figure` is used, never pyplot: nothing is kept between figures and no display is needed.

Rotation density is that of Eq. 8, ``ROT_12 = ds_1/dx_2 - ds_2/dx_1``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from numpy.typing import ArrayLike

INCH_PIXELS = 150


@dataclass(frozen=True)
class Theme:
    """Colours of a figure.

    Args:
        name: "light" or "dark".
        ink: text and axes.
        paper: background.
        faint: grid lines and arrows.
        cycle: colours of the data, told apart by readers with colour blindness (Okabe and Ito, 2008).
        density: name of the colour map for counts.
        span: the part of a colour map from dark to bright that can be seen on the background.
    """

    name: str
    ink: str
    paper: str
    faint: str
    cycle: tuple[str, ...]
    density: str
    span: tuple[float, float]

    def color(self, index: int) -> str:
        """The index-th data colour."""
        return self.cycle[index % len(self.cycle)]

    @property
    def diverging(self) -> LinearSegmentedColormap:
        """The colour map for signed values: the background in the middle."""
        return LinearSegmentedColormap.from_list("signed", [self.cycle[0], self.paper, self.cycle[1]])

    @property
    def sequential(self) -> LinearSegmentedColormap:
        """The colour map for lines in an order, such as noise levels."""
        colors = matplotlib.colormaps["viridis"](np.linspace(*self.span, 64))
        return LinearSegmentedColormap.from_list("ordered", [tuple(color) for color in colors])


LIGHT = Theme(
    name="light",
    ink="#24292f",
    paper="#ffffff",
    faint="#a5adb6",
    cycle=("#0072b2", "#d55e00", "#009e73", "#aa3377", "#8a6d00", "#4a90c4", "#555555"),
    density="Blues",
    span=(0.0, 0.85),
)
DARK = Theme(
    name="dark",
    ink="#e6edf3",
    paper="#15191e",
    faint="#5d6772",
    cycle=("#56b4e9", "#ff8c42", "#2fd3a2", "#e58bc0", "#f0e442", "#9ecbff", "#bbbbbb"),
    density="cividis",
    span=(0.3, 1.0),
)
Draw = Callable[[Theme], Figure]


def save(draw: Draw, folder: Path, name: str) -> list[Path]:
    """Write a figure as ``NAME.svg`` and ``NAME.png``, and for dark screens ``NAME.dark.svg`` and ``.png``.

    Args:
        draw: makes the figure in the colours of a theme.
        folder: where to write.
        name: the files' name without ending.

    Returns:
        The paths written.
    """
    paths = []
    for theme, stem in ((LIGHT, name), (DARK, f"{name}.dark")):
        with matplotlib.rc_context(_settings(theme, name)):
            figure = draw(theme)
            for path in (folder / f"{stem}.svg", folder / f"{stem}.png"):
                metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
                figure.savefig(path, dpi=INCH_PIXELS, metadata=metadata)
                paths.append(path)
    return paths


def _settings(theme: Theme, salt: str) -> dict[Any, Any]:
    ink = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), theme.ink
    )
    paper = dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), theme.paper)
    return {
        **ink,
        **paper,
        "grid.color": theme.faint,
        "grid.alpha": 0.35,
        "axes.prop_cycle": cycler(color=theme.cycle),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "font.size": 9,
        "legend.frameon": False,
        "lines.linewidth": 1.5,
        "svg.hashsalt": salt,
    }


def panels(rows: int, columns: int, *, width: float = 3.2, height: float = 2.6) -> tuple[Figure, list[Axes]]:
    """A figure of rows x columns panels, each of width x height inches, as a flat list of axes."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def plane(axes: Axes, extent: float, title: str = "") -> None:
    """Turn axes into the square [-extent, extent]^2 of the plane."""
    axes.set(xlim=(-extent, extent), ylim=(-extent, extent), aspect="equal", title=title)
    axes.locator_params(nbins=5)


def vector_field(axes: Axes, theme: Theme, points: ArrayLike, vectors: ArrayLike) -> None:
    """Arrows at points, shape (N, 2), scaled by the longest of them (the convention of Fig. 1)."""
    x, v = np.asarray(points), np.asarray(vectors)
    longest = np.linalg.norm(v, axis=1).max()
    v = v / (longest if longest > 0 else 1.0)
    axes.quiver(*x.T, *v.T, color=theme.faint, angles="xy", scale=14, width=0.006, rasterized=len(x) > 2000)


def rotation_density(
    axes: Axes,
    theme: Theme,
    x1: ArrayLike,
    x2: ArrayLike,
    rotation: ArrayLike,
    *,
    limit: float | None = None,
) -> None:
    """A map of signed rotation density (Eq. 8), zero in the middle of the colour map, with its scale.

    Args:
        axes: where to draw.
        theme: the colours.
        x1: grid coordinates, shape (N,).
        x2: grid coordinates, shape (M,).
        rotation: values, shape (M, N).
        limit: the value of the strongest colours; by default the largest one.
    """
    values = np.asarray(rotation)
    limit = limit or float(np.abs(values).max()) or 1.0
    mesh = axes.pcolormesh(
        x1, x2, values, cmap=theme.diverging, vmin=-limit, vmax=limit, shading="gouraud", rasterized=True
    )
    _figure(axes).colorbar(mesh, ax=axes, shrink=0.8)


def trajectories(axes: Axes, theme: Theme, paths: ArrayLike, *, color: int = 0, markers: bool = True) -> None:
    """Paths of shape (T, N, 2): a line for each of N points, a ring at its start.

    Args:
        axes: where to draw.
        theme: the colours.
        paths: positions at T times; NaN ends a path.
        color: which data colour.
        markers: a dot at every time, for discrete steps.
    """
    x = np.asarray(paths)
    marker = "." if markers else ""
    weight = min(1.0, 4 / len(x) ** 0.5)  # many steps would cover the field
    axes.plot(x[..., 0], x[..., 1], color=theme.color(color), lw=0.8 * weight, ms=3 * weight, marker=marker)
    axes.plot(x[0, :, 0], x[0, :, 1], "o", mfc="none", mec=theme.color(color), ms=4, mew=0.8)


def samples(axes: Axes, theme: Theme, points: ArrayLike, *, extent: float, bins: int = 120) -> None:
    """A density map of points of shape (N, 2)."""
    x = np.asarray(points)
    edges = np.linspace(-extent, extent, bins + 1)
    counts, _, _ = np.histogram2d(x[:, 0], x[:, 1], bins=(edges, edges))
    shown = np.ma.masked_equal(counts.T, 0)
    axes.pcolormesh(edges, edges, shown, cmap=theme.density, vmin=-0.2 * counts.max(), rasterized=True)
    plane(axes, extent)


def curve(
    axes: Axes,
    theme: Theme,
    x: ArrayLike,
    y: ArrayLike,
    *,
    color: int = 0,
    label: str | None = None,
    band: tuple[ArrayLike, ArrayLike] | None = None,
    **style: Any,
) -> None:
    """A curve, and a band between a lower and an upper curve around it."""
    axes.plot(x, y, color=theme.color(color), label=label, **style)
    if band is not None:
        axes.fill_between(x, *band, color=theme.color(color), alpha=0.22, lw=0)


def log_scale(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers, if any curve has a positive value."""
    drawn = [np.asarray(line.get_ydata(), float) for line in axes.lines]
    if any((values > 0).any() for values in drawn):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_Plain())
        axes.yaxis.set_minor_formatter(_Plain(labelOnlyBase=False, minor_thresholds=(1.2, 0.5)))


class _Plain(LogFormatter):
    """Labels such as 0.3 and 500, where the axis has room for them."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def picture(image: ArrayLike, title: str, *, width: float = 3.6) -> Figure:
    """An image of shape (H, W) or (H, W, 3), each pixel a sharp square, below a title.

    Args:
        image: grey values or colours, uint8.
        title: above it.
        width: in inches.
    """
    pixels = np.asarray(image)
    figure, (axes,) = panels(1, 1, width=width, height=width * pixels.shape[0] / pixels.shape[1] + 0.2)
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="none")
    axes.set_title(title)
    axes.set_axis_off()
    return figure


def strip(axes: Axes, theme: Theme, groups: Sequence[ArrayLike], labels: Sequence[str]) -> None:
    """Every value of each group as a dot, the groups side by side: for distributions over seeds."""
    for index, group in enumerate(groups):
        values = np.asarray(group)
        spread = (np.arange(len(values)) % 9 - 4) * 0.04
        axes.plot(index + spread, values, "o", color=theme.color(index), ms=3, alpha=0.7, mew=0)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.5, len(labels) - 0.5)


def _figure(axes: Axes) -> Figure:
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure
