"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from the official Python archives or their unpacked folders."""

import hashlib
import lzma
import tarfile
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from curlfree.data.parts import Chunk, Loaded, Source, check_md5, checked_labels, file_key, planes_to_nhwc
from curlfree.data.pickles import batch_entry, load_batch

CIFAR10_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
CIFAR100_MD5 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}
CIFAR10_ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
CIFAR100_ARCHIVE_MD5 = "eb9058c3a382ffc7106e4002c42a8d85"
CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
COUNTS = {"train": 50_000, "test": 10_000}
LICENCE = "no licence given by its authors; cite Krizhevsky, 'Learning multiple layers of features' (2009)"


@dataclass(frozen=True)
class _Files:
    """The files of a folder, or of a tar archive, by their names; each is checked as it is read."""

    path: Path
    md5: dict[str, str]
    archive_md5: str
    unverified: bool

    def check(self, names: list[str]) -> None:
        """Before anything is read: is the archive the published one, are the folder's files there?"""
        if self.path.is_dir():
            missing = [name for name in names if not (self.path / name).is_file()]
            if missing:
                raise ValueError(f"{self.path}: expected the files {names}, {missing} missing")
            return
        if not self.path.is_file():
            raise ValueError(
                f"{self.path}: no such folder or archive; unpack the official .tar.gz or name it"
            )
        if not self.unverified:
            with open(self.path, "rb") as file:
                found = hashlib.file_digest(file, "md5").hexdigest()
            check_md5(found, self.archive_md5, str(self.path))

    def read(self, name: str) -> bytes:
        """The content of one file."""
        raw = (self.path / name).read_bytes() if self.path.is_dir() else self._member(name)
        if not self.unverified:
            check_md5(hashlib.md5(raw).hexdigest(), self.md5[name], f"{self.path}: {name}")
        return raw

    def key(self, name: str) -> str:
        """Identifies one file for a resumed `prepare`."""
        return file_key(self.path / name) if self.path.is_dir() else file_key(self.path, name)

    def _member(self, name: str) -> bytes:
        try:
            with tarfile.open(self.path) as archive:
                for member in archive:
                    if PurePosixPath(member.name).name == name and member.isfile():
                        file = archive.extractfile(member)
                        assert file is not None  # it is a regular file
                        return file.read()
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            raise ValueError(f"{self.path}: damaged or not a tar archive: {error}") from error
        raise ValueError(f"{self.path}: expected a member {name!r} in the archive, found none")


@dataclass(frozen=True)
class Cifar10:
    """CIFAR-10: 50,000 training and 10,000 test images of 32x32 pixels in 10 classes.

    Args:
        path: `cifar-10-python.tar.gz`, or the folder `cifar-10-batches-py` that it unpacks to.
        unverified: accept files of the same format whose md5 is not the published one.
    """

    path: Path
    unverified: bool = False

    def open(self) -> Source:
        """Find and check the files.

        Raises:
            ValueError: where they are missing, damaged or not the published ones.
        """
        files = _Files(Path(self.path), CIFAR10_MD5, CIFAR10_ARCHIVE_MD5, self.unverified)
        files.check(list(CIFAR10_MD5))
        chunks = tuple(
            Chunk(
                "test" if name == "test_batch" else "train",
                files.key(name),
                partial(_load, files, name, "labels", len(CIFAR10_CLASSES)),
            )
            for name in CIFAR10_MD5
        )
        if self.unverified:
            return Source("files in the format of CIFAR-10", "unknown", CIFAR10_CLASSES, chunks)
        return Source("CIFAR-10 (Krizhevsky 2009)", LICENCE, CIFAR10_CLASSES, chunks, COUNTS)


@dataclass(frozen=True)
class Cifar100:
    """CIFAR-100: 50,000 training and 10,000 test images of 32x32 pixels in 100 classes.

    Args:
        path: `cifar-100-python.tar.gz`, or the folder `cifar-100-python` that it unpacks to.
        coarse: label by the 20 superclasses.
        unverified: accept files of the same format whose md5 is not the published one.
    """

    path: Path
    coarse: bool = False
    unverified: bool = False

    def open(self) -> Source:
        """Find and check the files.

        Raises:
            ValueError: where they are missing, damaged or not the published ones.
        """
        kind = "coarse" if self.coarse else "fine"
        files = _Files(Path(self.path), CIFAR100_MD5, CIFAR100_ARCHIVE_MD5, self.unverified)
        files.check(list(CIFAR100_MD5))
        where = f"{files.path}: meta"
        names = batch_entry(load_batch(files.read("meta"), where), f"{kind}_label_names", where)
        if type(names) is not list:
            raise ValueError(f"{where}: expected a list of class names, found {type(names).__name__}")
        classes = tuple(name.decode() if type(name) is bytes else str(name) for name in names)
        chunks = tuple(
            Chunk(
                name,
                f"{files.key(name)} {kind}",
                partial(_load, files, name, f"{kind}_labels", len(classes)),
            )
            for name in ("train", "test")
        )
        if self.unverified:
            return Source(f"files in the format of CIFAR-100, {kind} labels", "unknown", classes, chunks)
        return Source(f"CIFAR-100 (Krizhevsky 2009), {kind} labels", LICENCE, classes, chunks, COUNTS)


def _load(files: _Files, name: str, label_key: str, classes: int) -> Loaded:
    where = f"{files.path}: {name}"
    batch = load_batch(files.read(name), where)
    images = planes_to_nhwc(batch_entry(batch, "data", where), where)
    return images, checked_labels(batch_entry(batch, label_key, where), len(images), classes, where)
