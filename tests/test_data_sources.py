"""Readers of data sets: official formats, users' images, and files that must be refused."""

import contextlib
import io
import os
import pickle
import runpy
import struct
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

from curlfree.data import cifar
from curlfree.data.packed import prepare
from curlfree.data.pickles import load_batch
from curlfree.data.rmd17 import read_rmd17
from curlfree.data.sources import (
    ArrayFile,
    Cifar10,
    Cifar100,
    HuggingFace,
    ImageFolder,
    ImageNet32Batches,
    ImageNet32Pngs,
    Svhn,
)

MAKE = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "make_cifar_format.py"))
RNG = np.random.default_rng(0)


def pictures(n: int, height: int = 32, width: int = 32, channels: int = 3) -> np.ndarray:
    return RNG.integers(0, 256, (n, height, width, channels), np.uint8)


def planes(images: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), -1)


def everything(source) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """All images and labels of a source by split."""
    images: dict[str, list] = {}
    labels: dict[str, list] = {}
    for chunk in source.chunks:
        x, y = chunk.load()
        images.setdefault(chunk.split, []).extend(x)
        labels.setdefault(chunk.split, []).extend(y)
    return {k: np.stack(v) for k, v in images.items()}, {k: np.array(v) for k, v in labels.items()}


# CIFAR


def test_cifar10_folder_agrees_with_pickle(tmp_path):
    folder = MAKE["write_cifar10"](tmp_path, 12)
    images, labels = everything(Cifar10(folder, unverified=True).open())
    assert {k: len(v) for k, v in images.items()} == {"train": 60, "test": 12}
    for split, names in {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}.items():
        batches = [pickle.loads((folder / name).read_bytes(), encoding="bytes") for name in names]
        data = np.concatenate([b[b"data"] for b in batches]).reshape(-1, 3, 32, 32)
        assert np.array_equal(images[split], data.transpose(0, 2, 3, 1))
        assert labels[split].tolist() == [y for b in batches for y in b[b"labels"]]


def test_cifar10_archive_gives_the_same_as_its_folder(tmp_path):
    folder = MAKE["write_cifar10"](tmp_path, 5)
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "cifar-10-batches-py")
    a, b = everything(Cifar10(folder, True).open()), everything(Cifar10(archive, True).open())
    for split in ("train", "test"):
        assert np.array_equal(a[0][split], b[0][split])
        assert np.array_equal(a[1][split], b[1][split])
    (folder / "data_batch_2").rename(folder / "other")
    with tarfile.open(tmp_path / "lacking.tar", "w") as tar:
        tar.add(folder, "cifar-10-batches-py")
    with pytest.raises(ValueError, match="expected a member 'data_batch_2'"):
        everything(Cifar10(tmp_path / "lacking.tar", True).open())
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged"):
        everything(Cifar10(archive, True).open())


def test_cifar_refuses_files_that_are_not_the_published_ones(tmp_path):
    folder = MAKE["write_cifar10"](tmp_path, 3)
    with pytest.raises(ValueError, match=r"md5 \w+, but the published file has c99cafc15.*--unverified"):
        Cifar10(folder).open().chunks[0].load()
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "cifar-10-batches-py")
    with pytest.raises(ValueError, match="published file has c58f30108f718f92721af3b95e74349a"):
        Cifar10(archive).open()
    (folder / "data_batch_4").unlink()
    with pytest.raises(ValueError, match=r"data_batch_4.*missing"):
        Cifar10(folder).open()
    with pytest.raises(ValueError, match="no such folder or archive"):
        Cifar10(tmp_path / "absent").open()


def test_cifar_accepts_files_whose_md5_is_published(tmp_path, monkeypatch):
    import hashlib

    folder = MAKE["write_cifar10"](tmp_path, 2)
    sums = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in cifar.CIFAR10_MD5}
    monkeypatch.setattr(cifar, "CIFAR10_MD5", sums)
    source = Cifar10(folder).open()
    assert source.name.startswith("CIFAR-10 (Krizhevsky")
    assert len(everything(source)[0]["train"]) == 10
    with pytest.raises(ValueError, match="10 train images, the published data set has 50000"):
        prepare(source, tmp_path / "short.packed")
    assert not (tmp_path / "short.packed").exists()


