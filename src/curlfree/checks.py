"""What is refused at the boundary, and with which words.

Every public function that takes a field calls `check_batch` on its arguments and `check_value` on the
field's answer. Shapes, types and devices are checked always. Values (finite, sigma > 0) are checked only
where looking at them is free, that is on the CPU: on a GPU it would make the host wait for the device in
every step. `curlfree.check_field` looks at the values once, on any device.
"""

import torch
from torch import Tensor


def check_batch(x: Tensor, sigma: Tensor | None) -> None:
    """Refuse a batch that no field can be evaluated on.

    Args:
        x: points, of shape (B, *event).
        sigma: noise levels, of shape (B,), or None for a field without noise levels.

    Raises:
        TypeError: `x` or `sigma` is not a tensor of floating-point numbers.
        ValueError: a shape, a device or a value is wrong.
    """
    check_floating("x", x)
    if x.ndim == 0 or x.numel() == 0:
        raise ValueError(
            f"x must be a non-empty batch of shape (B, *event), got {tuple(x.shape)}; "
            "add a batch dimension with x[None]"
        )
    check_finite("x", x)
    if sigma is not None:
        check_sigma(sigma, x)


def check_sigma(sigma: Tensor, x: Tensor) -> None:
    """Refuse noise levels that do not belong to the batch `x` or are not positive.

    Raises:
        TypeError: `sigma` is not a tensor of floating-point numbers.
        ValueError: its shape is not (B,), it is on another device, or (on the CPU) not finite and > 0.
    """
    check_floating("sigma", sigma)
    if sigma.shape != x.shape[:1]:
        raise ValueError(
            f"sigma must have one noise level per sample, shape ({x.shape[0]},), "
            f"got {tuple(sigma.shape)}; for one level use sigma.expand({x.shape[0]})"
        )
    if sigma.device != x.device:
        raise ValueError(f"sigma is on {sigma.device} but x on {x.device}; move one of them")
    if can_look(sigma) and not bool(((sigma > 0) & torch.isfinite(sigma)).all()):
        raise ValueError(
            f"sigma must be positive and finite, got values in [{sigma.min():g}, {sigma.max():g}]"
        )


def check_value(value: object, x: Tensor) -> None:
    """Refuse what a field returned if it is not a vector field's value at `x`.

    Raises:
        TypeError: not a tensor of floating-point numbers.
        ValueError: another shape or device than `x`.
    """
    check_floating("the field's value", value)
    assert isinstance(value, Tensor)
    if value.shape != x.shape:
        raise ValueError(
            f"a field returns one vector per point: expected shape {tuple(x.shape)}, "
            f"the field returned {tuple(value.shape)}"
        )
    if value.device != x.device:
        raise ValueError(f"the field returned a value on {value.device} for x on {x.device}")
    check_finite("the field's value", value)


def check_floating(name: str, tensor: object) -> None:
    """Refuse anything but a tensor of real floating-point numbers.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {tensor.dtype}; convert it with .float()")


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity, where looking is free.

    Raises:
        ValueError: a value is not finite.
    """
    if can_look(tensor) and not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise ValueError(f"{name} must be finite, got {bad} of {tensor.numel()} values NaN or inf")


def can_look(tensor: Tensor) -> bool:
    """Whether reading a value costs no synchronisation and breaks no trace."""
    return (
        tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
