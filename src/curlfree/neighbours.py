r"""Improved precision and recall by nearest neighbours (Kynkäänniemi et al. 2019, arXiv:1904.06991).

The manifold of a set of feature vectors is estimated by balls around each, with radius the distance to its
k-th nearest neighbour in the same set. Precision is the share of generated vectors in a ball of a real one,
recall the share of real vectors in a ball of a generated one. The paper (Table 1, and its appendix) takes
k = 3; the features are the points themselves in two dimensions, those of a network for images.

Both are exact. Of the distance matrix only one block of rows by columns exists at a time. Distances are
``|a|^2 + |b|^2 - 2ab`` by matrix products of vectors centred on the mean of the balls' centres, in full
float32 (no TF32) or in float64. Float32 is wrong by about 1e-6 of the vectors' squared lengths, which decides
for vectors at the very edge of a ball; so does every implementation's rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from curlfree.checks import check_floating


@dataclass(frozen=True)
class PrecisionRecall:
    """Precision and recall with the binomial standard errors of their counts.

    The errors hold the other set, and so its balls, fixed.
    """

    precision: float
    precision_se: float
    recall: float
    recall_se: float
    k: int
    n_real: int
    n_fake: int


def precision_recall(
    real: Tensor, fake: Tensor, k: int = 3, *, chunk: int = 8192, dtype: torch.dtype = torch.float32
) -> PrecisionRecall:
    """Improved precision and recall, on the device of the vectors.

    Args:
        real: feature vectors of data, shape (N, D).
        fake: feature vectors of samples, shape (M, D).
        k: which neighbour sets the radius.
        chunk: rows and columns of the largest block of distances.
        dtype: the type of the distances; float64 where vectors lie close together far from their mean.

    Returns:
        Both with their standard errors.

    Raises:
        ValueError: the sets do not fit together or are too small for k.
    """
    for name, vectors in (("real", real), ("fake", fake)):
        _check(name, vectors, real, k)
    precision = float(covered(fake, real, k, chunk=chunk, dtype=dtype).double().mean())
    recall = float(covered(real, fake, k, chunk=chunk, dtype=dtype).double().mean())
    return PrecisionRecall(
        precision=precision,
        precision_se=(precision * (1 - precision) / len(fake)) ** 0.5,
        recall=recall,
        recall_se=(recall * (1 - recall) / len(real)) ** 0.5,
        k=k,
        n_real=len(real),
        n_fake=len(fake),
    )


def covered(
    x: Tensor, centres: Tensor, k: int = 3, *, chunk: int = 8192, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Which vectors lie in the manifold of others: in a ball around one of the centres.

    Args:
        x: feature vectors, shape (M, D).
        centres: feature vectors, shape (N, D), whose k-th neighbours among themselves set the radii.
        k: which neighbour sets the radius.
        chunk: rows and columns of the largest block of distances.
        dtype: the type of the distances.

    Returns:
        Truth values, shape (M,).

    Raises:
        ValueError: the sets do not fit together, or there are too few centres for k.
    """
    _check("centre", centres, centres, k)
    _check("x", x, centres)
    origin = centres.double().mean(0)
    x, centres = ((vectors.double() - origin).to(dtype) for vectors in (x, centres))
    with full_precision():
        return _covered(x, centres, _radii(centres, k, chunk), chunk)


def _check(name: str, vectors: Tensor, like: Tensor, k: int | None = None) -> None:
    check_floating(name, vectors)
    if vectors.ndim != 2 or vectors.shape[1] != like.shape[1]:
        raise ValueError(f"expected {name} vectors of shape (N, D), got {tuple(vectors.shape)}")
    if k is not None and not 1 <= k < len(vectors):
        raise ValueError(f"k={k} needs more than k vectors and k >= 1, got {len(vectors)} {name} ones")


def _radii(x: Tensor, k: int, chunk: int) -> Tensor:
    """Squared distances to the k-th nearest other vector, shape (N,)."""
    radii = []
    for rows in _slices(len(x), chunk):
        nearest = x.new_empty(len(x[rows]), 0)
        for columns in _slices(len(x), chunk):
            block = _squared_distances(x[rows], x[columns])
            if rows == columns:
                block.fill_diagonal_(torch.inf)
            nearest = torch.cat([nearest, block.topk(min(k, block.shape[1]), largest=False).values], 1)
            nearest = nearest.topk(min(k, nearest.shape[1]), largest=False).values
        radii.append(nearest[:, -1])
    return torch.cat(radii)


def _covered(x: Tensor, centres: Tensor, radii: Tensor, chunk: int) -> Tensor:
    """Which rows of x are in a ball around a centre, shape (len(x),)."""
    covered = []
    for rows in _slices(len(x), chunk):
        inside = torch.zeros(len(x[rows]), dtype=torch.bool, device=x.device)
        for columns in _slices(len(centres), chunk):
            inside |= (_squared_distances(x[rows], centres[columns]) <= radii[columns]).any(1)
        covered.append(inside)
    return torch.cat(covered)


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    norms = a.square().sum(1, keepdim=True) + b.square().sum(1)
    return torch.addmm(norms, a, b.T, alpha=-2).clamp_(min=0)


def _slices(n: int, chunk: int) -> list[slice]:
    return [slice(i, min(i + chunk, n)) for i in range(0, n, chunk)]


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products in the precision of their arguments, without TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