@pytest.mark.parametrize("coarse", [False, True])
def test_cifar100(tmp_path, coarse):
    kind = "coarse" if coarse else "fine"
    expected = {}
    for split, n in (("train", 7), ("test", 4)):
        x = pictures(n)
        y = {"fine": RNG.integers(0, 100, n), "coarse": RNG.integers(0, 20, n)}
        expected[split] = x, y[kind]
        batch = {
            b"data": planes(x),
            b"fine_labels": y["fine"].tolist(),
            b"coarse_labels": y["coarse"].tolist(),
        }
        (tmp_path / split).write_bytes(pickle.dumps(batch, protocol=2))
    meta = {
        f"{k}_label_names".encode(): [f"{k}{i}".encode() for i in range(c)]
        for k, c in (("fine", 100), ("coarse", 20))
    }
    (tmp_path / "meta").write_bytes(pickle.dumps(meta, protocol=2))
    source = Cifar100(tmp_path, coarse=coarse, unverified=True).open()
    images, labels = everything(source)
    for split, (x, y) in expected.items():
        assert np.array_equal(images[split], x)
        assert np.array_equal(labels[split], y)
    assert source.classes == tuple(f"{kind}{i}" for i in range(20 if coarse else 100))
    (tmp_path / "meta").write_bytes(pickle.dumps({f"{kind}_label_names": 3}, protocol=2))
    with pytest.raises(ValueError, match="expected a list of class names, found int"):
        Cifar100(tmp_path, coarse=coarse, unverified=True).open()
    with pytest.raises(ValueError, match="published file has 7973b15100ade9c7d40fb424638fde48"):
        Cifar100(tmp_path).open()


def test_wrong_shapes_and_labels_are_refused(tmp_path):
    folder = MAKE["write_cifar10"](tmp_path, 3)
    good = pickle.loads((folder / "test_batch").read_bytes())
    for change, message in (
        ({b"data": good[b"data"][:, :-1]}, "rows of 3072"),
        ({b"data": good[b"data"].astype(np.int16)}, "uint8 rows"),
        ({b"data": [1, 2]}, "uint8 rows"),
        ({b"labels": [0, 1]}, "expected 3 whole-number labels"),
        ({b"labels": [0, 1, 10]}, r"labels in \[0, 10\), found 0 to 10"),
    ):
        (folder / "test_batch").write_bytes(pickle.dumps(good | change, protocol=2))
        with pytest.raises(ValueError, match=message):
            Cifar10(folder, True).open().chunks[-1].load()
    del good[b"labels"]
    (folder / "test_batch").write_bytes(pickle.dumps(good, protocol=2))
    with pytest.raises(ValueError, match="expected an entry 'labels'"):
        Cifar10(folder, True).open().chunks[-1].load()


# the restricted unpickler


def python2_pickle(rows: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 wrote it: byte strings (opcodes U and T) and numpy's old module names."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    n, d = rows.shape
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
        + b"(K\x01" + b"M" + struct.pack("<H", n) + b"M" + struct.pack("<H", d) + b"\x86"
        + b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T" + struct.pack("<i", rows.nbytes) + rows.tobytes() + b"tb"
    )  # fmt: skip
    return (
        b"\x80\x02}("
        + short(b"labels") + b"](" + b"".join(b"K" + bytes([y]) for y in labels) + b"e"
        + short(b"data") + array + b"u."
    )  # fmt: skip


def test_python2_batches_are_read():
    rows = planes(pictures(300))
    labels = RNG.integers(0, 10, 300).tolist()
    raw = python2_pickle(rows, labels)
    assert np.array_equal(pickle.loads(raw, encoding="bytes")[b"data"], rows)
    batch = load_batch(raw, "here")
    assert np.array_equal(batch["data"], rows)
    assert batch["labels"] == labels


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(["u1", "<i4", ">i2", "<f8", ">f4", "?", "<f2"]),
    shape=st.lists(st.integers(1, 4), max_size=3),
    fortran=st.booleans(),
    protocol=st.integers(0, 4),
)
def test_arrays_come_back_as_numpy_reads_them(dtype, shape, fortran, protocol):
    values = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape, order="F" if fortran else "C")
    raw = pickle.dumps({"a": values, b"b": [1, "two", (3.0, None)]}, protocol=protocol)
    batch = load_batch(raw, "here")
    assert batch["a"].dtype == values.dtype
    assert np.array_equal(batch["a"], values)
    assert batch["b"] == [1, "two", (3.0, None)]


