r"""Estimators: the size of the skew part of a Jacobian from a few products with it.

The asymmetry of a field at a point (Eq. 10 without its expectation) is
``Asym = 1/2 ||J - J^T||_F^2 = tr(J J^T) - tr(J J) = 2 ||K||_F^2`` (Eqs. 13 and 14). With a random probe v,
``E[v v^T] = I``, a quadratic form has ``E[v^T A v] = tr A`` (Hutchinson, Eq. 3) and, if A = A^T, variance

    Gaussian     2 ||A||^2
    Rademacher   2 (||A||^2 - sum_i A_ii^2)
    sphere       D/(D+2) (2 ||A||^2 + tr(A)^2) - tr(A)^2.

Each estimator below is a function of a linearised field J and of ``draw``, which gives a fresh probe. It
returns a pair (estimate of Asym, estimate of ||J||_F^2), each of shape (B,), from the same products, so that
a loss that has linearised the field already need not do it again. Its docstring gives the symmetric matrices
whose quadratic forms it is, hence the variance, and the cost in network passes (one pass = one evaluation of
the field; a backward pass to the input counts as one; J v by differentiating J^T u as two after a first one).
N stands for ``-2 K^2 = 2 K^T K``, [S, K] = SK - KS.

All are unbiased but `loop`, that is `pair` by central differences. Adding a gradient field leaves `exact`,
`skew` and `pair` unchanged draw by draw, `est` and `paper` only in expectation.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from curlfree.checks import check_batch, check_sigma, check_value
from curlfree.operators import (
    Condition,
    Field,
    Operator,
    central_difference,
    flat,
    inner,
    jacobian,
    per_sample,
    same_choices,
)

Draw = Callable[[], Tensor]
Probe = Callable[[Tensor, torch.Generator | None], Tensor]
Moments = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Estimator:
    """An estimator by its name in the contract.

    Args:
        moments: (J, draw) -> (Asym, ||J||_F^2), each of shape (B,).
        linearise: what gives it the products that it needs.
        random: whether it draws probes.
    """

    moments: Callable[[Operator, Draw], Moments]
    linearise: Callable[..., tuple[Tensor, Operator]] = jacobian
    random: bool = True


def rademacher(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A probe of independent signs, like `like`; no diagonal term in its variance, so rarely worse."""
    bits = torch.randint(0, 2, like.shape, generator=generator, device=_device(like, generator))
    return (2 * bits - 1).to(like.device, like.dtype)


