"""ImageNet at 32x32 pixels, in either of two data sets that differ and are often confused.

- van den Oord, Kalchbrenner, Kavukcuoglu (2016, arXiv:1601.06759): 1,281,149 training and 49,999 validation
  images as PNG files without labels: the set of the earlier density models.
- Chrabaszcz, Loshchilov, Hutter (2017, arXiv:1707.08819): 1,281,167 training and 50,000 validation images,
  resized by another filter, with labels 1 to 1000, pickled or as npz.

Numbers measured on one are not comparable with the other's: the packed file says which one it holds.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from curlfree.data.images import image_chunks, load_arrays
from curlfree.data.parts import Chunk, Loaded, Source, checked_labels, file_key, load_npz, planes_to_nhwc
from curlfree.data.pickles import batch_entry, load_batch

LICENCE = "ImageNet's terms: non-commercial research and education only"
_BATCHES = {"train": [f"train_data_batch_{i}" for i in range(1, 11)], "val": ["val_data"]}
COUNTS_2017 = {"train": 1_281_167, "val": 50_000}
COUNTS_2016 = {"train": 1_281_149, "val": 49_999}


@dataclass(frozen=True)
class ImageNet32Batches:
    """The version of Chrabaszcz et al. (2017): ten training batches and `val_data`, pickled or `.npz`.

    Args:
        path: the folder with `train_data_batch_1` ... `_10` and `val_data`, or the same names with `.npz`.
        unverified: accept another number of images.
    """

    path: Path
    unverified: bool = False

    def open(self) -> Source:
        """Find the files.

        Raises:
            ValueError: where one is missing.
        """
        folder = Path(self.path)
        chunks = []
        for split, names in _BATCHES.items():
            for name in names:
                found = [path for path in (folder / name, folder / f"{name}.npz") if path.is_file()]
                if not found:
                    raise ValueError(f"{folder}: expected a file {name} or {name}.npz, found neither")
                chunks.append(Chunk(split, file_key(found[0]), partial(_load_batch, found[0])))
        title = "ImageNet 32x32, Chrabaszcz et al. 2017 (arXiv:1707.08819), 50,000 validation images"
        if self.unverified:
            return Source(f"files in the format of {title}", LICENCE, (), tuple(chunks))
        return Source(title, LICENCE, (), tuple(chunks), COUNTS_2017)


@dataclass(frozen=True)
class ImageNet32Pngs:
    """The version of van den Oord et al. (2016): the folders `train_32x32` and `valid_32x32` of PNG files.

    Args:
        path: the folder with `train_32x32` and `valid_32x32`, or with `train_32x32.npy` and `valid_32x32.npy`
            (uint8, NHWC) made from them.
        unverified: accept another number of images.
    """

    path: Path
    unverified: bool = False

    def open(self) -> Source:
        """Find the files.

        Raises:
            ValueError: where they are missing.
        """
        chunks: list[Chunk] = []
        for split, name in (("train", "train_32x32"), ("val", "valid_32x32")):
            folder, array = Path(self.path) / name, Path(self.path) / f"{name}.npy"
            if folder.is_dir():
                files = sorted(folder.glob("*.png"))
                chunks += image_chunks(split, files, [-1] * len(files), "RGB")
            elif array.is_file():
                chunks.append(Chunk(split, file_key(array), partial(load_arrays, array)))
            else:
                raise ValueError(f"{self.path}: expected a folder {name} or a file {name}.npy, found neither")
        title = "ImageNet 32x32, van den Oord et al. 2016 (arXiv:1601.06759), 49,999 validation images"
        if self.unverified:
            return Source(f"files in the format of {title}", LICENCE, (), tuple(chunks))
        return Source(title, LICENCE, (), tuple(chunks), COUNTS_2016)


def _load_batch(path: Path) -> Loaded:
    where = str(path)
    batch = load_npz(path) if path.suffix == ".npz" else load_batch(path.read_bytes(), where)
    images = planes_to_nhwc(batch_entry(batch, "data", where), where)
    return images, checked_labels(batch_entry(batch, "labels", where), len(images), 1000, where, first=1) - 1