class Calls:
    """Pickles to a call of any function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Tampered:
    """Pickles like an array, but with an unknown byte order or with a list in place of raw bytes."""

    def __init__(self, array, change):
        self.parts, self.change = array.__reduce__(), change

    def __reduce__(self):
        function, arguments, (version, shape, dtype, fortran, raw) = self.parts
        if self.change == "raw":
            return function, arguments, (version, shape, dtype, fortran, [1, 2])
        return function, arguments, (version, shape, UnknownOrder(dtype), fortran, raw)


class UnknownOrder:
    """Pickles like a dtype with the byte order "?"."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __reduce__(self):
        function, arguments, state = self.dtype.__reduce__()
        return function, arguments, (state[0], "?", *state[2:])


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_malicious_pickles_are_refused(tmp_path, protocol):
    marker = tmp_path / "ran"
    for attack in (
        Calls(os.system, f"touch {marker}"),
        Calls(eval, f"open({str(marker)!r}, 'w')"),
        Calls(open, str(marker), "w"),
        Calls(getattr, "", "join"),
        Calls(Path.touch, marker),
    ):
        with pytest.raises(ValueError, match="which no image batch needs"):
            load_batch(pickle.dumps({"data": attack}, protocol=protocol), "evil")
    assert not marker.exists()
    pickle.loads(pickle.dumps(Calls(os.system, f"touch {marker}"), protocol=protocol))
    assert marker.exists()  # the attack works where nobody stops it


@pytest.mark.parametrize(
    "raw",
    [
        pickle.dumps({"a": np.array([object], dtype=object)[:0]}, 2),
        pickle.dumps({"a": np.zeros(2, "M8[s]")}, 2),
        pickle.dumps({"a": np.zeros(2, [("x", "u1")])}, 2),
        pickle.dumps([1, 2], 2),
        pickle.dumps({"a": np.arange(9)}, 2)[:-20],
        b"c_codecs\nencode\n(Vabc\nVbz2\ntR.",
        pickle.dumps({"a": Tampered(np.arange(4, dtype="<i4"), "order")}, 2),
        pickle.dumps({"a": Tampered(np.arange(4, dtype="u1"), "raw")}, 2),
        b"}Va\ncnumpy.core.multiarray\n_reconstruct\n(tRs.",
        b"}Va\ncnumpy\ndtype\n(V(3,\ntRs.",
        b"c_codecs\nencode\n}Vx\nVy\nsb.",
        b"cnumpy.core.multiarray\n_reconstruct\n}Vx\nVy\nsb.",
        b"\x80\x02\x82\x01.",
        b"",
        b"PK\x03\x04 not a pickle",
    ],
    ids=[
        "objects",
        "dates",
        "records",
        "list",
        "cut",
        "codec",
        "order",
        "raw",
        "bare",
        "dtype",
        "state",
        "state2",
        "registry",
        "empty",
        "zip",
    ],
)
def test_other_pickles_are_refused(raw):
    with pytest.raises(ValueError, match=r"^file: not a pickled batch of images, refused"):
        load_batch(raw, "file")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_pickles_never_raise_anything_but_value_errors(data):
    raw = bytearray(pickle.dumps({"data": np.arange(6, dtype=np.uint8), "labels": [1, 2]}, 2))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        assert type(load_batch(bytes(raw), "file")) is dict


# SVHN and ImageNet


