r"""Speed: networks compiled region by region, gradients as CUDA graphs, and a check that both are right.

A training step is fast where the GPU never waits for Python. Compiling a whole NCSN++ takes minutes; its
residual and attention blocks repeat a few shapes, so `prepare` compiles block by block, and all blocks of one
shape share one graph: 20 in the paper's deep network for score matching, and 40 for the penalty, whose two
passes carry one and two tangents. What is left of Python, `Recorded` removes: it records a function once as a
CUDA graph and replays it. `Gradient` does so with losses and their gradient.

A step adds up to two gradients, each with its own backward, so that the memory of one is free for the other::

    prepare(net)
    masks, probes = torch.Generator(device), torch.Generator(device)  # reseed them in every step
    matching = Gradient(score_matching, parameters, generators=(masks,), autocast=torch.bfloat16)
    penalty = Gradient(penalty_of_chosen, parameters, generators=(masks, probes), autocast=torch.bfloat16)
    matching(x0, sigma, z, weight=1 / len(x0))
    penalty(x[chosen], sigma[chosen], weight=weight[chosen])
    optimizer.step()

`curlfree.train` does this for every run with ``train.compile`` and an NCSN++.

In autocast the penalty's q = (J - J^T) v is still computed in float32 (TF32 where PyTorch is told so), see
`curlfree.penalty`. `check_tangents` compares everything that this relies on with plain automatic
differentiation; `choose_form` does so once at the start and goes back to double backward if they differ.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from curlfree.estimators import gaussian
from curlfree.nets.layers import Attention, GroupNorm, ResBlock
from curlfree.operators import (
    Condition,
    Field,
    differentiable_point,
    frozen,
    gradient,
    inner,
    jacobian,
    per_sample,
    same_choices,
)
from curlfree.penalty import Form, estimates, products

Losses = Callable[..., Tensor]
Key = tuple[tuple[torch.Size, torch.dtype], ...]


class Energy(Protocol):
    """An energy that knows its derivatives along given directions."""

    def __call__(self, x: Tensor, sigma: Tensor, /, **condition: Any) -> Tensor:
        """The energies, shape (B,)."""
        ...

    def tangents(
        self, x: Tensor, sigma: Tensor, vs: tuple[Tensor, ...], /, **condition: Any
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The energies and their derivatives along each v, each of shape (B,)."""
        ...


REGIONS = (ResBlock, Attention, GroupNorm)
GRAPHS = 256  # compiled versions of one block: its shapes times the passes of a step, evaluation and checks


def prepare(field: nn.Module, *, backend: str = "inductor") -> None:
    """Lay a field's images out channels last and compile the regions of every NCSN++ in it.

    Regions are compiled when they are first called, each shape once: seconds each on a GPU. The field is
    changed in place; its parameters keep their values and names.

    Args:
        field: the field, on its device, in its precision.
        backend: of `torch.compile`; "aot_eager" compiles without generating code, for tests.

    Raises:
        ValueError: there is no NCSN++ in the field.
    """
    layers = [layer for part in field.modules() for layer in getattr(part, "all_modules", ())]
    if not layers:
        raise ValueError(
            f"prepare compiles the blocks of NCSN++ networks: expected one in the field, found "
            f"{type(field).__name__} without; use torch.compile for other networks"
        )
    import torch._dynamo
    import torch._functorch.config

    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(torch._dynamo.config, limit, max(GRAPHS, getattr(torch._dynamo.config, limit)))
    torch._functorch.config.donated_buffer = False  # an operator's products use one graph again and again
    for p in field.parameters():
        if p.ndim == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    for layer in layers:
        if isinstance(layer, REGIONS):
            layer.compile(backend=backend, fullgraph=True, dynamic=False)


class Recorded:
    """A function of tensors that a GPU replays as a CUDA graph, without Python.

    The first calls run the function as it is: they compile and tune, which cannot be recorded. The next one
    records it, and from then on it is replayed; for arguments of other shapes or types the same from the
    beginning.
    All calls do the function's work, so that it may change tensors: the weights in an optimisation step.

    A function that is recorded must not look at values, must take all that changes as tensor arguments, and
    must draw random numbers from PyTorch's own generator or from those given here.

    Args:
        function: ``function(*arguments)``; what a replay returns is overwritten by the next one.
        generators: the generators that it draws from; they may be reseeded between calls.
    """

    WARM_UP = 3
    DEVICE = "cuda"  # where functions are recorded

    def __init__(self, function: Callable[..., Any], generators: Iterable[torch.Generator] = ()) -> None:
        self.function, self.generators = function, tuple(generators)
        self._calls: dict[Key, int] = {}
        self._graphs: dict[Key, _Graph] = {}

    def __call__(self, *arguments: Tensor) -> Any:
        """The function's value, from a replay if the arguments are on a GPU."""
        if arguments[0].device.type != self.DEVICE:
            return self.function(*arguments)
        key = tuple((a.shape, a.dtype) for a in arguments)
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] <= self.WARM_UP:
            return self.function(*arguments)
        if key not in self._graphs:
            self._graphs[key] = _Graph(self.function, arguments, self.generators)
        return self._graphs[key](arguments)

    @property
    def graphs(self) -> int:
        """How many recordings there are, one for each kind of arguments that came often enough."""
        return len(self._graphs)


