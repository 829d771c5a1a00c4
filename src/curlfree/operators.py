r"""Operators: the Jacobian of a field as a linear map that is never formed.

A *field* is any callable ``field(x, sigma) -> tensor like x``, batched over the first dimension. Its
per-sample Jacobian ``J = ds/dx`` splits as ``J = S + K`` into a symmetric S = (J + J^T)/2 and a skew
K = (J - J^T)/2 (Eq. A1); the field is a gradient exactly where K = 0 (Eq. 8), and an energy's score has K = 0
because mixed second derivatives commute (Eq. 9).

Both products come from ONE linearisation, that is from one evaluation of the field: with
``value = field(x)`` the transposed product is a backward pass, ``J^T u = d<u, value>/dx``, and since that is
linear in u, the product ``J v`` is the derivative of ``<J^T u, v>`` with respect to u. So dropout and every
other random choice in the field are the same in both, and no forward-mode rule is needed. A sample's row of
the batch Jacobian must not depend on the other samples: `curlfree.check_field` tests that.

If gradients are enabled when the operator is made, its products can be differentiated once more, with
respect to the field's parameters. Where x itself requires a gradient, it flows to x, too. If they are not,
and the field propagates tangents itself (a method ``tangents``, as `curlfree.nets.NCSNpp` has it), it does so
for ``J v``, with the same random choices: nothing is differentiated twice, and compiled blocks stay compiled.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError

from curlfree.checks import check_batch, check_value
from curlfree.mended import TWICE_BACKWARD, Mended, run_backward

Condition = Mapping[str, Any]

NO_DERIVATIVE = (
    "the field's value does not depend on x through autograd: expected a function of x; "
    "remove .detach() or torch.no_grad() inside the field, or add 0 * x to a constant field"
)
NO_SECOND_DERIVATIVE = (
    "J v needs the derivative of J^T u, and autograd knows none: expected operations whose backward pass can "
    "be differentiated; mend custom autograd functions, or add 0 * x to a piecewise constant field"
)


Field = Callable[..., Tensor]
"""A vector field: ``field(x, sigma, **condition) -> tensor like x``, with sigma of shape (B,) or None."""


@dataclass(frozen=True, eq=False)
class Operator:
    """A linear map on vectors of shape (B, *event), one D x D matrix for each sample.

    Args:
        mv: v -> A v.
        rmv: u -> A^T u.
        like: a tensor with the shape, type and device of the vectors.
    """

    mv: Callable[[Tensor], Tensor]
    rmv: Callable[[Tensor], Tensor]
    like: Tensor

    @classmethod
    def from_matrix(cls, matrix: Tensor, event: tuple[int, ...] | None = None) -> "Operator":
        """The operator of dense matrices of shape (B, D, D), on vectors of shape (B, *event)."""
        batch, size, _ = matrix.shape
        like = matrix.new_empty((batch, *((size,) if event is None else event)))

        def product(m: Tensor, v: Tensor) -> Tensor:
            return torch.einsum("bij,bj->bi", m, flat(v)).view_as(v)

        return cls(lambda v: product(matrix, v), lambda u: product(matrix.mT, u), like)

    @property
    def T(self) -> "Operator":
        """The transpose."""
        return Operator(self.rmv, self.mv, self.like)

    @property
    def symmetric(self) -> "Operator":
        """S = (A + A^T)/2 (Eq. A1)."""
        return 0.5 * (self + self.T)

    @property
    def skew(self) -> "Operator":
        """K = (A - A^T)/2 (Eq. A1)."""
        return 0.5 * (self - self.T)

    def __matmul__(self, v: Tensor) -> Tensor:
        if v.shape != self.like.shape:
            raise ValueError(f"expected a vector of shape {tuple(self.like.shape)}, got {tuple(v.shape)}")
        return self.mv(v)

    def __add__(self, other: "Operator") -> "Operator":
        return Operator(lambda v: self.mv(v) + other.mv(v), lambda u: self.rmv(u) + other.rmv(u), self.like)

    def __sub__(self, other: "Operator") -> "Operator":
        return self + (-1.0) * other

    def __rmul__(self, c: float | Tensor) -> "Operator":
        """``c * A`` for a number or one number per sample, shape (B,)."""
        scale = per_sample(c.to(self.like), self.like) if isinstance(c, Tensor) else c
        return Operator(lambda v: scale * self.mv(v), lambda u: scale * self.rmv(u), self.like)

    def rows(self) -> Iterator[Tensor]:
        """The D rows ``A^T e_i`` of the matrices, each of shape (B, D), by D transposed products."""
        size = self.like[0].numel()
        for i in range(size):
            e = flat(torch.zeros_like(self.like, memory_format=torch.contiguous_format))
            e[:, i] = 1
            yield flat(self.rmv(e.view_as(self.like)))

    def dense(self) -> Tensor:
        """The matrices, of shape (B, D, D), by D transposed products."""
        return torch.stack(list(self.rows()), dim=1)


def jacobian(
    field: Field, x: Tensor, sigma: Tensor | None = None, *, condition: Condition | None = None
) -> tuple[Tensor, Operator]:
    """The field's value and its per-sample Jacobian, from one evaluation of the field.

    Args:
        field: the vector field.
        x: points, of shape (B, *event).
        sigma: noise levels, of shape (B,), or None.
        condition: keyword arguments for the field, class labels for example.

    Returns:
        ``field(x, sigma)`` and J as an `Operator`. ``J @ v`` costs about three passes the first time and two
        after that (always two by the field's own tangents), ``J.T @ u`` about one.

    Raises:
        TypeError: `x`, `sigma` or the field's value is not a floating-point tensor.
        ValueError: a shape, a device or a value is wrong, or the field cannot be differentiated.
    """
    check_batch(x, sigma)
    differentiable = torch.is_grad_enabled()
    if not differentiable and hasattr(field, "tangents"):
        return _own_products(field, x, sigma, condition)
    with torch.inference_mode(False), torch.enable_grad(), second_order():
        point = differentiable_point(x)
        value = field(point, outside_inference(sigma), **ordinary(condition))
        check_value(value, x)
        check_has_gradient(value)
        u = torch.zeros_like(value, requires_grad=True)
    pulled: list[Tensor] = []  # u -> J^T u, made on first use and kept
    # What a checkpoint recomputes here must be recomputed alike in the caller's backward, out of reach.
    recomputing = nullcontext if differentiable else second_order

    def rmv(w: Tensor) -> Tensor:
        with recomputing():
            return gradient(value, point, w.to(value.dtype), create_graph=differentiable)

    def mv(v: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad(), recomputing():
            if not pulled:
                pulled.append(gradient(value, point, u, create_graph=True))
            return gradient(
                pulled[0], u, v.to(point.dtype), create_graph=differentiable, otherwise=NO_SECOND_DERIVATIVE
            )

    return value if differentiable else value.detach(), Operator(mv, rmv, x.detach())


def _own_products(
    field: Any, x: Tensor, sigma: Tensor | None, condition: Condition | None
) -> tuple[Tensor, Operator]:
    """`jacobian` by the tangents that the field propagates and ordinary backward passes."""
    with torch.inference_mode(False), torch.enable_grad(), frozen(field):
        arguments, replay = same_choices(field, x, condition)
        point, sigma = differentiable_point(x.detach()), outside_inference(sigma)
        value = field(point, sigma, **arguments)
        check_value(value, x)
        check_has_gradient(value)

    def rmv(w: Tensor) -> Tensor:
        return gradient(value, point, w.to(value.dtype), create_graph=False)

    def mv(v: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad(), replay:
            return field.tangents(point.detach(), sigma, (outside_inference(v).to(x.dtype),), **arguments)[1][
                0
            ]

    return value.detach(), Operator(mv, rmv, x.detach())


def central_difference(
    field: Field,
    x: Tensor,
    sigma: Tensor | None = None,
    *,
    step: float | None = None,
    condition: Condition | None = None,
) -> tuple[Tensor, Operator]:
    """The Jacobian by central differences: forward passes only, ``J v`` up to O(step^2).

    ``J v = [s(x + h v/2) - s(x - h v/2)]/h`` with h = step * sigma, or h = step without noise levels.

    Args:
        field: the vector field; its random choices, dropout for example, are replayed.
        x: points, of shape (B, *event).
        sigma: noise levels, of shape (B,), or None.
        step: the step in units of sigma; by default the fourth root of the precision, 0.019 in float32
            (between rounding and truncation: the flat optimum measured there is 0.01 to 0.03). Autocast is
            left for these evaluations.
        condition: keyword arguments for the field.

    Returns:
        ``field(x, sigma)`` and J as an `Operator` whose transpose does not exist.

    Raises:
        TypeError: the field works in half precision, whose rounding exceeds the differences.
        ValueError: as `jacobian`.
    """
    check_batch(x, sigma)
    replay = Replay(x.device)

    def evaluated(y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # half precision inside would pass for curvature
            return field(y, sigma, **(condition or {}))

    value = evaluated(x)
    check_value(value, x)
    if min(torch.finfo(value.dtype).bits, torch.finfo(x.dtype).bits) < 32:
        raise TypeError(
            f"finite differences need float32 or float64, x is {x.dtype} and the field returned "
            f"{value.dtype}: rounding would be larger than the differences; use estimator='skew'"
        )
    h = step if step is not None else torch.finfo(value.dtype).eps ** 0.25
    width = h if sigma is None else per_sample(h * sigma, x)

    def at(y: Tensor) -> Tensor:
        with replay:
            return evaluated(y)

    def mv(v: Tensor) -> Tensor:
        v = v.to(x.dtype)
        return (at(x + 0.5 * width * v) - at(x - 0.5 * width * v)) / width

    def rmv(_: Tensor) -> Tensor:
        raise ValueError("finite differences give J v only; for J^T u use curlfree.jacobian")

    return value, Operator(mv, rmv, x.detach())


class Replay:
    """Remembers the random state at its creation; inside ``with replay:`` the same numbers are drawn again.

    A second evaluation of a field then uses the same dropout masks as the one made right after the creation.
    """

    def __init__(self, device: torch.device) -> None:
        self._devices = [] if device.type == "cpu" else [device]
        self._type = "cuda" if device.type == "cpu" else device.type
        self._cpu = torch.get_rng_state()
        self._states = [torch.get_device_module(d).get_rng_state(d) for d in self._devices]

    def __enter__(self) -> None:
        self._fork = torch.random.fork_rng(self._devices, device_type=self._type)
        self._fork.__enter__()
        torch.set_rng_state(self._cpu)
        for device, state in zip(self._devices, self._states, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)


def same_choices(
    field: Field, x: Tensor, condition: Condition | None
) -> tuple[dict[str, Any], AbstractContextManager[None]]:
    """What makes all evaluations at x draw the same random numbers: the field's arguments, and a context.

    The first evaluation is outside of the context, all others inside. A field with a method ``draw_masks(B)``
    and an argument `masks` draws its dropout masks here, if none are given; for any other PyTorch's random
    state is replayed.
    """
    arguments = ordinary(condition)
    if arguments.get("masks") is not None:  # of a field, or of the network inside an energy
        return arguments, nullcontext()
    draw_masks = getattr(field, "draw_masks", None)
    if draw_masks is None:
        return arguments, Replay(x.device)
    if getattr(field, "training", True):
        arguments["masks"] = draw_masks(len(x))
    return arguments, nullcontext()


@contextmanager
def frozen(field: Field) -> Iterator[None]:
    """Evaluate a field without a graph of its parameters, so that a backward to x computes nothing else."""
    parameters = field.parameters() if isinstance(field, nn.Module) else ()
    trained = [p for p in parameters if p.requires_grad and p.is_leaf]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


@contextmanager
def second_order() -> Iterator[None]:
    """Evaluate networks so that the result can be differentiated twice, whatever they are made of.

    The fused attention kernels have no second derivative and no forward-mode rule, so attention runs as plain
    softmax products; normalisations run as elementary operations (`curlfree.mended`); a network wrapped in
    `torch.compile` runs eagerly, because AOTAutograd's backward cannot be differentiated. Inside a trace
    nothing is changed.

    Activation checkpointing evaluates once more in the backward pass: where it encloses fused attention or
    compiled parts, put the whole training step, with its ``.backward()``, inside ``with second_order():``.
    """
    if torch.compiler.is_compiling():
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), Mended(TWICE_BACKWARD):
        if "torch._dynamo" in sys.modules:  # nothing can be compiled before it is imported, and that is slow
            with _eagerly():
                yield
        else:
            yield


@contextmanager
def _eagerly() -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        except RuntimeError as error:  # in a part of a compiled function that dynamo left to Python
            raise ValueError(
                "the products of a Jacobian cannot be taken inside a compiled function: expected "
                "torch.compile around the network, not around the loss"
            ) from error
        yield


def flat(v: Tensor) -> Tensor:
    """Vectors of shape (B, *event) as (B, D); D = 1 for scalar events, shape (B,)."""
    return v.reshape(v.shape[0], -1)


def per_sample(c: Tensor, like: Tensor) -> Tensor:
    """One number for each sample, shape (B,), shaped so that it multiplies vectors like `like`.

    Raises:
        TypeError: `c` is not a tensor.
    """
    if not isinstance(c, Tensor):
        raise TypeError(f"expected a tensor of noise levels, one per sample, got {c!r}")
    return c.view(-1, *[1] * (like.ndim - 1)) if c.ndim else c


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of each sample's vectors, shape (B,), in float32 at least."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return (a.to(dtype) * b.to(dtype)).flatten(1).sum(1) if a.ndim > 1 else a.to(dtype) * b.to(dtype)


def check_has_gradient(value: Tensor) -> None:
    """Refuse a value that autograd knows no history of.

    Raises:
        ValueError: the value cannot be differentiated.
    """
    if not value.requires_grad:
        raise ValueError(
            "the field's value has no gradient: expected operations that autograd can follow from x; "
            "remove .detach(), torch.no_grad() or conversions to NumPy inside the field, or add 0 * x to a "
            "constant field"
        )


def differentiable_point(x: Tensor) -> Tensor:
    """x to differentiate by: connected to x where x requires a gradient, a leaf of its own otherwise."""
    return outside_inference(x).view_as(x).requires_grad_()  # a view keeps forward-mode tangents, too


def outside_inference(argument: Any) -> Any:
    """The argument, as an ordinary copy if it is a tensor made in inference mode, which autograd refuses."""
    return argument.clone() if isinstance(argument, Tensor) and argument.is_inference() else argument


def ordinary(condition: Condition | None) -> dict[str, Any]:
    """The keyword arguments for the field, each as `outside_inference` gives it."""
    return {name: outside_inference(value) for name, value in (condition or {}).items()}


def gradient(
    output: Tensor, point: Tensor, weight: Tensor, *, create_graph: bool, otherwise: str = NO_DERIVATIVE
) -> Tensor:
    """``d<weight, output>/d point``, the graph kept; where autograd knows none, the error says `otherwise`.

    Raises:
        ValueError: the output does not depend on the point, or what activation checkpointing recomputes
            differs from what it saved.
    """
    if not output.requires_grad:
        raise ValueError(otherwise)
    try:
        with torch.inference_mode(False):
            (slope,) = run_backward(
                output,
                outside_inference(weight),
                (point,),
                retain_graph=True,
                create_graph=create_graph,
                accumulate_grad=False,
            )
    except CheckpointError as error:
        raise ValueError(
            "activation checkpointing recomputed something else than it saved, fused attention or compiled "
            "code for example: expected the same; put the training step, with its .backward(), inside "
            "'with curlfree.operators.second_order():'"
        ) from error
    if slope is None:
        raise ValueError(otherwise)
    return slope