def test_svhn(tmp_path):
    expected = {}
    for split, n in (("train", 6), ("test", 3), ("extra", 4)):
        x, y = pictures(n), RNG.integers(1, 11, (n, 1)).astype(np.uint8)
        y[0] = 10
        savemat(tmp_path / f"{split}_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": y}, do_compression=True)
        expected[split] = x, y.ravel() % 10
    source = Svhn(tmp_path, unverified=True).open()
    images, labels = everything(source)
    for split, (x, y) in expected.items():
        assert np.array_equal(images[split], x)
        assert np.array_equal(labels[split], y)
        assert labels[split][0] == 0
    with pytest.raises(ValueError, match="published file has e26dedcc"):
        Svhn(tmp_path).open().chunks[0].load()
    (tmp_path / "extra_32x32.mat").unlink()
    assert [chunk.split for chunk in Svhn(tmp_path).open().chunks] == ["train", "test"]
    savemat(tmp_path / "test_32x32.mat", {"X": x.transpose(1, 2, 3, 0)})
    with pytest.raises(ValueError, match="expected the variables X and y"):
        Svhn(tmp_path, unverified=True).open().chunks[1].load()
    savemat(tmp_path / "test_32x32.mat", {"X": x, "y": y})
    with pytest.raises(ValueError, match=r"X must be uint8 \(32, 32, 3, N\), found uint8 \(4, 32, 32, 3\)"):
        Svhn(tmp_path, unverified=True).open().chunks[1].load()
    raw = (tmp_path / "test_32x32.mat").read_bytes()
    (tmp_path / "test_32x32.mat").write_bytes(raw[:200])
    with pytest.raises(ValueError, match=r"test_32x32\.mat"):
        Svhn(tmp_path, unverified=True).open().chunks[1].load()
    (tmp_path / "test_32x32.mat").unlink()
    with pytest.raises(ValueError, match=r"test_32x32\.mat"):
        Svhn(tmp_path).open()


def test_damaged_matlab_files_are_refused(tmp_path):
    matrices = {"X": pictures(40).transpose(1, 2, 3, 0), "y": np.ones((40, 1), np.uint8)}
    for split in ("train", "test"):
        savemat(tmp_path / f"{split}_32x32.mat", matrices, do_compression=True)
    path, (first, *_) = tmp_path / "train_32x32.mat", Svhn(tmp_path, unverified=True).open().chunks
    raw = path.read_bytes()
    middle = len(raw) // 2
    for damaged in (raw[:126], raw[:middle], raw[:middle] + bytes(20) + raw[middle + 20 :]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"train_32x32\.mat: not a readable MATLAB 5 file"):
            first.load()


@pytest.mark.parametrize("compression", ["gz", "bz2", "xz"])
def test_damaged_archives_are_refused(tmp_path, compression):
    folder = MAKE["write_cifar10"](tmp_path, 4)
    path = tmp_path / f"cifar.tar.{compression}"
    with tarfile.open(path, f"w:{compression}") as archive:
        archive.add(folder, folder.name)
    raw = path.read_bytes()
    middle = len(raw) // 2
    last = Cifar10(path, unverified=True).open().chunks[-1]
    for damaged in (raw[:middle], raw[:middle] + bytes(200) + raw[middle + 200 :]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"damaged or not a tar archive|expected a member"):
            last.load()


@pytest.mark.parametrize("npz", [False, True])
def test_imagenet32_of_2017(tmp_path, npz):
    expected: dict[str, list] = {"train": [], "val": []}
    for name in [f"train_data_batch_{i}" for i in range(1, 11)] + ["val_data"]:
        x, y = pictures(3), RNG.integers(1, 1001, 3)
        expected["val" if name == "val_data" else "train"].append((x, y - 1))
        batch = {"data": planes(x), "labels": y if npz else y.tolist(), "mean": planes(x).mean(0)}
        if npz:
            np.savez(tmp_path / f"{name}.npz", **batch)
        else:
            (tmp_path / name).write_bytes(pickle.dumps(batch))
    source = ImageNet32Batches(tmp_path, unverified=True).open()
    images, labels = everything(source)
    for split, batches in expected.items():
        assert np.array_equal(images[split], np.concatenate([x for x, _ in batches]))
        assert np.array_equal(labels[split], np.concatenate([y for _, y in batches]))
    assert "2017" in source.name
    assert "50,000" in source.name
    with pytest.raises(ValueError, match="30 train images, the published data set has 1281167"):
        prepare(ImageNet32Batches(tmp_path).open(), tmp_path / "out.packed")
    (tmp_path / ("val_data.npz" if npz else "val_data")).unlink()
    with pytest.raises(ValueError, match=r"expected a file val_data or val_data\.npz"):
        ImageNet32Batches(tmp_path).open()


