"""What a reader of a data set hands over: a `Source` made of `Chunk`s that load one at a time."""

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        counts: how many images each split has as published; nothing else is packed under that name.
    """

    name: str
    licence: str
    classes: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    counts: dict[str, int] = field(default_factory=dict)


def file_key(path: Path, detail: str = "") -> str:
    """Identifies a file's content cheaply: name, size and time of change."""
    status = path.stat()
    return f"{path.name} {status.st_size} {status.st_mtime_ns} {detail}".rstrip()


def check_md5(found: str, published: str, where: str) -> None:
    """Compare checksums.

    Raises:
        ValueError: where they differ.
    """
    if found != published:
        raise ValueError(
            f"{where}: md5 {found}, but the published file has {published}; download it again, "
            "or accept other files of the same format with --unverified"
        )


def load_npz(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of an `.npz` file.

    Raises:
        ValueError: where it is damaged or holds Python objects.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, OSError, EOFError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a readable .npz file: {error}") from error


def planes_to_nhwc(rows: np.ndarray, where: str, side: int = 32) -> np.ndarray:
    """Rows of 3 * side^2 bytes, red plane first (the CIFAR layout), as (N, side, side, 3).

    Raises:
        ValueError: where the rows are not uint8 of that length.
    """
    rows = np.asarray(rows)
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3 * side * side:
        raise ValueError(
            f"{where}: expected images as uint8 rows of {3 * side * side}, found {rows.dtype} {rows.shape}"
        )
    return np.ascontiguousarray(rows.reshape(-1, 3, side, side).transpose(0, 2, 3, 1))


def checked_labels(
    labels: Sequence[int] | np.ndarray, count: int, classes: int, where: str, *, first: int = 0
) -> np.ndarray:
    """Labels as int64 (count,), all in [first, first + classes).

    Raises:
        ValueError: where their number or range is wrong.
    """
    values = np.asarray(labels)
    if values.shape != (count,) or values.dtype.kind not in "iu":
        raise ValueError(
            f"{where}: expected {count} whole-number labels, found {values.dtype} {values.shape}"
        )
    values = values.astype(np.int64)
    if count and not (first <= values.min() and values.max() < first + classes):
        raise ValueError(
            f"{where}: expected labels in [{first}, {first + classes}), "
            f"found {values.min()} to {values.max()}"
        )
    return values