class _Graph:
    """One recording of a function."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Tensor, ...],
        generators: tuple[torch.Generator, ...],
    ) -> None:
        self.inputs = tuple(a.clone() for a in arguments)
        self.pool = _pool()
        self.graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self.graph.register_generator_state(generator)
        # What other threads do meanwhile (pinning the next batches, watching NCCL) is not in the graph.
        with torch.cuda.graph(
            self.graph,
            pool=self.pool.id,  # type: ignore[arg-type]  # takes what MemPool has
            capture_error_mode="thread_local",
        ):
            self.outputs = function(*self.inputs)

    def __call__(self, arguments: tuple[Tensor, ...]) -> Any:
        for own, new in zip(self.inputs, arguments, strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.outputs


_pools: "weakref.WeakValueDictionary[str, torch.cuda.MemPool]" = weakref.WeakValueDictionary()


def _pool() -> "torch.cuda.MemPool":
    """The memory that all graphs share: what is left in it after a replay is added up before the next.

    It is given back when the last graph is gone.
    """
    pool = _pools.get("graphs")
    if pool is None:
        pool = _pools["graphs"] = torch.cuda.MemPool()
    return pool


class Gradient:
    """Evaluates losses and adds their gradient to the parameters' `.grad`; on a GPU `Recorded`.

    To keep the sum in one pass over memory, leave the `.grad` in place between steps:
    ``optimizer.zero_grad(set_to_none=False)``.

    Args:
        losses: ``losses(*arguments)``, one number or one per sample.
        parameters: what to differentiate by.
        generators: the generators that the losses draw from; they may be reseeded between calls.
        autocast: the type in which autocast runs the losses; None for no autocast.
        record: use CUDA graphs where the arguments are on a GPU.
    """

    def __init__(
        self,
        losses: Losses,
        parameters: Iterable[Tensor],
        *,
        generators: Iterable[torch.Generator] = (),
        autocast: torch.dtype | None = None,
        record: bool = True,
    ) -> None:
        self.losses, self.autocast = losses, autocast
        self.parameters = [p for p in parameters if p.requires_grad]
        self._evaluate = Recorded(self.evaluate, generators) if record else self.evaluate

    def __call__(self, *arguments: Tensor, weight: float | Tensor = 1.0) -> Tensor:
        """Add the gradient of ``sum(weight * losses)``, and return the losses."""
        if not isinstance(weight, Tensor):
            weight = torch.full((), weight, device=arguments[0].device, dtype=torch.float64)
        losses, gradients = self._evaluate(weight, *arguments)
        self._add(gradients)
        return losses.clone()

    def evaluate(self, weight: Tensor, *arguments: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """The losses and the gradient of their weighted sum, None for parameters that have no part in it."""
        device = arguments[0].device.type
        with torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None):
            losses = self.losses(*arguments)
        found = torch.autograd.grad((weight * losses).sum(), self.parameters, allow_unused=True)
        pairs = zip(self.parameters, found, strict=True)
        return losses.detach(), [None if g is None else _like(p, g) for p, g in pairs]

    @torch.no_grad()
    def _add(self, gradients: list[Tensor | None]) -> None:
        """Add to `.grad`. Two gradients may be one tensor, and the next replay overwrites them: so copies."""
        sums, terms = [], []
        for p, g in zip(self.parameters, gradients, strict=True):
            if g is None:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            sums.append(p.grad)
            terms.append(g)
        if sums:
            torch._foreach_add_(sums, terms)


def _like(p: Tensor, g: Tensor) -> Tensor:
    """A gradient in the layout of its parameter, which fused optimisers and fast sums ask for."""
    return g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)


def energy_dsm(
    energy: Energy, x0: Tensor, sigma: Tensor, z: Tensor, *, condition: Condition | None = None
) -> Tensor:
    """`curlfree.dsm` of an energy's score ``s = -dE/dx``, with its gradient by one ordinary backward.

    With r = s + z/sigma held fixed, the gradient of ``1/2 ||s + z/sigma||^2`` is that of ``<r, s>``, which is
    minus the energy's derivative along r: forward mode, as in the penalty's detached dual. That is 8 forward
    passes in place of the 6 of double backward, but compiled ones. Neither pass runs in autocast's half
    precision: at large sigma r is nearly parallel to x, a direction in which normalising layers change
    nothing, and the derivative along it a small difference of large terms.

    Args:
        energy: an energy with a method ``tangents(x, sigma, vs, **condition) -> (E, (dE/dv, ...))``.
        x0: clean data, of shape (B, *event).
        sigma: noise levels, of shape (B,).
        z: unit noise like x0.
        condition: keyword arguments for the energy.

    Returns:
        The losses per sample, shape (B,).
    """
    level = per_sample(sigma, x0)
    x = (x0 + level * z).detach()
    arguments, replay = same_choices(energy, x, condition)
    precise = torch.autocast(x.device.type, enabled=False)
    with torch.enable_grad(), frozen(energy), precise:
        point = x.requires_grad_()
        s = -gradient(
            energy(point, sigma, **arguments).sum(),
            point,
            torch.ones((), device=x.device),
            create_graph=False,
        )
    r = s + z / level
    with replay, precise:
        _, (slope,) = energy.tangents(point.detach(), sigma, (r,), **arguments)
    return 0.5 * inner(r, r) - (slope - slope.detach())


def check_tangents(
    field: Field,
    x: Tensor,
    sigma: Tensor | None = None,
    *,
    condition: Condition | None = None,
    autocast: torch.dtype | None = None,
    tolerance: float | None = None,
) -> None:
    """Compare what the detached dual takes for granted with automatic differentiation in eager mode.

    The field's value and its products ``J v`` and ``J^T v``, as the dual takes them, compiled if the field
    is, are compared with `curlfree.jacobian`'s; the gradient of the skew estimate by the dual, in autocast if
    that is what training will do, with that by double backward in x's precision. In training mode the same
    dropout masks are used on both sides. On a batch of the penalty's shape nothing is compiled but what the
    penalty needs.

    Args:
        field: the vector field.
        x: points, of shape (B, *event); two are enough.
        sigma: noise levels, of shape (B,), or None.
        condition: keyword arguments for the field.
        autocast: the type in which autocast will run the penalty.
        tolerance: the largest relative difference; by default the fourth root of the precision, 0.02 in
            float32 (TF32 included) and 0.3 in bfloat16: far above rounding, far below a wrong formula. In the
            gradient, rounding is amplified as q = (J - J^T) v is a difference: by ``||J v|| / ||q||``.

    Raises:
        ValueError: they differ; says in what and by how much.
    """
    condition, replay = same_choices(field, x, condition)
    v = gaussian(x, torch.Generator().manual_seed(0))
    with torch.enable_grad():  # without gradients it would use the field's own tangents, too
        live, J = jacobian(field, x, sigma, condition=condition)
        value, Jv, JTv = live.detach(), (J @ v).detach(), (J.T @ v).detach()
    point = differentiable_point(x.detach().clone())
    with torch.enable_grad(), frozen(field), replay:
        own, (tangent,), (cotangent,) = products(field, point, sigma, (v,), condition)
    rounding = torch.finfo(x.dtype).eps ** 0.25 if tolerance is None else tolerance
    _compare("value", own, value, rounding)
    _compare("product J v", tangent, Jv, rounding)
    _compare("product J^T v", cotangent, JTv, rounding)
    if not isinstance(field, nn.Module):
        return
    parameters = [p for p in field.parameters() if p.requires_grad]

    def gradient(form: Form, dtype: torch.dtype | None) -> Tensor:
        with replay, torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
            generator = torch.Generator(x.device).manual_seed(0)
            estimate = estimates(field, x, sigma, form=form, generator=generator, condition=condition)
        found = torch.autograd.grad(estimate.mean(), parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([g.flatten().to(x.dtype) for g in found])

    expected = gradient("double", None)
    if autocast is None:
        amplification = float(1 + Jv.norm() / (Jv - JTv).norm().clamp(min=torch.finfo(Jv.dtype).tiny))
        _compare("gradient", gradient("dual", None), expected, rounding * amplification)
    else:
        loose = torch.finfo(autocast).eps ** 0.25 if tolerance is None else tolerance
        _compare(f"gradient in {autocast}", gradient("dual", autocast), expected, loose)


def _compare(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    size = float(expected.norm())
    error = float((found - expected).norm()) if found.shape == expected.shape else torch.inf
    if not error <= tolerance * size:
        raise ValueError(
            f"the field's own tangents are wrong: expected the {name} of automatic differentiation (norm "
            f"{size:.3g}), found one that differs by {error:.3g}; mend the field's `tangents`, or use "
            "form='double'"
        )


def choose_form(
    field: Field,
    x: Tensor,
    sigma: Tensor | None = None,
    *,
    condition: Condition | None = None,
    autocast: torch.dtype | None = None,
) -> Form:
    """The fastest form of the penalty that is right for this field: "dual", or "double" with a warning.

    Args: as for `check_tangents`.
    """
    try:
        check_tangents(field, x, sigma, condition=condition, autocast=autocast)
    except ValueError as error:
        warnings.warn(f"the penalty falls back to double backward, which is slow: {error}", stacklevel=2)
        return "double"
    return "dual"