@pytest.mark.parametrize("npy", [False, True])
def test_imagenet32_of_2016(tmp_path, npy):
    expected = {"train": pictures(4), "val": pictures(2)}
    for split, name in (("train", "train_32x32"), ("val", "valid_32x32")):
        if npy:
            np.save(tmp_path / f"{name}.npy", expected[split])
        else:
            (tmp_path / name).mkdir()
            for i, image in enumerate(expected[split]):
                Image.fromarray(image).save(tmp_path / name / f"{i:07d}.png")
    source = ImageNet32Pngs(tmp_path, unverified=True).open()
    images, labels = everything(source)
    for split, x in expected.items():
        assert np.array_equal(images[split], x)
        assert (labels[split] == -1).all()
    assert "2016" in source.name
    assert "49,999" in source.name
    with pytest.raises(ValueError, match="4 train images, the published data set has 1281149"):
        prepare(ImageNet32Pngs(tmp_path).open(), tmp_path / "out.packed")
    with pytest.raises(ValueError, match="expected a folder train_32x32"):
        ImageNet32Pngs(tmp_path / "absent").open()


# users' own images


def test_folder_with_classes_and_splits(tmp_path):
    expected = {}
    for split in ("train", "test"):
        for name in ("cat", "ant"):
            (tmp_path / split / name / "deeper").mkdir(parents=True)
            for i in range(2):
                x = pictures(1, 8, 9)[0]
                Image.fromarray(x).save(tmp_path / split / name / "deeper" / f"{i}.png")
                expected[split, name, i] = x
    source = ImageFolder(tmp_path).open()
    images, labels = everything(source)
    assert source.classes == ("ant", "cat")
    for split in ("train", "test"):
        assert labels[split].tolist() == [0, 0, 1, 1]
        for row, (name, i) in enumerate((n, i) for n in ("ant", "cat") for i in range(2)):
            assert np.array_equal(images[split][row], expected[split, name, i])


def test_flat_folder_modes_orientation_and_damage(tmp_path):
    grey = pictures(1, 5, 7, 1)[0, :, :, 0]
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    Image.fromarray(grey).save(tmp_path / "a.png", exif=exif)
    Image.fromarray(np.dstack([grey] * 3 + [255 - grey])).save(tmp_path / "b.PNG")
    (tmp_path / "notes.txt").write_text("not an image")
    source = ImageFolder(tmp_path, mode="L", licence="mine").open()
    (turned, plain), labels = source.chunks[0].load()
    assert np.array_equal(turned[:, :, 0], np.rot90(grey, -1))
    assert np.array_equal(plain[:, :, 0], grey)
    assert labels.tolist() == [-1, -1]
    assert source.classes == ()
    assert source.licence == "mine"
    rgb = ImageFolder(tmp_path).open().chunks[0].load()[0][1]
    assert np.array_equal(rgb, np.dstack([grey] * 3))
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    with pytest.raises(ValueError, match=r"a\.png: damaged or not an image"):
        source.chunks[0].load()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="found none"):
        ImageFolder(tmp_path / "empty").open()
    with pytest.raises(ValueError, match="no such folder"):
        ImageFolder(tmp_path / "absent").open()


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path, suffix):
    ramp = np.arange(0, 2**16, 16, np.uint16).reshape(64, 64)
    Image.fromarray(ramp).save(tmp_path / f"ramp.{suffix}")
    (grey,), _ = ImageFolder(tmp_path, mode="L").open().chunks[0].load()
    assert abs(grey[:, :, 0] - ramp / 257).max() <= 0.5
    (rgb,), _ = ImageFolder(tmp_path).open().chunks[0].load()
    assert np.array_equal(rgb, np.repeat(grey, 3, axis=2))


