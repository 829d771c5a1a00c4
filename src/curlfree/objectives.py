r"""Objectives: score matching in its four forms, and the total loss.

Each function returns one loss per sample, shape (B,), with the 1/2 of Eqs. 1 and 5, summed over dimensions.
ESM and DSM compare with a known score; ISM and SSM need none, but the trace of the Jacobian. At the optimum
all four give the score of the distribution of x: of the clean data with sigma = None, of the data plus noise
of standard deviation sigma otherwise.

The time-weighted forms (Eqs. A4, A5) multiply both losses by a function of the level. A score is O(1/sigma)
and its Jacobian O(1/sigma^2), so ``sigma^2`` makes score matching the same at all levels, but leaves the
penalty proportional to sigma^-2: with the paper's levels, 0.01 to 50, a statistic of the smallest ones only.
``sigma^4`` is the penalty of the denoiser's Jacobian, the same at all levels. (Eq. A4 drops the 1/2 of Eq. 5,
which halves the effective lambda; here it is kept everywhere.)
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from curlfree.checks import check_batch, check_value
from curlfree.estimators import Probe, rademacher
from curlfree.operators import Condition, Field, inner, jacobian, per_sample
from curlfree.penalty import Form, check_weight, qc_loss

Weighting = Callable[[Tensor], Tensor]


def sigma2(sigma: Tensor) -> Tensor:
    """The paper's weight of a noise level, ``sigma^2``."""
    return sigma.square()


def sigma4(sigma: Tensor) -> Tensor:
    """The weight that makes the penalty that of the denoiser's Jacobian, ``sigma^4``."""
    return sigma.square().square()


def esm(
    field: Field, x: Tensor, sigma: Tensor | None, score: Tensor, *, condition: Condition | None = None
) -> Tensor:
    """Explicit score matching, ``1/2 ||s(x) - score||^2`` (Eq. 1).

    Args:
        field: the model s.
        x: points, of shape (B, *event).
        sigma: noise levels, of shape (B,), or None.
        score: the true score at x.
        condition: keyword arguments for the field.
    """
    check_batch(x, sigma)
    s = field(x, sigma, **(condition or {}))
    check_value(s, x)
    if score.shape != x.shape:
        raise ValueError(f"score must have x's shape {tuple(x.shape)}, got {tuple(score.shape)}")
    return 0.5 * inner(s - score, s - score)


def dsm(field: Field, x0: Tensor, sigma: Tensor, z: Tensor, *, condition: Condition | None = None) -> Tensor:
    """Denoising score matching at ``x = x0 + sigma z``, ``1/2 ||s(x) + z/sigma||^2`` (Eqs. 5, A4).

    Args:
        field: the model s.
        x0: clean data, of shape (B, *event).
        sigma: noise levels, of shape (B,).
        z: unit noise like x0.
        condition: keyword arguments for the field.
    """
    check_batch(x0, sigma)
    if z.shape != x0.shape:
        raise ValueError(f"z must have x0's shape {tuple(x0.shape)}, got {tuple(z.shape)}")
    level = per_sample(sigma, x0)
    return esm(field, x0 + level * z, sigma, -z / level, condition=condition)


def ism(
    field: Field, x: Tensor, sigma: Tensor | None = None, *, condition: Condition | None = None
) -> Tensor:
    """Implicit score matching, ``1/2 ||s(x)||^2 + tr J`` (Eq. 2), by D backward passes."""
    s, J = jacobian(field, x, sigma, condition=condition)
    divergence = sum(row[:, i] for i, row in enumerate(J.rows()))
    return 0.5 * inner(s, s) + divergence


def ssm(
    field: Field, x: Tensor, sigma: Tensor | None, v: Tensor, *, condition: Condition | None = None
) -> Tensor:
    """Sliced score matching, ``1/2 ||s(x)||^2 + v^T J v`` (Eqs. 3, 4), with a probe v like x."""
    s, J = jacobian(field, x, sigma, condition=condition)
    return 0.5 * inner(s, s) + inner(J.T @ v, v)


class Loss(NamedTuple):
    """The total loss and its two parts, the penalty without lambda; each a scalar."""

    total: Tensor
    score_matching: Tensor
    qc: Tensor


def total_loss(
    score_matching: Tensor,
    field: Field,
    x: Tensor,
    sigma: Tensor | None,
    *,
    lmbda: float,
    weighting: Weighting = sigma2,
    qc_weighting: Weighting | None = None,
    estimator: str = "skew",
    form: Form = "auto",
    fraction: float | Literal["auto"] = 1.0,
    probes: int = 1,
    probe: Probe = rademacher,
    generator: torch.Generator | None = None,
    condition: Condition | None = None,
) -> Loss:
    """``L_Total = L_SM + lambda L_QC`` (Eq. 12), each weighted by level (Eqs. A4, A5).

    Args:
        score_matching: losses per sample, shape (B,), from `esm`, `ism`, `ssm` or `dsm`.
        field: the model s.
        x: the points at which the penalty is taken, of shape (B, *event).
        sigma: their noise levels, of shape (B,), or None (then nothing is weighted).
        lmbda: the penalty's factor; with 0 nothing but the score matching is evaluated and no number drawn.
        weighting: the level's weight in both terms.
        qc_weighting: the level's weight in the penalty, if another.
        estimator: as in `qc_loss`, like all that follow.
        form: "auto", "double" or "dual".
        fraction: the part of the batch that the penalty is evaluated on, or "auto".
        probes: how many estimates are averaged.
        probe: the distribution of the probes.
        generator: the source of the subset and the probes.
        condition: keyword arguments for the field.

    Returns:
        The scalars; call ``.total.backward()`` once.
    """
    check_batch(x, sigma)
    if score_matching.shape != x.shape[:1]:
        raise ValueError(
            f"score_matching must have one loss per sample, shape ({x.shape[0]},), got "
            f"{tuple(score_matching.shape)}; leave the mean to total_loss"
        )
    if not math.isfinite(lmbda):
        raise ValueError(f"lmbda must be finite, got {lmbda}")
    weight = check_weight(1.0 if sigma is None else weighting(sigma), x)
    sm = (weight * score_matching).mean()
    if lmbda == 0:
        return Loss(sm, sm.detach(), torch.zeros_like(sm))
    qc = qc_loss(
        field,
        x,
        sigma,
        weight=1.0 if sigma is None else (qc_weighting or weighting)(sigma),
        fraction=fraction,
        estimator=estimator,
        form=form,
        probes=probes,
        probe=probe,
        generator=generator,
        condition=condition,
    )
    return Loss(sm + lmbda * qc, sm.detach(), qc.detach())
