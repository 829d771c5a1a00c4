"""Named random streams and batches: functions of (seed, step, global sample index) and nothing else."""

import itertools
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curlfree.data.loading import Batches, to_unit
from curlfree.seeds import shard, stream, stream_seed

RNG = np.random.default_rng(0)


def data(n: int = 23, shape: tuple[int, int, int] = (4, 6, 3)) -> tuple[np.ndarray, np.ndarray]:
    return RNG.integers(0, 256, (n, *shape), np.uint8), np.arange(n) % 5


# streams


def test_a_stream_depends_on_its_names_alone():
    draw = torch.randn(5, generator=stream(3, "noise", 17))
    before = torch.get_rng_state()
    assert torch.equal(draw, torch.randn(5, generator=stream(3, "noise", 17)))
    assert torch.equal(before, torch.get_rng_state())
    others = [stream(4, "noise", 17), stream(3, "noise", 18), stream(3, "level", 17), stream(3, 17, "noise")]
    others += [
        stream(3, "noise", "17"),
        stream(3, "noise1", 7),
        stream(3, "noise"),
        stream(3, "noise", 17, 0),
    ]
    for other in others:
        assert not torch.equal(draw, torch.randn(5, generator=other))


def test_whole_numbers_of_any_kind_are_the_same_name():
    assert stream_seed(np.int64(3), np.int32(5)) == stream_seed(3, 5) == stream_seed(3, torch.tensor(5))
    with pytest.raises(TypeError):
        stream(0, 1.5)


def test_seeds_of_a_long_run_are_distinct_and_uniform():
    names = ("noise", "level", "probe", "subset")
    seeds = [stream_seed(0, name, step) for name in names for step in range(25_000)]
    assert len(set(seeds)) == len(seeds)
    bits = np.array(seeds, np.uint64)[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)
    z = (bits.mean(0) - 0.5) * 2 * math.sqrt(len(seeds))
    assert abs(z).max() < 4.5


def test_streams_are_independent_between_names_and_steps():
    """Correlations of normal draws between names, between steps and between seeds: z-scores within 4.5."""
    n = 4096
    keys = list(itertools.product((0, 1), ("noise", "probe", "level"), (0, 1, 2, 1000)))
    draws = torch.stack([torch.randn(n, generator=stream(*key), dtype=torch.float64) for key in keys])
    products = draws @ draws.T / math.sqrt(n)
    between = products[~torch.eye(len(keys), dtype=torch.bool)]
    assert between.abs().max() < 4.5
    # first draws only: neighbouring steps must not be related through their seeds
    first = torch.stack(
        [torch.randn(1, generator=stream(0, "noise", step)) for step in range(4096)]
    ).flatten()
    assert abs(float(first.mean())) * 64 < 4.5
    assert abs(float((first[1:] * first[:-1]).mean())) * 64 < 4.5


