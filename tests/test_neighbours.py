"""Precision and recall against brute force and against cases with known answers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from torch import Tensor

from curlfree.neighbours import covered, precision_recall


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


def features(n: int, size: int, shift: float, seed: int) -> Tensor:
    """Vectors that vary in 8 directions and slightly in all others, far from the origin."""
    axes = vectors(8, size, 99) / 8**0.5
    return (vectors(n, 8, seed) + shift) @ axes + 0.05 * vectors(n, size, seed + 100) + 1000


def margins(x: Tensor, centres: Tensor, k: int = 3) -> Tensor:
    """How deep each vector lies in a ball, squared; negative outside all: brute force in double precision."""
    radii = np.sort(cdist(centres, centres), axis=1)[:, k]
    return torch.from_numpy((radii**2 - cdist(x, centres) ** 2).max(1))


def test_every_decision_in_single_precision_is_that_of_brute_force() -> None:
    """Centring keeps the digits that the offset would cost, and no vector here is nearer to an edge."""
    real, fake = features(700, 64, 0.0, 0), features(600, 64, 0.7, 1)
    for x, centres in ((fake, real), (real, fake)):
        depth = margins(x, centres)
        length2 = float((centres - centres.mean(0)).square().sum(1).max())
        assert float(depth.abs().min()) > 1e-5 * length2  # ten times what single precision loses: no ties
        assert torch.equal(covered(x, centres, chunk=256), depth >= 0)
        assert 0.5 < float((depth >= 0).double().mean()) < 0.8
        others = (margins(x, centres, 2) >= 0) != (depth >= 0)
        assert int(others.sum()) >= 0.05 * len(x)  # a wrong radius would not go unnoticed
    found = precision_recall(real, fake, chunk=256)
    assert (found.precision, found.recall) == brute_force(real, fake, 3)


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
    few = covered(fake[:600], real[:600]).cpu()
    depth = margins(fake[:600].double().cpu(), real[:600].double().cpu())
    ties = depth.abs() < 1e-5 * float(real[:600].square().sum(1).max())
    assert torch.equal(few[~ties], depth[~ties] >= 0) and int(ties.sum()) < 30


def test_refusals() -> None:
    x = vectors(10, 2, 0)
    with pytest.raises(ValueError, match="more than k vectors"):
        precision_recall(x, x[:3])
    with pytest.raises(ValueError, match="k >= 1"):
        precision_recall(x, x, 0)
    with pytest.raises(ValueError, match="expected fake vectors"):
        precision_recall(x, vectors(10, 3, 1))
    with pytest.raises(ValueError, match="k=3 needs more than k vectors and k >= 1, got 3 centre ones"):
        covered(x, x[:3])
    with pytest.raises(ValueError, match="expected x vectors"):
        covered(vectors(10, 3, 1), x)
    with pytest.raises(TypeError, match="floating point"):
        precision_recall(x, x.long())
