"""SVHN, street view house numbers (Netzer et al. 2011), from the official cropped-digit MATLAB files."""

import hashlib
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from curlfree.data.parts import Chunk, Loaded, Source, check_md5, checked_labels, file_key

MD5 = {
    "train": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test": "eb5a983be6a315427106f1b164d9cef3",
    "extra": "a93ce644f1a588dc4d68dda5feec44a7",
}
COUNTS = {"train": 73_257, "test": 26_032, "extra": 531_131}
LICENCE = "non-commercial use only; cite Netzer et al. (2011)"


@dataclass(frozen=True)
class Svhn:
    """SVHN: 73,257 training, 26,032 test and, where present, 531,131 extra digits of 32x32 pixels.

    Args:
        path: the folder with `train_32x32.mat`, `test_32x32.mat` and perhaps `extra_32x32.mat`.
        unverified: accept files of the same format whose md5 is not the published one.
    """

    path: Path
    unverified: bool = False

    def open(self) -> Source:
        """Find the files.

        Raises:
            ValueError: where training or test file is missing.
        """
        files = {split: Path(self.path) / f"{split}_32x32.mat" for split in MD5}
        missing = [str(files[split]) for split in ("train", "test") if not files[split].is_file()]
        if missing:
            raise ValueError(f"expected the official SVHN files, missing {missing}")
        chunks = tuple(
            Chunk(split, file_key(path), partial(_load, path, None if self.unverified else MD5[split]))
            for split, path in files.items()
            if path.is_file()
        )
        digits = tuple(str(digit) for digit in range(10))
        if self.unverified:
            return Source("files in the format of SVHN", "unknown", digits, chunks)
        counts = {chunk.split: COUNTS[chunk.split] for chunk in chunks}
        return Source("SVHN (Netzer et al. 2011)", LICENCE, digits, chunks, counts)


def _load(path: Path, md5: str | None) -> Loaded:
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    damage = (MatReadError, zlib.error, OSError, LookupError, NotImplementedError, TypeError, ValueError)
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if md5 is not None:
        check_md5(found, md5, str(path))
    try:
        entries = loadmat(path, variable_names=["X", "y"])
    except damage as error:
        raise ValueError(f"{path}: not a readable MATLAB 5 file: {error}") from error
    if not {"X", "y"} <= entries.keys():
        raise ValueError(f"{path}: expected the variables X and y")
    images, labels = entries["X"], entries["y"]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
        raise ValueError(f"{path}: X must be uint8 (32, 32, 3, N), found {images.dtype} {images.shape}")
    digits = checked_labels(labels.ravel(), images.shape[3], 10, str(path), first=1) % 10
    return np.ascontiguousarray(images.transpose(3, 0, 1, 2)), digits
