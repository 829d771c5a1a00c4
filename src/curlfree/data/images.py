"""Anyone's own images: folders, numpy files, Hugging Face data sets."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from curlfree.data.parts import Chunk, Loaded, Source, file_key, load_npz

if TYPE_CHECKING:
    from PIL.Image import Image

Mode = Literal["RGB", "L"]
SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
_PER_CHUNK = 2000
_MAX_16 = 2**16 - 1


@dataclass(frozen=True)
class ImageFolder:
    """A folder of images; its subfolders are the classes.

    Where the folder holds the folders `train` and one of `test`, `val` or `valid`, those are the splits.
    Subfolders of a split are its classes; images of a split without subfolders have no labels.

    Args:
        path: the folder.
        mode: RGB or L (grey). Transparency is dropped, the orientation that cameras note is applied, 16-bit
            grey is scaled to 8.
        licence: a note on the terms of use, kept in the packed file.
    """

    path: Path
    mode: Mode = "RGB"
    licence: str = "unknown"

    def open(self) -> Source:
        """List the images.

        Raises:
            ValueError: where there is none.
        """
        root = Path(self.path)
        if not root.is_dir():
            raise ValueError(f"{root}: no such folder")
        splits = [root / name for name in ("train", "val", "valid", "test") if (root / name).is_dir()]
        named = len(splits) > 1 and splits[0].name == "train"
        folders = {folder.name: folder for folder in splits} if named else {"train": root}
        classes = sorted(
            {path.name for folder in folders.values() for path in folder.iterdir() if path.is_dir()}
        )
        number = {name: i for i, name in enumerate(classes)}
        chunks: list[Chunk] = []
        for split, folder in folders.items():
            files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
            if not files:
                raise ValueError(f"{folder}: expected images ({' '.join(sorted(SUFFIXES))}), found none")
            labels = [number.get(path.relative_to(folder).parts[0], -1) for path in files]
            chunks += image_chunks(split, files, labels, self.mode)
        return Source(
            f"images in the folder {root.resolve().name}", self.licence, tuple(classes), tuple(chunks)
        )


@dataclass(frozen=True)
class ArrayFile:
    """Images in a numpy file: `.npy`, or `.npz` with images and perhaps labels.

    An `.npz` holds `images` (or `x`, `data`, `arr_0`) and perhaps `labels` (or `y`); for splits, `x_train`,
    `y_train`, `x_test`, `y_test`. Images are uint8, (N, H, W) or (N, H, W, C); MNIST is often kept like this.

    Args:
        path: the file.
        licence: a note on the terms of use, kept in the packed file.
    """

    path: Path
    licence: str = "unknown"

    def open(self) -> Source:
        """Find the arrays.

        Raises:
            ValueError: where the file is missing or holds no images under a known name.
        """
        path = Path(self.path)
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        if path.suffix == ".npy":
            splits: dict[str, tuple[str, str | None]] = {"train": ("", None)}
        else:
            names = set(load_npz(path))
            pairs = [("train", "x_train", "y_train"), ("test", "x_test", "y_test")]
            splits = {split: (x, y if y in names else None) for split, x, y in pairs if x in names}
            if not splits:
                found = [name for name in ("images", "x", "data", "arr_0") if name in names]
                if not found:
                    raise ValueError(
                        f"{path}: expected an entry 'images' or 'x_train', found {sorted(names)}"
                    )
                splits = {"train": (found[0], next((y for y in ("labels", "y") if y in names), None))}
        chunks = tuple(
            Chunk(split, file_key(path, split), partial(load_arrays, path, *names))
            for split, names in splits.items()
        )
        return Source(f"arrays in {path.name}", self.licence, (), chunks)


@dataclass(frozen=True)
class HuggingFace:
    """A data set of the Hugging Face hub, or a local folder that `datasets` can load.

    Args:
        name: for instance `ylecun/mnist`.
        subset: the configuration of a data set that has several.
        revision: a commit or tag, to have the same data again.
        image: the column with the images; found by its type where there is one.
        label: the column with the labels; found by its type where there is one, none otherwise.
        mode: RGB or L (grey).
    """

    name: str
    subset: str | None = None
    revision: str | None = None
    image: str | None = None
    label: str | None = None
    mode: Mode = "RGB"

    def open(self) -> Source:
        """Load the data set's tables (downloads them where necessary).

        Raises:
            ValueError: where no column of images, or more than one, is found, or the chosen columns hold
                something else than images and whole numbers.
            ImportError: where `datasets` is not installed.
        """
        try:
            import datasets
        except ImportError as error:
            raise ImportError(
                "Hugging Face data sets need the package datasets: pip install 'curlfree[data]'"
            ) from error
        tables: dict[str, Any] = datasets.load_dataset(self.name, self.subset, revision=self.revision)
        first = next(iter(tables.values()))
        features = first.features
        image = self._column(features, self.image, datasets.Image)
        if image is None:
            raise ValueError(f"{self.name}: expected a column of images, found {dict(features)}")
        if not isinstance(features[image], datasets.Image):
            raise ValueError(f"{self.name}: expected images in the column {image!r}, found {features[image]}")
        label = self._column(features, self.label, datasets.ClassLabel)
        if label and "int" not in str(getattr(features[label], "dtype", "")):
            raise ValueError(
                f"{self.name}: expected whole numbers in the column {label!r}, found {features[label]}"
            )
        classes = tuple(getattr(features[label], "names", None) or ()) if label else ()
        chunks = tuple(
            Chunk(
                split,
                f"{self.name} {self.subset} {self.revision} {split} {len(table)} {image} {label} [{start}]",
                partial(_load_table, table, start, image, label, self.mode, f"{self.name}, {split}"),
            )
            for split, table in tables.items()
            for start in range(0, len(table), _PER_CHUNK)
        )
        title = f"Hugging Face {self.name} {self.subset or ''} {self.revision or ''}".rstrip()
        return Source(title, first.info.license or "unknown", classes, chunks)

    def _column(self, features: dict[str, Any], chosen: str | None, kind: type) -> str | None:
        if chosen is not None:
            if chosen not in features:
                raise ValueError(f"{self.name}: no column {chosen!r}, only {list(features)}")
            return chosen
        found = [name for name, feature in features.items() if isinstance(feature, kind)]
        if len(found) > 1:
            raise ValueError(f"{self.name}: several columns of type {kind.__name__}, {found}: name one")
        return found[0] if found else None


def image_chunks(split: str, files: Sequence[Path], labels: Sequence[int], mode: Mode) -> list[Chunk]:
    """Image files in chunks of a few thousand."""
    chunks = []
    for start in range(0, len(files), _PER_CHUNK):
        part, values = files[start : start + _PER_CHUNK], labels[start : start + _PER_CHUNK]
        content = "\n".join(f"{path} {file_key(path)}" for path in part)
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        key = f"{split} images {start} to {start + len(part) - 1}, {mode}, {digest}"
        chunks.append(Chunk(split, key, partial(_load_files, part, np.array(values, np.int64), mode)))
    return chunks


def load_arrays(path: Path, images_name: str = "", labels_name: str | None = None) -> Loaded:
    """Images, and labels where named, of a numpy file.

    Raises:
        ValueError: where the file is damaged or an array is of the wrong kind.
    """
    labels = None
    if path.suffix == ".npz":
        entries = load_npz(path)
        images, labels = entries[images_name], entries[labels_name] if labels_name else None
    else:
        try:
            images = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, EOFError, ValueError) as error:
            raise ValueError(f"{path}: not a readable .npy file: {error}") from error
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.size == 0:
        raise ValueError(
            f"{path}: expected images as uint8 (N, H, W) or (N, H, W, C) with N > 0, "
            f"found {images.dtype} {images.shape}"
        )
    if labels is None:
        labels = np.full(len(images), -1)
    if labels.dtype.kind not in "iu" or labels.shape not in ((len(images),), (len(images), 1)):
        raise ValueError(
            f"{path}: expected {len(images)} whole-number labels, found {labels.dtype} {labels.shape}"
        )
    return images.reshape(*images.shape[:3], -1), labels.ravel().astype(np.int64)


def _load_files(files: Sequence[Path], labels: np.ndarray, mode: Mode) -> Loaded:
    from PIL import Image

    images = []
    for path in files:
        with _readable(path), Image.open(path) as image:
            images.append(_pixels(image, mode))
    return images, labels


def _load_table(table: Any, start: int, image: str, label: str | None, mode: Mode, where: str) -> Loaded:
    images, labels = [], []
    for i in range(start, min(start + _PER_CHUNK, len(table))):
        with _readable(f"{where}, row {i}"):
            row = table[i]
            if row[image] is None:
                raise ValueError(f"the column {image!r} is empty")
            images.append(_pixels(row[image], mode))
        labels.append(-1 if label is None or row[label] is None else row[label])
    return images, np.array(labels, np.int64)


@contextmanager
def _readable(where: object) -> Iterator[None]:
    """Say which image cannot be decoded."""
    from PIL import Image

    try:
        yield
    except Image.DecompressionBombError as error:
        raise ValueError(f"{where}: {error}; scale the image down first") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{where}: damaged or not an image: {error}") from error


def _pixels(image: "Image", mode: Mode) -> np.ndarray:
    """Bytes (H, W, C); 16-bit grey (Pillow's modes I;16..., and I for PGM) is scaled to 8, not cut off."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("expected pixels of 8 or 16 bits, found floating-point numbers (mode F)")
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > _MAX_16:
            raise ValueError(f"expected pixels of 8 or 16 bits, found {grey.min()} to {grey.max()}")
        image = Image.fromarray(((grey * 255 + _MAX_16 // 2) // _MAX_16).astype(np.uint8))
    pixels = np.asarray(image.convert(mode))
    return pixels.reshape(*pixels.shape[:2], -1)
