r"""The penalty: an estimate of the asymmetry with its exact gradient, by one ordinary backward.

Two forms give the same number and the same gradient.

*Double backward* differentiates the estimator itself: its products are live (`curlfree.jacobian`), so
``.backward()`` goes through a graph of a graph. It works wherever the field can be differentiated twice.

*The detached dual* needs no double backward. With a = J^T v and b = J v held fixed, the gradient of

    skew   1/2 ||(J - J^T) v||^2         is that of  <q, J v> - <v, J q>,          q = b - a,
    paper  v^T J J^T v - v^T J J v       is that of  <v, J (2a - b)> - <a, J v>.

(For skew, d 1/2||b - a||^2 = <q, dJ v> - <q, dJ^T v> and <q, dJ^T v> = <v, dJ q>.) Directional derivatives
J v and J q come from forward mode, so what is left is one backward through ordinary layers: on GPUs, where
double backward through convolutions costs far more than its arithmetic, that is the fast way. A first pass
gives J v, and J^T v by a backward to the input, and is forgotten; a second one, with the same dropout masks,
gives J v and J q for the gradient. q is a small difference of large terms, so the first pass never runs in
autocast's half precision; the second may. The value of the surrogate is not the penalty (it is twice the skew
one); the scalar returned here has the estimate's value and the surrogate's gradient.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointError

from curlfree.checks import can_look, check_batch, check_finite, check_value
from curlfree.estimators import Probe, asymmetry, check_estimator, rademacher
from curlfree.mended import FORWARD_MODE, Mended
from curlfree.operators import (
    NO_DERIVATIVE,
    Condition,
    Field,
    Replay,
    check_has_gradient,
    differentiable_point,
    frozen,
    inner,
    outside_inference,
    same_choices,
    second_order,
)

Form = Literal["auto", "double", "dual"]

AUTO_FRACTION = 1 / 32
"""``fraction="auto"``. A fraction rho of the batch adds lambda^2 Var_QC/(rho B) to the variance Var_SM/B of
score matching's gradient: at most 5 % of it if rho >= 20 lambda^2 Var_QC/Var_SM. At the paper's lambda = 1e-4
that bound was 0.003 on a trained network (D = 256); 1/32 leaves a factor of ten and costs 3 + 13/32 forward
passes instead of 3. For other weights and networks measure the bound: `curlfree.budget.penalty_noise`."""


def qc_loss(
    field: Field,
    x: Tensor,
    sigma: Tensor | None = None,
    *,
    weight: float | Tensor,
    fraction: float | Literal["auto"] = 1.0,
    estimator: str = "skew",
    form: Form = "auto",
    probes: int = 1,
    probe: Probe = rademacher,
    generator: torch.Generator | None = None,
    condition: Condition | None = None,
) -> Tensor:
    """The penalty L_QC (Eqs. 13 to 16, A5) for any training loop: add it to the loss and call `.backward()`.

    Args:
        field: the vector field, a network in training mode for example. Under DistributedDataParallel give
            the wrapped module or the bare one; call `.backward()` once, on the sum of all losses.
        x: points, of shape (B, *event).
        sigma: noise levels, of shape (B,), or None.
        weight: a number or one per sample, shape (B,): lambda times ``sigma^2`` (the paper) or ``sigma^4``.
        fraction: the part of the batch, drawn at random, that the penalty is evaluated on, at least one
            sample; "auto" is `AUTO_FRACTION`. The mean over it is unbiased for the mean over the batch, and
            the cost falls in proportion.
        estimator: a key of `curlfree.estimators.ESTIMATORS`.
        form: "double" (double backward, any estimator), "dual" (detached dual, "skew" and "paper"), or
            "auto": "dual" for fields that propagate their own tangents (`directional`), else "double", with
            a note, once for each network.
        probes: how many estimates are averaged.
        probe: the distribution of the probes.
        generator: the source of the subset and the probes; by default PyTorch's own.
        condition: keyword arguments for the field; tensors with B rows are restricted to the subset.

    Returns:
        A scalar: the mean over the batch of weight times the estimate of ``1/2 ||J - J^T||_F^2``. Its
        gradient with respect to the field's parameters is exactly that of the estimator.

    Raises:
        TypeError: `x`, `sigma` or the field's value is not a floating-point tensor.
        ValueError: a shape or value is wrong, the estimator or form is unknown, or the field has no gradient.

    Example:
        >>> loss = dsm + cf.qc_loss(net, x, sigma, weight=1e-4 * sigma**2)  # doctest: +SKIP
    """
    check_batch(x, sigma)
    weight = check_weight(weight, x)
    if fraction == "auto":
        fraction = AUTO_FRACTION
    if not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1] or 'auto', got {fraction!r}")
    x = x.detach()
    if fraction < 1:
        chosen = subset(x.shape[0], fraction, generator, x.device)
        condition = restrict(condition, chosen, x.shape[0])
        x, sigma, weight = x[chosen], None if sigma is None else sigma[chosen], weight[chosen]
    estimate = estimates(
        field,
        x,
        sigma,
        estimator=estimator,
        form=form,
        probes=probes,
        probe=probe,
        generator=generator,
        condition=condition,
    )
    return (weight * estimate).mean()


def estimates(
    field: Field,
    x: Tensor,
    sigma: Tensor | None = None,
    *,
    estimator: str = "skew",
    form: Form = "auto",
    probes: int = 1,
    probe: Probe = rademacher,
    generator: torch.Generator | None = None,
    condition: Condition | None = None,
) -> Tensor:
    """What `qc_loss` averages: one estimate of the asymmetry per sample, shape (B,), with its gradient.

    For loops that choose the samples themselves; arguments and errors are those of `qc_loss`.
    """
    check_batch(x, sigma)
    check_estimator(estimator, probes)
    if form not in ("auto", "double", "dual"):
        raise ValueError(f"unknown form {form!r}; expected 'auto', 'double' or 'dual'")
    if form == "dual" and estimator not in DUALS:
        raise ValueError(
            f"the detached dual exists for {' and '.join(DUALS)}, got {estimator!r}; use form='double'"
        )
    own = hasattr(field, "tangents") and estimator in DUALS
    if form == "auto" and not own and estimator in DUALS and isinstance(field, nn.Module):
        _note_double(field)
    if form == "double" or (form == "auto" and not own):
        return asymmetry(
            field,
            x,
            sigma,
            estimator=estimator,
            probes=probes,
            probe=probe,
            generator=generator,
            condition=condition,
        )
    vs = tuple(probe(x, generator) for _ in range(probes))
    return dual(field, x, sigma, vs, estimator=estimator, condition=condition)


_noted: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def _note_double(field: nn.Module) -> None:
    """Say once for a network that it takes the slow way."""
    if field not in _noted:
        _noted.add(field)
        warnings.warn(
            f"{type(field).__name__} has no method `tangents`, so its penalty takes double backward, which "
            "is slow through convolutions on GPUs: try form='dual', compared once by "
            "curlfree.fast.choose_form; form='double' keeps this way without this note",
            stacklevel=4,
        )


def check_weight(weight: float | Tensor, x: Tensor) -> Tensor:
    """The weights of the samples, shape (B,).

    Raises:
        ValueError: neither a number nor one number per sample, or (found on the CPU) not finite.
    """
    if not isinstance(weight, Tensor):
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = torch.full((), float(weight), device=x.device, dtype=dtype)
    if weight.shape not in ((), x.shape[:1]):
        raise ValueError(
            f"weight must be a number or one per sample, shape ({x.shape[0]},), got {tuple(weight.shape)}"
        )
    check_finite("weight", weight)
    return weight.to(x.device).expand(x.shape[0])


def subset(batch: int, fraction: float, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """The indices of a random part of the batch, at least one, without replacement."""
    source = device if generator is None else generator.device
    order = torch.randperm(batch, generator=generator, device=source)
    return order[: max(1, round(fraction * batch))].to(device)


def restrict(condition: Condition | None, chosen: Tensor, batch: int) -> Condition | None:
    """The conditioning arguments of the chosen samples, inside lists and dictionaries, too.

    Whatever has no row per sample is passed as it is.
    """
    if condition is None:
        return None

    def rows(value: Any) -> Any:
        return value[chosen] if isinstance(value, Tensor) and value.shape[:1] == (batch,) else value

    return {name: tree_map(rows, value) for name, value in condition.items()}


def dual(
    field: Field,
    x: Tensor,
    sigma: Tensor | None,
    vs: tuple[Tensor, ...],
    *,
    estimator: str = "skew",
    condition: Condition | None = None,
) -> Tensor:
    """The probes' mean estimate per sample, shape (B,), for one ordinary backward (the detached dual).

    Args:
        field: the vector field; its random choices (dropout) are drawn once and replayed, or given to both
            passes if it has a method ``draw_masks(B)`` and an argument `masks`.
        x: points, of shape (B, *event).
        sigma: noise levels, of shape (B,), or None.
        vs: the probes, each like x; all share both passes.
        estimator: "skew" or "paper".
        condition: keyword arguments for the field.

    Raises:
        ValueError: the field has no forward-mode rule or no gradient, uses activation checkpointing, or
            (found on the CPU only, where looking is free) draws random numbers that cannot be replayed.
    """
    with torch.inference_mode(False), torch.enable_grad():
        condition, replay = same_choices(field, x, condition)
        point = differentiable_point(x.detach().clone())  # forward mode refuses expanded tensors
        vs, sigma = tuple(outside_inference(v) for v in vs), outside_inference(sigma)
        with frozen(field), torch.autocast(x.device.type, enabled=False):
            value, Jvs, JTvs = products(field, point, sigma, vs, condition)
        found = [DUALS[estimator](*three) for three in zip(vs, Jvs, JTvs, strict=True)]
        estimates, lefts, rights = zip(*found, strict=True)
        with replay:
            again, Js = directional(field, point.detach(), sigma, (*vs, *rights), condition)
    comparable = isinstance(replay, Replay) and not torch.is_autocast_enabled(x.device.type)
    if comparable and can_look(value) and not torch.equal(value, again):
        raise ValueError(
            "the field gave two values at one point although the random state was replayed: expected random "
            "choices from PyTorch's own generators; use form='double', which evaluates the field once"
        )
    slopes = [inner(a, b) for a, b in zip((*lefts, *vs), Js, strict=True)]
    surrogate = sum(slopes[1:], slopes[0]) / len(vs)
    return sum(estimates[1:], estimates[0]) / len(vs) + (surrogate - surrogate.detach())


def products(
    field: Field,
    point: Tensor,
    sigma: Tensor | None,
    vs: tuple[Tensor, ...],
    condition: Condition | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The field's value, ``J v`` and ``J^T v`` for each v, without the parameters' graph.

    Raises:
        ValueError: as `dual`.
    """
    value, Jvs = directional(field, point, sigma, vs, condition)
    check_has_gradient(value)
    try:
        JTvs = [
            torch.autograd.grad(value, point, v.to(value.dtype), retain_graph=i + 1 < len(vs))[0]
            for i, v in enumerate(vs)
        ]
    except CheckpointError as error:
        raise ValueError(
            "activation checkpointing does not recompute forward-mode tangents; use form='double'"
        ) from error
    return value.detach(), [Jv.detach() for Jv in Jvs], JTvs


