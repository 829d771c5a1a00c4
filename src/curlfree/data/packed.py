r"""The packed file: a whole data set in one file that is mapped into memory, never copied.

Layout, little-endian::

    0    8 bytes   b"CURLPACK"
    8    uint32    version of the format, 1
    12   uint32    length of the header L, so that 48 + L is a multiple of 4096
    16   32 bytes  SHA-256 of the header
    48   L bytes   header: JSON, padded with spaces
    ...            images: uint8, (N, H, W, C), in the order of the splits
    ...            zeros up to a multiple of 8, then labels: int64, (N,), -1 for none; the file ends here

The header names the shape, the splits as ranges of rows, the offset of the labels, the length and SHA-256 of
everything after it, the classes, the source, its licence note and how the images were resized. Images lie
channels last: the layout of every image reader and viewer, and a batch permuted to (N, C, H, W) is then in
the channels-last memory order that convolutions on tensor cores want.

Writing. `prepare` appends chunk after chunk to ``.NAME.partial`` beside the target, and after each one syncs
it and notes labels and running checksum in ``.NAME.partial.journal``; an interrupted run continues after the
last noted chunk. Only a complete, synced file is renamed to its final name.
"""

import fcntl
import hashlib
import importlib.util
import json
import math
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

import numpy as np

from curlfree.data.parts import Chunk, Source

MAGIC = b"CURLPACK"
VERSION = 1
_PREAMBLE = struct.Struct("<8sII32s")
_PAGE = 4096

Filter = Literal["box", "lanczos"]


@dataclass(frozen=True)
class Header:
    """What a packed file says about itself.

    Args:
        shape: (N, H, W, C).
        dtype: of the images, always uint8.
        splits: the rows [first, last) of each split.
        labels_offset: where the labels begin, in bytes from the images' first.
        payload_bytes: length of images, padding and labels.
        sha256: of these bytes.
        classes: names of the labels.
        source: what was packed.
        licence: a note on its terms of use.
        resized: "no", or filter and size.
    """

    shape: tuple[int, int, int, int]
    dtype: str
    splits: dict[str, tuple[int, int]]
    labels_offset: int
    payload_bytes: int
    sha256: str
    classes: tuple[str, ...]
    source: str
    licence: str
    resized: str