def test_other_pixels_and_huge_images_are_refused_by_name(tmp_path, monkeypatch):
    for pixels, message in (
        (np.zeros((4, 4), np.float32), r"a\.tif: .*floating-point numbers \(mode F\)"),
        (np.full((4, 4), 70000, np.int32), r"a\.tif: .*found 70000 to 70000"),
        (np.full((4, 4), -1, np.int32), r"a\.tif: .*found -1 to -1"),
    ):
        Image.fromarray(pixels).save(tmp_path / "a.tif")
        with pytest.raises(ValueError, match=message):
            ImageFolder(tmp_path).open().chunks[0].load()
    Image.fromarray(pictures(1, 30, 30)[0]).save(tmp_path / "a.tif")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
    with pytest.raises(ValueError, match=r"a\.tif: .*900 pixels.*scale the image down"):
        ImageFolder(tmp_path).open().chunks[0].load()


def test_array_files(tmp_path):
    x, y = pictures(5, 28, 28, 1), RNG.integers(0, 10, 5)
    np.save(tmp_path / "x.npy", x[..., 0])
    np.savez(tmp_path / "plain.npz", images=x, labels=y.astype(np.uint8)[:, None])
    np.savez(tmp_path / "split.npz", x_train=x[:3], y_train=y[:3], x_test=x[3:], y_test=y[3:])
    images, labels = everything(ArrayFile(tmp_path / "x.npy").open())
    assert np.array_equal(images["train"], x) and (labels["train"] == -1).all()
    images, labels = everything(ArrayFile(tmp_path / "plain.npz").open())
    assert np.array_equal(images["train"], x) and np.array_equal(labels["train"], y)
    images, labels = everything(ArrayFile(tmp_path / "split.npz").open())
    assert np.array_equal(images["test"], x[3:]) and np.array_equal(labels["test"], y[3:])
    np.savez(tmp_path / "bad.npz", weights=x)
    with pytest.raises(ValueError, match=r"expected an entry 'images' or 'x_train', found \['weights'\]"):
        ArrayFile(tmp_path / "bad.npz").open()
    np.save(tmp_path / "float.npy", x / 255)
    with pytest.raises(ValueError, match=r"expected images as uint8.*found float64"):
        ArrayFile(tmp_path / "float.npy").open().chunks[0].load()
    np.save(tmp_path / "objects.npy", np.array([Calls(os.getcwd)], object), allow_pickle=True)
    with pytest.raises(ValueError, match="not a readable"):
        ArrayFile(tmp_path / "objects.npy").open().chunks[0].load()
    np.savez(tmp_path / "empty.npz", images=x[:0])
    with pytest.raises(ValueError, match=r"with N > 0, found uint8 \(0, 28, 28, 1\)"):
        ArrayFile(tmp_path / "empty.npz").open().chunks[0].load()
    np.savez(tmp_path / "labels.npz", images=x, labels=y[:2])
    with pytest.raises(ValueError, match="expected 5 whole-number labels"):
        ArrayFile(tmp_path / "labels.npz").open().chunks[0].load()
    with pytest.raises(ValueError, match="no such file"):
        ArrayFile(tmp_path / "absent.npz").open()
    (tmp_path / "cut.npz").write_bytes((tmp_path / "plain.npz").read_bytes()[:300])
    with pytest.raises(ValueError, match="not a readable"):
        ArrayFile(tmp_path / "cut.npz").open()


