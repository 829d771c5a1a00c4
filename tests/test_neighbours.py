"""Precision and recall against brute force and against cases with known answers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from torch import Tensor

from curlfree.neighbours import precision_recall


def vectors(n: int, d: int, seed: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return scale * torch.randn(n, d, generator=g, dtype=torch.float64) + shift


def brute_force(real: Tensor, fake: Tensor, k: int) -> tuple[float, float]:
    """The definition, with all distances at once from differences of coordinates."""

    def covered(x: Tensor, centres: Tensor) -> float:
        radii = np.sort(cdist(centres, centres), axis=1)[:, k]  # column 0 is the vector itself
        return float((cdist(x, centres) <= radii).any(1).mean())

    return covered(fake, real), covered(real, fake)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(6, 60),
    m=st.integers(6, 60),
    d=st.integers(1, 20),
    k=st.integers(1, 5),
    chunk=st.integers(1, 70),
    shift=st.floats(-2, 2),
    seed=st.integers(0, 10**6),
)
def test_equals_brute_force_for_every_chunk(
    n: int, m: int, d: int, k: int, chunk: int, shift: float, seed: int
) -> None:
    real, fake = vectors(n, d, seed), vectors(m, d, seed + 1, shift=shift)
    found = precision_recall(real, fake, k, chunk=chunk, dtype=torch.float64)
    assert (found.precision, found.recall) == brute_force(real, fake, k)
    assert (found.k, found.n_real, found.n_fake) == (k, n, m)


def test_single_precision_agrees_far_from_the_origin() -> None:
    """Centring keeps the digits that the offset would cost."""
    real, fake = vectors(700, 64, 0, shift=1000.0), vectors(600, 64, 1, 0.9, shift=1000.05)
    found = precision_recall(real, fake, chunk=256)
    precision, recall = brute_force(real, fake, 3)
    assert abs(found.precision - precision) <= 2 / 600
    assert abs(found.recall - recall) <= 2 / 700
    assert 0.1 < found.recall < 0.9


def test_swapping_the_sets_swaps_precision_and_recall() -> None:
    real, fake = vectors(80, 3, 0), vectors(90, 3, 1, 0.5)
    one = precision_recall(real, fake, dtype=torch.float64)
    other = precision_recall(fake, real, dtype=torch.float64)
    assert (one.precision, one.recall) == (other.recall, other.precision)
    assert one.precision > one.recall  # too narrow samples: precise, but they miss the outskirts


def test_equal_disjoint_and_partial_sets() -> None:
    real = vectors(50, 2, 0)
    same = precision_recall(real, real.clone())
    assert (same.precision, same.recall) == (1, 1)
    apart = precision_recall(real, real + 1000)
    assert (apart.precision, apart.recall) == (0, 0)
    modes = torch.cat([real, real + 100])
    half = precision_recall(modes, real)
    assert (half.precision, half.recall) == (1, 0.5)
    assert half.recall_se == pytest.approx(math.sqrt(0.25 / 100))


def test_duplicates_count_as_neighbours() -> None:
    """Four equal vectors have radius zero at k = 3; only an equal vector is inside."""
    real = torch.cat([torch.zeros(4, 2), torch.full((4, 2), 9.0)])
    fake = torch.tensor([[0.0, 0.0], [1e-3, 0.0], [9.0, 9.0], [5.0, 5.0]])
    assert precision_recall(real, fake, dtype=torch.float64).precision == 0.5


def test_invariance_under_rotation_translation_and_scale() -> None:
    real, fake = vectors(60, 4, 0), vectors(60, 4, 1, shift=0.5)
    rotation = torch.linalg.qr(vectors(4, 4, 2)).Q
    expected = precision_recall(real, fake, dtype=torch.float64)
    moved = precision_recall(7 * real @ rotation + 3, 7 * fake @ rotation + 3, dtype=torch.float64)
    assert moved == expected


def test_the_precision_setting_is_given_back() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    precision_recall(vectors(10, 2, 0), vectors(10, 2, 1))
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
def test_fifty_thousand_inception_features_fit_and_match_the_cpu() -> None:
    """50,000 x 50,000 distances of 2,048 numbers: one block of them at a time."""
    g = torch.Generator("cuda").manual_seed(0)
    real, fake = (torch.randn(50_000, 2048, generator=g, device="cuda") for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    found = precision_recall(real, fake)
    assert torch.cuda.max_memory_allocated() < 6 * 2**30
    assert found.n_real == 50_000
    few = precision_recall(real[:600], fake[:600])
    assert (few.precision, few.recall) == pytest.approx(
        brute_force(real[:600].double().cpu(), fake[:600].double().cpu(), 3), abs=2 / 600
    )


def test_refusals() -> None:
    x = vectors(10, 2, 0)
    with pytest.raises(ValueError, match="more than k vectors"):
        precision_recall(x, x[:3])
    with pytest.raises(ValueError, match="k >= 1"):
        precision_recall(x, x, 0)
    with pytest.raises(ValueError, match="expected fake vectors"):
        precision_recall(x, vectors(10, 3, 1))
    with pytest.raises(TypeError, match="floating point"):
        precision_recall(x, x.long())