@dataclass(frozen=True)
class Packed:
    """An open packed file.

    Args:
        path: the file.
        header: what it says about itself.
        images: uint8 (N, H, W, C), a read-only memory map.
        labels: int64 (N,), -1 for none.
    """

    path: Path
    header: Header
    images: np.ndarray
    labels: np.ndarray

    def split(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The images and labels of one split.

        Raises:
            ValueError: where there is no such split.
        """
        if name not in self.header.splits:
            raise ValueError(f"{self.path} has the splits {list(self.header.splits)}, not {name!r}")
        first, last = self.header.splits[name]
        return self.images[first:last], self.labels[first:last]


def open_packed(path: str | Path, verify: bool = True) -> Packed:
    """Open a packed file.

    Args:
        path: the file.
        verify: read it all once and compare its checksum (about a second per gigabyte).

    Returns:
        The file with its images mapped into memory.

    Raises:
        ValueError: where it is no packed file, of another version, truncated or altered.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; make it with `curlfree prepare`")
    with open(path, "rb") as file:
        header, offset = _read_header(file, path)
        expected, found = offset + header.payload_bytes, os.fstat(file.fileno()).st_size
        if found != expected:
            raise ValueError(
                f"{path}: expected {expected} bytes, found {found}: truncated or altered; {_AGAIN}"
            )
        if verify:
            file.seek(offset)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != header.sha256:
                raise ValueError(f"{path}: sha256 {digest}, expected {header.sha256}: altered; {_AGAIN}")
    images = np.memmap(path, np.uint8, "r", offset, header.shape)
    labels = np.fromfile(path, "<i8", header.shape[0], offset=offset + header.labels_offset)
    return Packed(path, header, images, labels.astype(np.int64, copy=False))


_AGAIN = "make it again with `curlfree prepare`"


def _read_header(file: BinaryIO, path: Path) -> tuple[Header, int]:
    raw = file.read(_PREAMBLE.size)
    if len(raw) < _PREAMBLE.size or raw[:8] != MAGIC:
        raise ValueError(
            f"{path}: not a packed data file (it does not begin with {MAGIC.decode()}); {_AGAIN}"
        )
    _, version, length, digest = _PREAMBLE.unpack(raw)
    if version != VERSION:
        raise ValueError(f"{path}: format version {version}, this release reads version {VERSION}; {_AGAIN}")
    text = file.read(length)
    if len(text) != length or hashlib.sha256(text).digest() != digest:
        raise ValueError(f"{path}: the header is truncated or altered; {_AGAIN}")
    fields = json.loads(text)
    fields["shape"] = tuple(fields["shape"])
    fields["classes"] = tuple(fields["classes"])
    fields["splits"] = {name: (rows[0], rows[1]) for name, rows in fields["splits"].items()}
    return Header(**fields), _PREAMBLE.size + length


def prepare(
    source: Source,
    out: str | Path,
    *,
    size: int | None = None,
    resample: Filter = "box",
    overwrite: bool = False,
    progress: bool = False,
) -> Packed:
    """Pack a data set into one file; call it again to continue after an interruption.

    Args:
        source: an opened data set, for instance ``Cifar10(path).open()``.
        out: the file to make.
        size: resize the central square of each image to size x size; by default images keep their size.
        resample: how: box (area averages) or lanczos.
        overwrite: replace an existing file.
        progress: show a progress bar, if rich is installed.

    Returns:
        The new file, open.

    Raises:
        FileExistsError: where the file exists already.
        ValueError: where images differ in size and none was given, the data set is empty, or another process
            is preparing the same file.
    """
    out = Path(out)
    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} exists already: choose another name or allow it to be overwritten")
    if size is not None and size < 1:
        raise ValueError(f"size must be a positive number of pixels, got {size}")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    journal = out.with_name(f".{out.name}.partial.journal")
    with (
        open(journal, "a+") as notes,
        open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as payload,
    ):
        try:
            fcntl.flock(notes, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{out}: another process is preparing this file; let it finish") from error
        writer = _Writer(payload, notes, source, "no" if size is None else f"{resample} {size}")
        for chunk in _shown(source.chunks[len(writer.done) :], progress):
            images, labels = chunk.load()
            writer.add(chunk, fit(images, size, resample, chunk.key), labels)
        writer.finish()
        os.replace(partial, out)
        folder = os.open(out.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        journal.unlink()
    return open_packed(out, verify=False)


def fit(
    images: np.ndarray | Sequence[np.ndarray], size: int | None, resample: Filter, where: str
) -> np.ndarray:
    """Images of one chunk as one array, the central square of each resized to size x size if asked.

    Raises:
        ValueError: where no size is given and the images differ in shape.
    """
    if size is not None:
        images = [
            image if image.shape[:2] == (size, size) else _resize(image, size, resample) for image in images
        ]
    shapes = {image.shape for image in images}
    if len(shapes) > 1:
        raise ValueError(
            f"{where}: images of different shapes, {sorted(shapes)[:4]}; give a size to resize to"
        )
    return np.asarray(images)


def _resize(image: np.ndarray, size: int, resample: Filter) -> np.ndarray:
    from PIL import Image

    height, width, _ = image.shape
    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    box = (left, top, left + side, top + side)
    method = Image.Resampling[resample.upper()]
    bands = [Image.fromarray(np.ascontiguousarray(band)) for band in np.moveaxis(image, 2, 0)]
    return np.stack([np.asarray(band.resize((size, size), method, box)) for band in bands], axis=2)


def _shown(chunks: Sequence[Chunk], progress: bool) -> Iterable[Chunk]:
    if progress and importlib.util.find_spec("rich"):
        from rich.progress import track

        return track(chunks, "packing")
    return chunks


@dataclass(frozen=True)
class _Done:
    """A line of the journal: a chunk that is safely in the partial file."""

    split: str
    shape: list[int]
    labels: list[int]
    sha256: str


class _Writer:
    """The partial file and its journal: a line for the job, then one for each chunk that is safely there."""

    def __init__(self, payload: BinaryIO, notes: TextIO, source: Source, resized: str) -> None:
        self.payload, self.notes, self.source, self.resized = payload, notes, source, resized
        splits = [chunk.split for chunk in source.chunks]
        self.splits = list(dict.fromkeys(splits))
        if splits != [name for name in self.splits for _ in range(splits.count(name))]:
            raise ValueError(f"{source.name}: the chunks of a split must follow each other, found {splits}")
        unknown = dict.fromkeys(self.splits, (10**12, 10**12))
        length = len(self._json(unknown, (10**12,) * 4, 10**15, 10**15, "0" * 64))
        self.offset = -(-(_PREAMBLE.size + length) // _PAGE) * _PAGE
        keys = [[chunk.split, chunk.key] for chunk in source.chunks]
        job = [VERSION, self.offset, source.name, source.licence, source.classes, resized, keys]
        self.job = hashlib.sha256(json.dumps(job).encode()).hexdigest()
        self.hash = hashlib.sha256()
        self.done = self._recover()

    def _recover(self) -> list[_Done]:
        """What an interrupted run left and can be trusted; anything else is cut off."""
        self.notes.seek(0)
        job, *rest = self.notes.read().split("\n")[:-1] or [""]
        done = [_Done(**json.loads(line)) for line in rest] if job == self.job else []
        self.payload.seek(self.offset)
        for entry in done:
            self.hash.update(self.payload.read(math.prod(entry.shape)))
            if self.hash.hexdigest() != entry.sha256:
                done, self.hash = [], hashlib.sha256()
                break
        self.payload.truncate(self.offset + sum(math.prod(entry.shape) for entry in done))
        self.payload.seek(0, os.SEEK_END)
        self.notes.truncate(0)
        self.notes.write("\n".join([self.job, *(json.dumps(asdict(entry)) for entry in done), ""]))
        self._sync(self.notes)
        return done

    def add(self, chunk: Chunk, images: np.ndarray, labels: np.ndarray) -> None:
        """Append a chunk."""
        where = f"{self.source.name}: {chunk.key}"
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 2, 3, 4):
            raise ValueError(
                f"{where}: expected uint8 images (N, H, W, C), found {images.dtype} {images.shape}"
            )
        if labels.shape != (len(images),):
            raise ValueError(f"{where}: {len(images)} images but labels of shape {labels.shape}")
        if self.done and tuple(self.done[0].shape[1:]) != images.shape[1:]:
            raise ValueError(
                f"{where}: images of shape {images.shape[1:]}, but {tuple(self.done[0].shape[1:])} before; "
                "give a size to resize to"
            )
        raw = np.ascontiguousarray(images).data
        self.hash.update(raw)
        self.payload.write(raw)
        self._sync(self.payload)
        entry = _Done(chunk.split, list(images.shape), labels.tolist(), self.hash.hexdigest())
        self.notes.write(json.dumps(asdict(entry)) + "\n")
        self._sync(self.notes)
        self.done.append(entry)

    def finish(self) -> None:
        """Write labels and header."""
        count = sum(entry.shape[0] for entry in self.done)
        if count == 0:
            raise ValueError(f"{self.source.name}: no images found")
        shape = (count, *self.done[0].shape[1:])
        splits, first = {}, 0
        for name in self.splits:
            last = first + sum(entry.shape[0] for entry in self.done if entry.split == name)
            if last - first != self.source.counts.get(name, last - first):
                raise ValueError(
                    f"{self.source.name}: {last - first} {name} images, the published data set has "
                    f"{self.source.counts[name]}; accept them with --unverified"
                )
            splits[name], first = (first, last), last
        labels_offset = -(-math.prod(shape) // 8) * 8
        labels = np.concatenate([np.array(entry.labels, "<i8") for entry in self.done])
        tail = bytes(labels_offset - math.prod(shape)) + labels.tobytes()
        self.hash.update(tail)
        self.payload.write(tail)
        payload_bytes = labels_offset + labels.nbytes
        text = self._json(splits, shape, labels_offset, payload_bytes, self.hash.hexdigest())
        text = text.ljust(self.offset - _PREAMBLE.size)
        self.payload.seek(0)
        self.payload.write(_PREAMBLE.pack(MAGIC, VERSION, len(text), hashlib.sha256(text).digest()) + text)
        self._sync(self.payload)

    def _json(
        self,
        splits: dict[str, tuple[int, int]],
        shape: tuple[int, ...],
        labels_offset: int,
        payload_bytes: int,
        sha256: str,
    ) -> bytes:
        header = {
            "shape": shape,
            "dtype": "uint8",
            "splits": splits,
            "labels_offset": labels_offset,
            "payload_bytes": payload_bytes,
            "sha256": sha256,
            "classes": self.source.classes,
            "source": self.source.name,
            "licence": self.source.licence,
            "resized": self.resized,
        }
        return json.dumps(header, indent=1).encode()

    @staticmethod
    def _sync(file: BinaryIO | TextIO) -> None:
        file.flush()
        os.fsync(file.fileno())