def test_hugging_face(tmp_path, monkeypatch):
    import datasets

    x = pictures(5, 6, 6)
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "kind": datasets.ClassLabel(names=["a", "b", "c"]),
            "number": datasets.Value("int32"),
        }
    )
    rows = {"picture": [Image.fromarray(i) for i in x], "kind": [0, 1, 2, 1, 0], "number": [5, 6, 7, 8, 9]}
    table = datasets.Dataset.from_dict(rows, features=features)
    table.select(range(3)).to_parquet(str(tmp_path / "set" / "train.parquet"))
    table.select(range(3, 5)).to_parquet(str(tmp_path / "set" / "test.parquet"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    source = HuggingFace(str(tmp_path / "set")).open()
    images, labels = everything(source)
    assert np.array_equal(images["train"], x[:3]) and np.array_equal(images["test"], x[3:])
    assert labels["train"].tolist() == [0, 1, 2] and labels["test"].tolist() == [1, 0]
    assert source.classes == ("a", "b", "c")
    numbers = HuggingFace(str(tmp_path / "set"), label="number", mode="L").open()
    assert everything(numbers)[1]["test"].tolist() == [8, 9]
    assert everything(numbers)[0]["test"].shape == (2, 6, 6, 1)
    with pytest.raises(ValueError, match="no column 'label'"):
        HuggingFace(str(tmp_path / "set"), label="label").open()
    with pytest.raises(ValueError, match=r"expected images in the column 'number', found Value"):
        HuggingFace(str(tmp_path / "set"), image="number").open()
    with pytest.raises(ValueError, match=r"expected whole numbers in the column 'picture', found Image"):
        HuggingFace(str(tmp_path / "set"), label="picture").open()
    whole = io.BytesIO()
    Image.fromarray(x[0]).save(whole, "PNG")
    for bad, message in ((whole.getvalue()[:60], "damaged or not an image"), (None, "'picture' is empty")):
        pictured = [{"bytes": data, "path": None} if data else None for data in (whole.getvalue(), bad)]
        broken = {"picture": pictured, "kind": [None, 1], "number": [1, 2]}
        target = tmp_path / f"bad{bad is None}"
        datasets.Dataset.from_dict(broken, features=features).to_parquet(str(target / "train.parquet"))
        with pytest.raises(ValueError, match=rf"{target}, train, row 1: .*{message}"):
            HuggingFace(str(target)).open().chunks[0].load()
    twice = table.add_column("again", table["kind"]).cast_column("again", features["kind"])
    twice.to_parquet(str(tmp_path / "twice" / "train.parquet"))
    with pytest.raises(
        ValueError, match=r"several columns of type ClassLabel, \['kind', 'again'\]: name one"
    ):
        HuggingFace(str(tmp_path / "twice")).open()
    table.remove_columns("picture").to_parquet(str(tmp_path / "none" / "train.parquet"))
    with pytest.raises(ValueError, match="expected a column of images"):
        HuggingFace(str(tmp_path / "none")).open()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'curlfree\[data\]'"):
        HuggingFace("any").open()


# force fields


def molecule(n: int = 4, atoms: int = 3) -> dict[str, np.ndarray]:
    return {
        "coords": RNG.standard_normal((n, atoms, 3)),
        "forces": RNG.standard_normal((n, atoms, 3)),
        "energies": RNG.standard_normal(n),
        "nuclear_charges": np.array([6, 1, 8], np.uint8)[:atoms],
    }


def test_rmd17(tmp_path):
    arrays = molecule()
    np.savez(tmp_path / "m.npz", **arrays, old_indices=np.arange(4))
    data = read_rmd17(tmp_path / "m.npz")
    assert np.array_equal(data.coordinates.numpy(), arrays["coords"])
    assert np.array_equal(data.forces.numpy(), arrays["forces"])
    assert np.array_equal(data.energies.numpy(), arrays["energies"])
    assert data.charges.tolist() == [6, 1, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forces": np.zeros((4, 3, 2))}, r"forces must have shape \(4, 3, 3\), found \(4, 3, 2\)"),
        ({"energies": np.zeros((4, 1))}, "energies must have shape"),
        ({"coords": np.zeros((4, 9))}, r"coords must have shape \(frames, atoms, 3\)"),
        ({"coords": np.full((4, 3, 3), np.nan)}, "coords must hold finite numbers"),
        ({"nuclear_charges": np.array([6, 0, 1])}, "atomic numbers"),
    ],
)
def test_rmd17_refuses(tmp_path, change, message):
    np.savez(tmp_path / "m.npz", **(molecule() | change))
    with pytest.raises(ValueError, match=message):
        read_rmd17(tmp_path / "m.npz")


def test_rmd17_names_what_is_missing(tmp_path):
    arrays = molecule()
    del arrays["forces"]
    np.savez(tmp_path / "m.npz", **arrays)
    with pytest.raises(ValueError, match=r"missing \['forces'\]"):
        read_rmd17(tmp_path / "m.npz")
