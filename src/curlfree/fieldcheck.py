"""One look at a field before it is trusted: what every later, cheaper call takes for granted.

An estimate is per sample only if samples do not mix, has a meaning only if the field is one function of x,
and exists only if autograd can follow it. `check_field` tests that once, by a few evaluations on two samples
or more, on any device; the calls that follow test shapes and types only.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from curlfree.checks import check_batch, check_value
from curlfree.estimators import gaussian
from curlfree.operators import Condition, Field, inner, jacobian, same_choices


def check_field(
    field: Field, x: Tensor, sigma: Tensor | None = None, *, condition: Condition | None = None
) -> None:
    """Find out whether a field can be measured and penalised, and say what is wrong if it cannot.

    Checked on the batch given, which must have at least two samples: in the mode it is in, the values at the
    first and the last sample depend on no other sample. In evaluation mode (modules are put there, and back):
    the value has x's shape and is finite; two evaluations agree; the value has a gradient, which can be
    differentiated again, and whose two products satisfy ``<u, J v> = <J^T u, v>``.

    Args:
        field: the vector field.
        x: points, of shape (B, *event) with B >= 2.
        sigma: noise levels, of shape (B,), or None.
        condition: keyword arguments for the field.

    Raises:
        TypeError: `x`, `sigma` or the field's value is not a floating-point tensor.
        ValueError: what is wrong, what was expected, how to mend it.
    """
    check_batch(x, sigma)
    if x.shape[0] < 2:
        raise ValueError(f"check_field needs at least two samples to see whether they mix, got {x.shape[0]}")
    for name, tensor in (("x", x), ("sigma", sigma)):
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} must be finite")
    if sigma is not None and not bool((sigma > 0).all()):
        raise ValueError(f"sigma must be positive, got a minimum of {sigma.min():g}")
    _check_independent(field, x, sigma, condition)
    with evaluated(field):
        _check_evaluated(field, x, sigma, condition)


@contextmanager
def evaluated(field: Field) -> Iterator[None]:
    """Modules in evaluation mode inside the context, and in the mode that they were in behind it."""
    modules = [m for m in field.modules() if m.training] if isinstance(field, nn.Module) else []
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True


def _check_independent(field: Field, x: Tensor, sigma: Tensor | None, condition: Condition | None) -> None:
    with torch.no_grad():
        value, J = jacobian(field, x, sigma, condition=condition)
        _check_all_finite(value)
        for sample in (0, -1):
            only = torch.zeros_like(x)
            only[sample] = gaussian(x[sample], torch.Generator().manual_seed(0))
            others = (J.T @ only).clone()
            if not bool(torch.isfinite(others).all()):
                raise ValueError(
                    "the field's derivative must be finite, got NaN or inf: look for square roots, norms or "
                    "divisions at 0"
                )
            others[sample] = 0
            if bool((others != 0).any()) or _moved_by_others(field, x, sigma, condition, sample):
                raise ValueError(
                    "the field mixes samples: the value at one depends on others; expected the value at "
                    "each sample to depend on that sample alone; replace BatchNorm by GroupNorm, or call "
                    ".eval() first"
                )


def _moved_by_others(
    field: Field, x: Tensor, sigma: Tensor | None, condition: Condition | None, sample: int
) -> bool:
    """Whether the value at a sample changes with the other points: by statistics without a gradient."""
    arguments, replay = same_choices(field, x, condition)
    value = field(x, sigma, **arguments)[sample]
    elsewhere = 1.05 * x + 0.01 * x.abs().mean()
    elsewhere[sample] = x[sample]
    with replay:
        moved = field(elsewhere, sigma, **arguments)[sample]
    tolerance = 1e-6 + torch.finfo(value.dtype).eps ** 0.5
    return not torch.allclose(moved, value, rtol=tolerance, atol=tolerance * float(value.abs().max()))


def _check_all_finite(value: Tensor) -> None:
    if not bool(torch.isfinite(value).all()):
        raise ValueError("the field's value must be finite, got NaN or inf")


def _check_evaluated(field: Field, x: Tensor, sigma: Tensor | None, condition: Condition | None) -> None:
    with torch.no_grad():
        first = field(x, sigma, **(condition or {}))
        check_value(first, x)
        _check_all_finite(first)
        second = field(x, sigma, **(condition or {}))
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-6 * float(first.abs().max())):
        raise ValueError(
            "the field is not deterministic: two evaluations at one point differ by up to "
            f"{float((first - second).abs().max()):.3g}; expected one function of x: call .eval() on "
            "networks with dropout, and take random draws out of the field"
        )
    with torch.no_grad():
        _, J = jacobian(field, x, sigma, condition=condition)
        generator = torch.Generator().manual_seed(0)
        v, w = gaussian(x, generator), gaussian(x, generator)
        v, w, Jv, JTw = (t.cpu().double() for t in (v, w, J @ v, J.T @ w))
    forward, backward = inner(w, Jv), inner(JTw, v)
    scale = (inner(w, w) * inner(Jv, Jv)).sqrt() + (inner(JTw, JTw) * inner(v, v)).sqrt()
    precision = torch.finfo(first.dtype)
    underflow = precision.tiny**0.5  # of squares in the field: an energy's branches can start that small
    if not bool((forward - backward).abs().le(1e3 * precision.eps * scale + underflow).all()):
        raise ValueError(
            "the field's two Jacobian products disagree, <u, J v> != <J^T u, v>: expected consistent first "
            "and second derivatives; check custom autograd functions inside the field, and that no sample "
            "depends on another"
        )
