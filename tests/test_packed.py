"""The packed file: round trips, refusal of damage, resumption, resizing."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curlfree.data.packed import open_packed, prepare
from curlfree.data.parts import Chunk, Source


def arrays(
    *sizes: int, shape: tuple[int, int, int] = (4, 5, 3), seed: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, 256, (n, *shape), np.uint8), rng.integers(-1, 7, n)) for n in sizes]


def source_of(parts, splits=None, **changes) -> Source:
    splits = splits or ["train"] * len(parts)
    chunks = tuple(
        Chunk(split, f"chunk {i}", lambda part=part: part)
        for i, (split, part) in enumerate(zip(splits, parts, strict=True))
    )
    return Source(**({"name": "made", "licence": "none", "classes": ("a", "ü"), "chunks": chunks} | changes))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 3])),
    cut=st.integers(1, 4),
)
def test_round_trip(tmp_path_factory, sizes, shape, cut):
    path = tmp_path_factory.mktemp("packed") / "data.packed"
    parts = arrays(*sizes, shape=shape)
    splits = ["train" if i < cut else "test" for i in range(len(parts))]
    prepare(source_of(parts, splits), path)
    packed = open_packed(path)
    images, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
    assert np.array_equal(packed.images, images)
    assert np.array_equal(packed.labels, labels)
    assert packed.labels.dtype == np.int64
    assert not packed.images.flags.writeable
    for name in set(splits):
        x, y = packed.split(name)
        mine = [part for part, split in zip(parts, splits, strict=True) if split == name]
        assert np.array_equal(x, np.concatenate([a for a, _ in mine]))
        assert np.array_equal(y, np.concatenate([b for _, b in mine]))
    assert packed.header.classes == ("a", "ü")
    assert [entry.name for entry in path.parent.iterdir()] == ["data.packed"]


def test_the_documented_layout_can_be_read_without_this_library(tmp_path):
    parts = arrays(3, 2)
    raw = prepare(source_of(parts), tmp_path / "d").path.read_bytes()
    assert raw[:8] == b"CURLPACK"
    assert not (tmp_path / "d").stat().st_mode & 0o111
    version, length = np.frombuffer(raw, "<u4", 2, 8)
    assert version == 1 and (48 + length) % 4096 == 0
    text = raw[48 : 48 + length]
    assert raw[16:48] == hashlib.sha256(text).digest()
    header = json.loads(text)
    payload = raw[48 + length :]
    assert header["sha256"] == hashlib.sha256(payload).hexdigest()
    assert header["payload_bytes"] == len(payload)
    count = int(np.prod(header["shape"]))
    assert np.array_equal(np.frombuffer(payload, np.uint8, count).reshape(header["shape"])[3:], parts[1][0])
    assert header["labels_offset"] % 8 == 0
    assert np.array_equal(np.frombuffer(payload, "<i8", 5, header["labels_offset"])[:3], parts[0][1])


def test_same_source_same_bytes(tmp_path):
    a = prepare(source_of(arrays(4)), tmp_path / "a").path.read_bytes()
    assert a == prepare(source_of(arrays(4)), tmp_path / "b").path.read_bytes()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_changed_byte_and_any_truncation_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("packed") / "data.packed"
    raw = bytearray(prepare(source_of(arrays(3)), path).path.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        place = data.draw(
            st.one_of(st.integers(0, 60), st.integers(0, len(raw) - 1), st.integers(4096, len(raw) - 1))
        )
        raw[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    with pytest.raises(
        ValueError, match=r"data\.packed: .*(truncated|altered|not a packed data file|version)"
    ):
        open_packed(path)


def test_without_verification_damage_inside_goes_unnoticed_but_truncation_does_not(tmp_path):
    path = prepare(source_of(arrays(3)), tmp_path / "d").path
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert len(open_packed(path, verify=False).images) == 3
    path.write_bytes(raw[:-1])
    with pytest.raises(ValueError, match=f"expected {len(raw)} bytes, found {len(raw) - 1}"):
        open_packed(path, verify=False)
    path.write_bytes(raw + b"x")
    with pytest.raises(ValueError, match="truncated or altered"):
        open_packed(path, verify=False)


def test_clear_refusals(tmp_path):
    packed = prepare(source_of(arrays(3)), tmp_path / "d")
    with pytest.raises(ValueError, match=r"splits \['train'\], not 'val'"):
        packed.split("val")
    with pytest.raises(ValueError, match="no such file; make it with `curlfree prepare`"):
        open_packed(tmp_path / "absent")
    with pytest.raises(FileExistsError, match="exists already"):
        prepare(source_of(arrays(3)), tmp_path / "d")
    assert len(prepare(source_of(arrays(5)), tmp_path / "d", overwrite=True).images) == 5
    with pytest.raises(ValueError, match="no images found"):
        prepare(source_of([]), tmp_path / "e")
    with pytest.raises(ValueError, match="must follow each other"):
        prepare(source_of(arrays(1, 1, 1), ["train", "test", "train"]), tmp_path / "e")
    with pytest.raises(ValueError, match="give a size to resize to"):
        prepare(source_of(arrays(1) + arrays(1, shape=(4, 4, 3))), tmp_path / "e")
    mixed = [np.zeros((3, 4, 3), np.uint8), np.zeros((4, 3, 3), np.uint8)]
    with pytest.raises(ValueError, match="images of different shapes"):
        prepare(source_of([(mixed, np.zeros(2, np.int64))]), tmp_path / "f")
    with pytest.raises(ValueError, match="3 images but labels of shape"):
        prepare(source_of([(arrays(3)[0][0], np.zeros(2, np.int64))]), tmp_path / "g")
    with pytest.raises(ValueError, match="expected uint8 images"):
        prepare(source_of([(np.zeros((2, 4, 4, 3)), np.zeros(2, np.int64))]), tmp_path / "h")
    with pytest.raises(ValueError, match="published data set has 9"):
        prepare(source_of(arrays(3), counts={"train": 9}), tmp_path / "i")
    with pytest.raises(ValueError, match="size must be a positive"):
        prepare(source_of(arrays(3)), tmp_path / "j", size=0)
    visible = [entry.name for entry in tmp_path.iterdir() if not entry.name.startswith(".")]
    assert visible == ["d"]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("garbage", [b"", b"half a chunk"])
def test_an_interrupted_run_continues_after_the_last_whole_chunk(tmp_path, after, garbage):
    parts = arrays(3, 2, 4, 1)
    whole = prepare(source_of(parts), tmp_path / "whole").path.read_bytes()
    loaded: list[int] = []

    def chunks(stop: int | None) -> Source:
        def load(i: int):
            if i == stop:
                raise Interrupted
            loaded.append(i)
            return parts[i]

        made = tuple(Chunk("train", f"chunk {i}", lambda i=i: load(i)) for i in range(4))
        return source_of([], chunks=made)

    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        prepare(chunks(after), out)
    assert not out.exists()
    with open(tmp_path / ".out.partial", "ab") as file:
        file.write(garbage)
    with open(tmp_path / ".out.partial.journal", "a") as file:
        file.write('{"split": "tr' if garbage else "")
    assert prepare(chunks(None), out).path.read_bytes() == whole
    assert loaded == [0, 1, 2, 3]


@pytest.mark.parametrize("change", ["payload", "keys", "size"])
def test_leftovers_of_another_job_or_damaged_ones_are_not_used(tmp_path, change):
    parts = arrays(3, 2, shape=(4, 4, 3))
    out = tmp_path / "out"

    def stop():
        raise Interrupted

    first = source_of(parts)
    with pytest.raises(Interrupted):
        prepare(source_of(parts, chunks=(first.chunks[0], Chunk("train", "chunk 1", stop))), out)
    if change == "payload":
        leftover = tmp_path / ".out.partial"
        raw = bytearray(leftover.read_bytes())
        raw[-5] ^= 255
        leftover.write_bytes(raw)
    parts = arrays(3, 2, shape=(4, 4, 3), seed=int(change == "keys"))
    second = source_of(parts)
    if change == "keys":
        second = source_of(parts, chunks=tuple(Chunk("train", f"new {c.key}", c.load) for c in second.chunks))
    packed = prepare(second, out, size=2 if change == "size" else None)
    if change == "size":
        assert packed.header.shape == (5, 2, 2, 3)
    else:
        assert np.array_equal(packed.images, np.concatenate([x for x, _ in parts]))
    assert open_packed(out).header == packed.header


def test_a_killed_run_leaves_no_file_and_the_next_one_completes_it(tmp_path):
    """SIGKILL while chunk 3 of 6 is loaded: no file, and the next run loads only 3 to 5."""
    script = textwrap.dedent(
        """
        import os, signal, sys
        import numpy as np
        from curlfree.data.packed import prepare
        from curlfree.data.parts import Chunk, Source
        def load(i):
            if i == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return np.full((50, 8, 8, 3), i, np.uint8), np.full(50, i)
        chunks = tuple(Chunk("train", str(i), lambda i=i: load(i)) for i in range(6))
        prepare(Source("made", "none", (), chunks), sys.argv[1])
        """
    )
    out = tmp_path / "out"
    run = subprocess.run([sys.executable, "-c", script, str(out)], check=False)
    assert run.returncode == -signal.SIGKILL
    assert not out.exists()
    loaded = []

    def load(i: int):
        loaded.append(i)
        return np.full((50, 8, 8, 3), i, np.uint8), np.full(50, i)

    chunks = tuple(Chunk("train", str(i), lambda i=i: load(i)) for i in range(6))
    prepare(Source("made", "none", (), chunks), out)
    assert loaded == [3, 4, 5]
    packed = open_packed(out)
    assert np.array_equal(packed.labels, np.repeat(np.arange(6), 50))
    assert np.array_equal(packed.images[:, 0, 0, 0], np.repeat(np.arange(6), 50))


def test_two_processes_cannot_prepare_the_same_file(tmp_path):
    out = tmp_path / "out"

    def load():
        prepare(source_of(arrays(1)), out)

    with pytest.raises(ValueError, match="another process is preparing this file"):
        prepare(source_of([], chunks=(Chunk("train", "x", load),)), out)


def test_box_resizing_averages_areas(tmp_path):
    x = np.random.default_rng(1).integers(0, 256, (3, 8, 12, 3), np.uint8)
    packed = prepare(source_of([(x, np.zeros(3, np.int64))]), tmp_path / "d", size=4)
    centre = x[:, :, 2:10].astype(np.float64)
    means = centre.reshape(3, 4, 2, 4, 2, 3).mean((2, 4))
    assert abs(packed.images - means).max() <= 1.01  # Pillow rounds after each of its two passes
    assert packed.header.resized == "box 4"


def test_lanczos_resizing_keeps_a_smooth_image(tmp_path):
    y, x = np.mgrid[0:64, 0:64] / 64
    smooth = 128 + 100 * np.sin(2 * np.pi * x) * np.cos(2 * np.pi * y)
    image = smooth.round().astype(np.uint8)[:, :, None]
    packed = prepare(
        source_of([([image], np.zeros(1, np.int64))]), tmp_path / "d", size=32, resample="lanczos"
    )
    expected = smooth.reshape(32, 2, 32, 2).mean((1, 3))
    assert abs(packed.images[0, 4:-4, 4:-4, 0] - expected[4:-4, 4:-4]).max() < 2


def test_images_of_different_sizes_become_one_size_and_the_right_size_is_untouched(tmp_path):
    rng = np.random.default_rng(2)
    x = [rng.integers(0, 256, shape, np.uint8) for shape in ((6, 6, 3), (9, 7, 3), (12, 30, 3))]
    packed = prepare(source_of([(x, np.arange(3))]), tmp_path / "d", size=6, progress=True)
    assert packed.header.shape == (3, 6, 6, 3)
    assert np.array_equal(packed.images[0], x[0])


def test_the_file_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("sync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("name"), replace(a, b)))
    prepare(source_of(arrays(2)), tmp_path / "d")
    assert events[-3:] == ["sync", "name", "sync"]
    assert events.count("name") == 1
