"""PyTorch's rules that cannot be differentiated often enough, mended while a field is evaluated.

The gradient of the skew form's products is a third derivative, and the detached dual needs the derivative of
forward mode. Both are rare enough that some of PyTorch's rules are wrong there. Found on torch 2.13 by
comparing every operation with finite differences of the penalty (a test repeats it for those below):

* layer_norm, and batch_norm with batch statistics, so instance_norm, hold the statistics constant in their
  second backward and in forward mode: WRONG gradients, by tens of per cent, without an error. The same by
  elementary operations is right; group_norm is right as it is, and rms_norm where it is not fused.
* In forward mode softmax, log_softmax, logsumexp and all attention overwrite what their backward needs: an
  error in ``.backward()``. With any dispatch mode active PyTorch takes another branch, without overwriting.
* In forward mode glu has no derivative, and those of det and linear solves are silently wrong: the first is
  spelt out, the others are refused.

What `torch.jit` compiled is out of reach. What activation checkpointing recomputes inside a backward pass is
within it: PyTorch lifts a mode while it handles ``.backward()``, so `Mended` puts itself back for the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Function = Callable[..., Any]


class Mended(TorchFunctionMode):
    """Inside ``with Mended(rules):`` calls of PyTorch's functions go to their replacements.

    Args:
        rules: what replaces which function: `TWICE_BACKWARD` or `FORWARD_MODE`.
    """

    def __init__(self, rules: Mapping[Function, Function]) -> None:
        super().__init__()
        self.rules = rules

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The value of the function or of its replacement."""
        if func is Tensor.backward:
            with self:
                return _backward(*args, **(kwargs or {}))
        return self.rules.get(func, func)(*args, **(kwargs or {}))


class _Passing(TorchDispatchMode):
    """Does nothing; while it is active, PyTorch's rules do not overwrite."""

    def __torch_dispatch__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | Tensor | None = None,
) -> None:
    if gradient is None and loss.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    weight = torch.ones_like(loss) if gradient is None else gradient
    leaves = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ())
    keep = create_graph if retain_graph is None else retain_graph
    run_backward(loss, weight, leaves, retain_graph=keep, create_graph=create_graph, accumulate_grad=True)


def run_backward(
    output: Tensor,
    weight: Tensor,
    inputs: Sequence[Tensor],
    *,
    retain_graph: bool,
    create_graph: bool,
    accumulate_grad: bool,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`, or ``.backward()``, with the active modes active in the engine, too.

    Those two functions are handed to modes, which are lifted meanwhile; the engine behind them is not.
    """
    return _engine_run_backward(
        (output,),
        (weight,),
        retain_graph,
        create_graph,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=accumulate_grad,
    )


def _without_overwriting(func: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Passing():
            return func(*args, **kwargs)

    return call


def _refused(*_: Any, **__: Any) -> None:
    raise ValueError(
        "the detached dual cannot be used with determinants and linear solves, whose forward-mode rules in "
        "PyTorch have wrong derivatives; use form='double'"
    )


def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    dims = tuple(range(-len(shape), 0))
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    y = y - y.mean(dims, keepdim=True)
    y = y * (y.square().mean(dims, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = tuple(range(-len(shape), 0))
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    floor = torch.finfo(x.dtype).eps if eps is None else eps
    y = y * (y.square().mean(dims, keepdim=True) + floor).rsqrt()
    return (y if weight is None else y * weight).to(x.dtype)


def _instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    return functional.group_norm(x, x.shape[1], weight, bias, eps)


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training:
        raise ValueError("batch normalisation in training mode mixes samples; replace it by GroupNorm")
    return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


# For products that are differentiated once more: J v by two backward passes.
TWICE_BACKWARD: Mapping[Function, Function] = {
    functional.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    functional.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    functional.instance_norm: _instance_norm,
    functional.batch_norm: _batch_norm,
}

# For products by forward mode that are differentiated by a backward pass, on top of the others.
FORWARD_MODE: Mapping[Function, Function] = {
    **{
        func: _without_overwriting(func)
        for func in (
            functional.softmax,
            torch.softmax,
            torch.special.softmax,
            Tensor.softmax,
            functional.softmin,
            functional.log_softmax,
            torch.log_softmax,
            torch.special.log_softmax,
            Tensor.log_softmax,
            torch.logsumexp,
            torch.special.logsumexp,
            Tensor.logsumexp,
            functional.scaled_dot_product_attention,
            functional.multi_head_attention_forward,
        )
    },
    functional.glu: _glu,
    **dict.fromkeys(
        (
            torch.det,
            torch.logdet,
            torch.slogdet,
            Tensor.det,
            Tensor.logdet,
            Tensor.slogdet,
            torch.linalg.det,
            torch.linalg.slogdet,
            torch.linalg.solve,
            torch.linalg.solve_ex,
        ),
        _refused,
    ),
}
