"""What a reader of a data set hands over: a `Source` made of `Chunk`s that load one at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Loaded = tuple[np.ndarray | Sequence[np.ndarray], np.ndarray]
"""Images, uint8, one array (N, H, W, C) or a sequence of (H, W, C), and labels, int64 (N,), -1 for none."""


@dataclass(frozen=True)
class Chunk:
    """A piece of a data set that is loaded, packed and checkpointed as a whole.

    Args:
        split: the split to which its images belong.
        key: identifies the content (paths, sizes, times, ranges): a resumed `prepare` compares it.
        load: reads the images and labels.
    """

    split: str
    key: str
    load: Callable[[], Loaded]


@dataclass(frozen=True)
class Source:
    """A data set that is ready to be read.

    Args:
        name: what it is and where it comes from, with authors and year.
        licence: a note on its terms of use.
        classes: the names of the labels 0, 1, ...; empty where unknown.
        chunks: in order, those of one split together.
    """

    name: str
    licence: str
    classes: tuple[str, ...]
    chunks: tuple[Chunk, ...]


def file_key(path: Path, detail: str = "") -> str:
    """Identifies a file's content cheaply: name, size and time of change."""
    status = path.stat()
    return f"{path.name} {status.st_size} {status.st_mtime_ns} {detail}".rstrip()


def planes_to_nhwc(rows: np.ndarray, where: str, side: int = 32) -> np.ndarray:
    """Rows of 3 * side^2 bytes, red plane first (the CIFAR layout), as (N, side, side, 3).

    Raises:
        ValueError: where the rows are not uint8 of that length.
    """
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3 * side * side:
        raise ValueError(
            f"{where}: expected images as uint8 rows of {3 * side * side}, found {rows.dtype} {rows.shape}"
        )
    return np.ascontiguousarray(rows.reshape(-1, 3, side, side).transpose(0, 2, 3, 1))


def checked_labels(labels: Sequence[int] | np.ndarray, count: int, classes: int, where: str) -> np.ndarray:
    """Labels as int64 (count,), all in [0, classes).

    Raises:
        ValueError: where their number or range is wrong.
    """
    values = np.asarray(labels)
    if values.shape != (count,) or values.dtype.kind not in "iu":
        raise ValueError(
            f"{where}: expected {count} whole-number labels, found {values.dtype} {values.shape}"
        )
    values = values.astype(np.int64)
    if count and not (0 <= values.min() and values.max() < classes):
        raise ValueError(
            f"{where}: expected labels in [0, {classes}), found {values.min()} to {values.max()}"
        )
    return values