@settings(max_examples=40, deadline=None)
@given(
    share=st.integers(1, 5),
    world=st.integers(1, 6),
    seed=st.integers(-(2**40), 2**40),
    step=st.integers(0, 10**9),
)
def test_workers_together_draw_what_one_worker_draws(share, world, seed, step):
    batch = share * world
    whole = torch.randn((batch, 3), generator=stream(seed, "noise", step))
    parts = [
        torch.randn((batch, 3), generator=stream(seed, "noise", step))[shard(batch, rank, world)]
        for rank in range(world)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_shard_refuses_uneven_shares():
    with pytest.raises(ValueError, match="batch_size=10 with world=4"):
        shard(10, 0, 4)
    with pytest.raises(ValueError, match="rank=2 with world=2"):
        shard(10, 2, 2)
    with pytest.raises(ValueError, match="batch_size=0"):
        shard(0)


# batches


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), batch=st.integers(1, 50), epochs=st.integers(1, 3))
def test_every_epoch_sees_every_image_once(n, batch, epochs):
    images, labels = data(n, (1, 1, 1))
    batches = Batches(images, labels, batch_size=batch, seed=1)
    steps = math.ceil(epochs * n / batch)
    seen = torch.cat([batches.rows(step) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(seen[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))


def test_orders_differ_between_epochs_and_seeds():
    images, labels = data(50, (1, 1, 1))
    orders = [
        Batches(images, labels, batch_size=50, seed=seed).rows(step) for seed in (0, 1) for step in (0, 1)
    ]
    for a, b in itertools.combinations(orders, 2):
        assert not torch.equal(a, b)


def test_orders_are_uniform():
    """Each image is first in an epoch with probability 1/n: chi-square of 6,000 epochs of 6 images."""
    images, labels = data(6, (1, 1, 1))
    batches = Batches(images, labels, batch_size=6, seed=0)
    first = torch.stack([batches.rows(step)[0] for step in range(6000)])
    counts = torch.bincount(first, minlength=6).double()
    chi2 = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi2 < 25.7  # the 1e-4 quantile of 5 degrees of freedom


@pytest.mark.parametrize("flip", [False, True])
def test_a_batch_holds_its_rows_scaled_and_mirrored(flip):
    images, labels = data()
    batches = Batches(images, labels, batch_size=10, seed=5, flip=flip)
    for step in range(6):
        batch = batches.at(step)
        mirrored = batches.flips(step)
        assert torch.equal(batch.rows, batches.rows(step))
        for i, row in enumerate(batch.rows.tolist()):
            expected = images[row, :, ::-1] if mirrored[i] else images[row]
            assert np.array_equal(batch.x0[i].numpy(), expected.transpose(2, 0, 1).astype(np.float32) / 255)
        assert np.array_equal(batch.labels, labels[batch.rows])
        assert batch.x0.dtype == torch.float32 and batch.x0.is_contiguous()
        assert batch.labels.dtype == torch.int64


def test_half_of_the_images_are_mirrored():
    images, labels = data(10, (1, 2, 1))
    batches = Batches(images, labels, batch_size=100, seed=0, flip=True)
    flips = torch.stack([batches.flips(step) for step in range(400)]).double()
    assert abs(float(flips.mean()) - 0.5) * 2 * math.sqrt(flips.numel()) < 4.5
    assert ((flips.mean(0) - 0.5).abs() * 2 * 20).max() < 4.5  # each place of the batch
    plain = Batches(images, labels, batch_size=100, seed=0)
    assert not plain.flips(3).any()


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_resident_and_streamed_batches_are_bit_identical_for_any_number_of_workers(tmp_path, flip, world):
    images, labels = data()
    images.tofile(tmp_path / "images")
    mapped = np.memmap(tmp_path / "images", np.uint8, "r", 0, images.shape)
    common = {"batch_size": 10, "seed": 9, "flip": flip}
    whole = Batches(images, labels, resident=True, **common)
    workers = [
        Batches(mapped, labels, resident=False, rank=rank, world=world, **common) for rank in range(world)
    ]
    for step, *shares in zip(range(8), *(worker.run(0) for worker in workers), strict=False):
        expected = whole.at(step)
        for key in ("x0", "labels", "rows"):
            together = torch.cat([getattr(share, key) for share in shares])
            assert torch.equal(together, getattr(expected, key))


@pytest.mark.gpu
@pytest.mark.parametrize("flip", [False, True])
def test_resident_and_streamed_batches_are_bit_identical_on_a_gpu(flip):
    images, labels = data(200, (32, 32, 3))
    common = {"batch_size": 64, "seed": 9, "flip": flip, "device": "cuda"}
    whole = Batches(images, labels, resident=True, **common)
    streamed = Batches(images, labels, resident=False, **common).run(0, 20)
    for step, batch in enumerate(streamed):
        expected = whole.at(step)
        assert batch.x0.device.type == "cuda"
        assert torch.equal(batch.x0, expected.x0)
        assert torch.equal(batch.labels, expected.labels)


@settings(max_examples=20, deadline=None)
@given(first=st.integers(0, 10**7), length=st.integers(0, 7), resident=st.booleans())
def test_resuming_needs_the_step_number_only(first, length, resident):
    images, labels = data()
    fresh = Batches(images, labels, batch_size=4, seed=2, flip=True, resident=resident)
    resumed = list(
        Batches(images, labels, batch_size=4, seed=2, flip=True, resident=resident).run(first, first + length)
    )
    assert len(resumed) == length
    for step, batch in zip(range(first, first + length), resumed, strict=True):
        assert torch.equal(batch.x0, fresh.at(step).x0)


def test_errors_in_the_gathering_thread_reach_the_loop_and_the_thread_ends():
    images, labels = data()
    batches = Batches(images, labels, batch_size=4, seed=0, resident=False)
    steps = batches.run(0)
    next(steps)
    batches.images = images[:2]  # rows are missing now
    with pytest.raises(IndexError):
        list(itertools.islice(steps, 10))
    unfinished = Batches(images, labels, batch_size=4, seed=0, resident=False).run(0)
    next(unfinished)
    unfinished.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("curlfree-batches")]


def test_batches_refuse_bad_input():
    images, labels = data()
    with pytest.raises(ValueError, match=r"images must be uint8 \(N, H, W, C\), N > 0, got float64"):
        Batches(images / 255, labels, batch_size=4, seed=0)
    with pytest.raises(ValueError, match=r"labels must have shape \(23,\), got \(22,\)"):
        Batches(images, labels[1:], batch_size=4, seed=0)
    with pytest.raises(ValueError, match="batch_size=5 with world=2"):
        Batches(images, labels, batch_size=5, seed=0, world=2)


def test_all_256_values_scale_as_numpy_divides():
    values = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1)
    expected = np.arange(256, dtype=np.float32).reshape(1, 1, 16, 16) / np.float32(255)
    assert np.array_equal(to_unit(values).numpy(), expected)
    assert torch.equal((to_unit(values) * 255).round().to(torch.uint8).flatten(), values.flatten())