Dual = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _skew_dual(v: Tensor, Jv: Tensor, JTv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The estimate and (l, r) with gradient that of ``<l, J v> + <v, J r>``: l = q, r = -q."""
    q = Jv - JTv
    return 0.5 * inner(q, q), q, -q


def _paper_dual(v: Tensor, Jv: Tensor, JTv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The estimate and (l, r) with gradient that of ``<l, J v> + <v, J r>``: l = -a, r = 2a - b."""
    return inner(JTv, JTv) - inner(JTv, Jv), -JTv, 2 * JTv - Jv


DUALS: Mapping[str, Dual] = {"skew": _skew_dual, "paper": _paper_dual}


def directional(
    field: Field, x: Tensor, sigma: Tensor | None, vs: tuple[Tensor, ...], condition: Condition | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The field's value and ``J v`` for each v by forward mode, all in the parameters' graph.

    A field with a method ``tangents(x, sigma, vs, **condition) -> (value, (J v, ...))`` propagates them
    itself, as `curlfree.nets.NCSNpp` does: all tangents share the primal, and each layer acts once on the
    whole stack. Any other goes through PyTorch's forward mode, once for each v with the random choices
    replayed; there every convolution runs a third time, on zeros.

    Raises:
        ValueError: the field contains an operation without a forward-mode rule, or loses the tangent.
    """
    tangents = getattr(field, "tangents", None)
    if tangents is not None:
        value, products = tangents(x, sigma, tuple(v.to(x.dtype) for v in vs), **(condition or {}))
        check_value(value, x)
        return value, products
    replay = Replay(x.device)
    value, *rest = _forward_mode(field, x, sigma, vs[0], condition)
    for v in vs[1:]:
        with replay:
            rest.append(_forward_mode(field, x, sigma, v, condition)[1])
    return value, tuple(rest)


def _forward_mode(
    field: Field, x: Tensor, sigma: Tensor | None, v: Tensor, condition: Condition | None = None
) -> tuple[Tensor, Tensor]:
    with second_order(), forward_ad.dual_level(), Mended(FORWARD_MODE):
        try:
            out = field(forward_ad.make_dual(x, v.to(x.dtype)), sigma, **(condition or {}))
        except NotImplementedError as error:
            raise ValueError(
                "the detached dual needs forward-mode derivatives, and the field uses an operation that has "
                f"none; use form='double' ({str(error).splitlines()[0]}); of DistributedDataParallel with "
                "unused parameters or a static graph give the bare module"
            ) from error
        check_value(out, x)
        value, Jv = forward_ad.unpack_dual(out)
    if Jv is None:
        raise ValueError(
            "the field lost the forward-mode tangent: expected operations that forward mode can follow from "
            "x; use form='double', or remove .detach() inside the field"
        )
    return value, Jv


def algorithm1(
    field: Field,
    x: Tensor,
    sigma: Tensor | None,
    v: Tensor,
    *,
    weight: float | Tensor = 1.0,
    condition: Condition | None = None,
) -> Tensor:
    """The paper's Algorithm 1 to the letter: two backward stages, gradients left in the parameters' `.grad`.

    A reference for tests and benchmarks; `qc_loss` with estimator="paper" has the same gradient at 0.7 of the
    cost. The stop-gradient cuts the graph of v^T J, and stage (5) puts back the gradient that was lost.

    Args:
        field: the vector field.
        x: points, of shape (B, *event).
        sigma: noise levels, of shape (B,), or None.
        v: the probe, like x.
        weight: a number or one per sample, shape (B,).
        condition: keyword arguments for the field.

    Returns:
        The detached loss, the mean over the batch of weight times ``v^T J J^T v - v^T J J v``.

    Raises:
        TypeError: as `qc_loss`.
        ValueError: as `qc_loss`; v is not like x.
    """
    check_batch(x, sigma)
    weight = check_weight(weight, x)
    if v.shape != x.shape:
        raise ValueError(f"v must have x's shape {tuple(x.shape)}, got {tuple(v.shape)}")
    x = x.detach().requires_grad_()
    s = field(x, sigma, **(condition or {}))
    check_value(s, x)
    check_has_gradient(s)
    (vJ,) = torch.autograd.grad(inner(v, s).sum(), x, create_graph=True, allow_unused=True)  # (1)
    if vJ is None:
        raise ValueError(NO_DERIVATIVE)
    vJ_sg = vJ.detach().requires_grad_()
    (vJJ,) = torch.autograd.grad(inner(vJ_sg, s).sum(), x, create_graph=True)  # (2)
    loss = (weight * (inner(vJ, vJ) - inner(vJJ, v))).mean()  # (3)
    loss.backward(retain_graph=True)  # (4) the primary component; leaves -weight J v / B in vJ_sg.grad
    vJ.backward(vJ_sg.grad)  # (5) the secondary component
    return loss.detach()