def gaussian(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A probe of independent standard normal numbers, like `like`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    v = torch.randn(like.shape, generator=generator, device=_device(like, generator), dtype=dtype)
    return v.to(like.device, like.dtype)


def sphere(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A probe uniform on the sphere of radius sqrt(D), like `like`."""
    v = flat(gaussian(like, generator))
    return (v * math.sqrt(v.shape[1]) / v.norm(dim=1, keepdim=True)).view_as(like)


def _device(like: Tensor, generator: torch.Generator | None) -> torch.device:
    return like.device if generator is None else generator.device


def exact(J: Operator, _: Draw) -> Moments:
    """``1/2 ||J - J^T||_F^2`` from the dense Jacobian (Eq. 13): no variance, 1 + D passes."""
    matrix = J.dense()
    return 0.5 * (matrix - matrix.mT).square().sum((1, 2)), matrix.square().sum((1, 2))


def trace(J: Operator, _: Draw) -> Moments:
    """``tr(J J^T) - tr(J J)`` from the dense Jacobian (Eq. 14): no variance, 1 + D passes."""
    matrix = J.dense()
    norm2 = matrix.square().sum((1, 2))
    return norm2 - (matrix * matrix.mT).sum((1, 2)), norm2


def est(J: Operator, draw: Draw) -> Moments:
    """``v^T J J^T v - w^T J J w`` with independent v and w (Eq. 15).

    Expectation tr(J J^T) - tr(J J). Variance: that of ``J J^T`` plus that of ``S^2 + K^2``, so orders of
    magnitude above `paper`, whose common probe cancels S^2. Cost: 4 passes.
    """
    v, w = draw(), draw()
    vJ, wJ = J.T @ v, J.T @ w
    norm2 = inner(vJ, vJ)
    return norm2 - inner(J.T @ wJ, w), norm2


def paper(J: Operator, draw: Draw) -> Moments:
    """``v^T J J^T v - v^T J J v`` with one probe (Eq. 16, Alg. 1).

    Expectation tr(J J^T) - tr(J J). Variance: that of ``N - [S, K]``; can be negative. Cost: 3 passes.
    Both products are live, so one ordinary backward gives the exact gradient: the stop-gradient of Alg. 1 and
    its second backward stage are not needed.
    """
    v = draw()
    vJ = J.T @ v
    norm2 = inner(vJ, vJ)
    return norm2 - inner(J.T @ vJ, v), norm2


def skew(J: Operator, draw: Draw) -> Moments:
    """``1/2 ||(J - J^T) v||^2 = 2 ||K v||^2`` with one probe.

    Expectation 2 ||K||^2 = Asym. Variance: that of ``N`` alone; never negative; with Gaussian probes never
    above `paper`'s, which differs by ``-2 v^T S K v`` of mean 0. In 2-D it is exact for Rademacher and sphere
    probes, since K^T K is a multiple of I. Cost: 5 passes, 4 with forward mode.
    """
    v = draw()
    Jv, JTv = J @ v, J.T @ v
    difference = Jv - JTv
    return 0.5 * inner(difference, difference), 0.5 * (inner(Jv, Jv) + inner(JTv, JTv))


def pair(J: Operator, draw: Draw) -> Moments:
    """``1/2 (u^T J v - v^T J u)^2 = 2 (u^T K v)^2``, the rank-one form, with two probes.

    Expectation 2 ||K||^2 = Asym. With P = K^T K and p = tr P the variance is
    ``4 (2 p^2 + 6 ||P||^2)`` (Gaussian),
    ``4 (2 p^2 + 6 ||P||^2 - 12 sum_i P_ii^2 + 4 sum_ij K_ij^4)`` (Rademacher),
    ``4 (3 (D/(D+2))^2 (p^2 + 2 ||P||^2) - p^2)`` (sphere): relative variance about 2 whatever D, enough to
    monitor, not to train. Two products J v and J u only.
    Cost: 6 passes, 5 with forward mode.
    """
    u, v = draw(), draw()
    uJv, vJu = inner(u, J @ v), inner(v, J @ u)
    return 0.5 * (uJv - vJu).square(), 0.5 * (uJv.square() + vJu.square())


def loop(D: Operator, draw: Draw) -> Moments:
    """`pair` by central differences: the work around a parallelogram of sides h u and h v, without autodiff.

    With ``D v = [s(x + h v/2) - s(x - h v/2)]/h`` (`curlfree.operators.central_difference`) for J v. The
    expectation is Asym with a bias of order h^2 (h = 0.019 sigma in single precision), 0 for linear fields.
    Variance: that of `pair`. Cost: 5 forward passes (the value, and four corners).
    """
    return pair(D, draw)


ESTIMATORS: dict[str, Estimator] = {
    "exact": Estimator(exact, random=False),
    "trace": Estimator(trace, random=False),
    "est": Estimator(est),
    "paper": Estimator(paper),
    "skew": Estimator(skew),
    "pair": Estimator(pair),
    "loop": Estimator(loop, linearise=central_difference),
}


def moments(
    field: Field,
    x: Tensor,
    sigma: Tensor | None = None,
    *,
    estimator: str = "skew",
    probes: int = 1,
    probe: Probe = rademacher,
    generator: torch.Generator | None = None,
    condition: Condition | None = None,
) -> Moments:
    """Estimates of ``1/2 ||J - J^T||_F^2`` and of ``||J||_F^2``, each of shape (B,), means over the probes.

    Args:
        field: the vector field.
        x: points, of shape (B, *event).
        sigma: noise levels, of shape (B,), or None.
        estimator: a key of `ESTIMATORS`.
        probes: how many independent estimates are averaged; all use one linearisation.
        probe: `rademacher`, `gaussian` or `sphere`.
        generator: the source of the probes; by default PyTorch's own.
        condition: keyword arguments for the field.

    Raises:
        TypeError: as `jacobian`; with "loop" a field in half precision.
        ValueError: as `jacobian`; an unknown estimator; less than one probe.
    """
    chosen = check_estimator(estimator, probes)
    _, J = chosen.linearise(field, x, sigma, condition=condition)
    count = probes if chosen.random else 1
    draws = [chosen.moments(J, lambda: probe(J.like, generator)) for _ in range(count)]
    asym, norm2 = zip(*draws, strict=True)
    return sum(asym[1:], asym[0]) / count, sum(norm2[1:], norm2[0]) / count


def check_estimator(estimator: str, probes: int) -> Estimator:
    """The estimator of that name.

    Raises:
        TypeError: the number of probes is not an integer.
        ValueError: there is no such estimator, or the number of probes is not positive.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}; expected one of {', '.join(ESTIMATORS)}")
    if not isinstance(probes, int):
        raise TypeError(f"probes must be an integer, how many estimates are averaged, got {probes!r}")
    if probes < 1:
        raise ValueError(f"probes must be at least 1, got {probes}")
    return ESTIMATORS[estimator]


def asymmetry(
    field: Field,
    x: Tensor,
    sigma: Tensor | None = None,
    *,
    estimator: str = "skew",
    probes: int = 1,
    probe: Probe = rademacher,
    generator: torch.Generator | None = None,
    condition: Condition | None = None,
) -> Tensor:
    """Per-sample estimates of ``1/2 ||J - J^T||_F^2`` (Eqs. 10, 13 to 16), shape (B,).

    Arguments and errors are those of `moments`. If gradients are enabled the result can be differentiated
    with respect to the field's parameters by one ordinary backward. Under autocast the products are in half
    precision and so is their difference: below NAsym of about 1e-5 leave autocast to measure.

    Example:
        >>> import torch, curlfree as cf
        >>> rotation = lambda x, sigma: torch.stack([-x[:, 1], x[:, 0]], dim=1)
        >>> cf.asymmetry(rotation, torch.ones(3, 2))
        tensor([4., 4., 4.])
    """
    return moments(
        field,
        x,
        sigma,
        estimator=estimator,
        probes=probes,
        probe=probe,
        generator=generator,
        condition=condition,
    )[0]


def normalized_asymmetry(
    field: Field,
    x: Tensor,
    sigma: Tensor | None = None,
    *,
    estimator: str = "exact",
    probes: int = 1,
    probe: Probe = rademacher,
    generator: torch.Generator | None = None,
    condition: Condition | None = None,
) -> Tensor:
    """``||K||_F^2 / ||J||_F^2`` in [0, 1] per sample, 0 where J = 0 (Eqs. A2, A3), shape (B,).

    Arguments and errors are those of `moments`. With anything but "exact" and "trace" this is a ratio of
    estimates: its expectation is NOT the ratio of expectations (the last equality of Eq. A3 is wrong; the
    faster J's spectrum decays, the more). To average over samples use the pooled ratio of `curlfree.audit`.
    """
    asym, norm2 = moments(
        field,
        x,
        sigma,
        estimator=estimator,
        probes=probes,
        probe=probe,
        generator=generator,
        condition=condition,
    )
    return ratio(asym, norm2)


def ratio(asym: Tensor, norm2: Tensor) -> Tensor:
    """NAsym from Asym and ||J||_F^2: ``Asym / (2 ||J||^2)``, and 0 where J = 0."""
    return torch.where(norm2 == 0, 0.0, 0.5 * asym / torch.where(norm2 == 0, 1.0, norm2))


def circle_work(
    field: Field,
    x0: Tensor,
    sigma: Tensor,
    z1: Tensor,
    z2: Tensor,
    *,
    nodes: int = 8,
    condition: Condition | None = None,
) -> Tensor:
    """The work of the field, in nats for a score, around one great circle of noise, node by node.

    ``x(theta) = x0 + sigma (z1 cos theta + z2 sin theta)`` has the distribution N(x0, sigma^2 I) at every
    theta, so all nodes are typical noisy samples. The closed integral of ``s . dx`` is taken by the trapezoid
    rule, which converges spectrally on a circle.

    Args:
        field: the vector field.
        x0: centres, of shape (B, *event).
        sigma: radii, of shape (B,).
        z1: unit noise like x0.
        z2: unit noise like x0, independent of z1.
        nodes: how many points on the circle, at least 3.
        condition: keyword arguments for the field.

    Returns:
        What each node contributes, shape (nodes, B). Their sum is the work; with an even number of nodes,
        twice the sum of every second one is the work by half as many, and the difference the error's size.

    Raises:
        TypeError: `x0` or `sigma` is not a floating-point tensor.
        ValueError: a shape or a value is wrong, or there are fewer than 3 nodes.
    """
    check_batch(x0, None)
    check_sigma(sigma, x0)
    if z1.shape != x0.shape or z2.shape != x0.shape:
        raise ValueError(
            f"the noise must have x0's shape {tuple(x0.shape)}, got {tuple(z1.shape)} and {tuple(z2.shape)}"
        )
    if nodes < 3:
        raise ValueError(f"a loop needs at least 3 nodes, got {nodes}")
    radius = per_sample(sigma, x0)
    arguments, replay = same_choices(field, x0, condition)
    work = []
    for k in range(nodes):
        c, s = math.cos(2 * math.pi * k / nodes), math.sin(2 * math.pi * k / nodes)
        with replay if k else nullcontext():
            value = field(x0 + radius * (c * z1 + s * z2), sigma, **arguments)
        check_value(value, x0)
        work.append(2 * math.pi / nodes * inner(value, radius * (c * z2 - s * z1)))
    return torch.stack(work)


def loop_work(
    field: Field,
    x0: Tensor,
    sigma: Tensor,
    *,
    nodes: int = 8,
    generator: torch.Generator | None = None,
    condition: Condition | None = None,
) -> Tensor:
    """The work in nats around a random great circle of noise about each x0 (`circle_work`), shape (B,).

    A conservative field does none. For a linear field each draw is ``2 pi sigma^2 z2^T K z1`` exactly; in
    general the rms over draws is ``2 pi sigma^2 ||K||_F`` to leading order. The generator gives z1, then z2.
    Forward passes only: `nodes` of them, all with the same random choices (dropout masks).
    """
    check_batch(x0, None)
    z1, z2 = gaussian(x0, generator), gaussian(x0, generator)
    return circle_work(field, x0, sigma, z1, z2, nodes=nodes, condition=condition).sum(0)
