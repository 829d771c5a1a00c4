"""Bad input: every mistake is refused, with the documented exception and words that help."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import curlfree as cf
from cases import CASES, MLP, UNet, randn, randomised, rng
from curlfree import checks, penalty
from curlfree.operators import central_difference
from curlfree.penalty import estimates

X, SIGMA = randn(3, 4), torch.ones(3, dtype=torch.float64)


def field(x: Tensor, sigma: Tensor | None) -> Tensor:
    return torch.tanh(x.roll(1, -1)) * x


# Everything that takes a field, a batch and noise levels.
USES: dict[str, Callable[..., object]] = {
    "jacobian": lambda f, x, s: cf.jacobian(f, x, s)[1] @ x,
    "central_difference": lambda f, x, s: central_difference(f, x, s),
    "asymmetry": lambda f, x, s: cf.asymmetry(f, x, s),
    "asymmetry by loops": lambda f, x, s: cf.asymmetry(f, x, s, estimator="loop"),
    "normalized_asymmetry": lambda f, x, s: cf.normalized_asymmetry(f, x, s),
    "qc_loss": lambda f, x, s: cf.qc_loss(f, x, s, weight=1.0),
    "qc_loss dual": lambda f, x, s: cf.qc_loss(f, x, s, weight=1.0, form="dual"),
    "estimates": lambda f, x, s: estimates(f, x, s),
    "algorithm1": lambda f, x, s: cf.algorithm1(f, x, s, x),
    "loop_work": lambda f, x, s: cf.loop_work(f, x, s),
    "esm": lambda f, x, s: cf.esm(f, x, s, x),
    "dsm": lambda f, x, s: cf.dsm(f, x, s, x),
    "ism": lambda f, x, s: cf.ism(f, x, s),
    "ssm": lambda f, x, s: cf.ssm(f, x, s, x),
    "total_loss": lambda f, x, s: cf.total_loss(torch.zeros(3), f, x, s, lmbda=1.0),
    "rotation_density": lambda f, x, s: cf.rotation_density(f, x, s),
    "check_field": lambda f, x, s: cf.check_field(f, x, s),
}
BAD_BATCHES: dict[str, tuple[object, object, type[Exception], str]] = {
    "integers": (X.long(), SIGMA, TypeError, r"x must be floating point, got torch\.int64; convert it"),
    "complex": (X + 0j, SIGMA, TypeError, r"x must be floating point, got torch\.complex128"),
    "list": (X.tolist(), SIGMA, TypeError, r"x must be a torch\.Tensor, got list"),
    "empty": (X[:0], SIGMA[:0], ValueError, r"non-empty batch of shape \(B, \*event\), got \(0, 4\)"),
    "NaN": (X * math.nan, SIGMA, ValueError, r"x must be finite, got 12 of 12 values NaN or inf"),
    "infinity": (X / torch.tensor([0, 1, 1, 1]), SIGMA, ValueError, r"x must be finite, got 3 of 12 values"),
    "sigma number": (X, 1.0, TypeError, r"sigma must be a torch\.Tensor, got float"),
    "sigma integers": (X, SIGMA.long(), TypeError, r"sigma must be floating point, got torch\.int64"),
    "sigma scalar": (X, SIGMA[0], ValueError, r"per sample, shape \(3,\), got \(\); for one level use"),
    "sigma column": (X, SIGMA[:, None], ValueError, r"per sample, shape \(3,\), got \(3, 1\)"),
    "sigma short": (X, SIGMA[:2], ValueError, r"one noise level per sample, shape \(3,\), got \(2,\)"),
    "sigma zero": (X, 0 * SIGMA, ValueError, r"sigma must be positive and finite, got values in \[0, 0\]"),
    "sigma negative": (X, -SIGMA, ValueError, r"sigma must be positive and finite, got values in \[-1, -1\]"),
    "sigma NaN": (X, SIGMA * math.nan, ValueError, r"sigma must be positive and finite"),
    "sigma infinite": (X, SIGMA * math.inf, ValueError, r"sigma must be positive and finite"),
    "sigma elsewhere": (X, SIGMA.to("meta"), ValueError, r"sigma is on meta but x on cpu; move one of them"),
}  # fmt: skip
BAD_FIELDS: dict[str, tuple[Callable[..., object], type[Exception], str]] = {
    "tuple": (lambda x, s: (x, x), TypeError, r"the field's value must be a torch\.Tensor, got tuple"),
    "integers": (lambda x, s: x.long(), TypeError, r"value must be floating point, got torch\.int64"),
    "divergence": (lambda x, s: x.sum(1), ValueError, r"expected shape \(3, 4\), the field returned \(3,\)"),
    "flattened": (lambda x, s: x.flatten(), ValueError, r"shape \(3, 4\), the field returned \(12,\)"),
    "NaN": (lambda x, s: x * math.nan, ValueError, r"the field's value must be finite, got 12 of 12"),
    "elsewhere": (lambda x, s: x.to("meta"), ValueError, r"the field returned a value on meta for x on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("bad", BAD_BATCHES)
def test_bad_batches_are_refused_everywhere(use: str, bad: str) -> None:
    x, sigma, error, message = BAD_BATCHES[bad]
    with pytest.raises(error, match=message):
        USES[use](field, x, sigma)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("bad", BAD_FIELDS)
def test_bad_values_are_refused_everywhere(use: str, bad: str) -> None:
    broken, error, message = BAD_FIELDS[bad]
    with pytest.raises(error, match=message):
        USES[use](broken, X, SIGMA)


@pytest.mark.parametrize("use", USES)
def test_a_batch_dimension_is_asked_for(use: str) -> None:
    with pytest.raises(ValueError, match=r"got \(\); add a batch dimension with x\[None\]"):
        USES[use](field, X[0, 0], SIGMA)


DERIVATIVES = [
    n for n in USES if n not in ("central_difference", "asymmetry by loops", "loop_work", "esm", "dsm")
]


@pytest.mark.parametrize("use", DERIVATIVES)
def test_fields_without_gradient_are_refused(use: str) -> None:
    for broken in (lambda x, s: field(x.detach(), s), torch.no_grad()(field)):
        with pytest.raises(ValueError, match=r"gradient.*remove \.detach|lost the forward-mode tangent"):
            USES[use](broken, X, SIGMA)
    parameter = nn.Parameter(X.clone())
    with pytest.raises(
        ValueError, match=r"does not depend on x through autograd|lost the forward-mode tangent"
    ):
        USES[use](lambda x, s: parameter * 1, X, SIGMA)


class Once(torch.autograd.Function):
    """An operation whose backward pass is a black box."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Wrong(torch.autograd.Function):
    """An operation whose backward pass claims another derivative to the second than to the first order."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * grad.detach() * x + (grad - grad.detach()) * x


@pytest.mark.parametrize("use", ["asymmetry", "qc_loss", "check_field"])
def test_what_cannot_be_differentiated_twice_is_refused(use: str) -> None:
    for broken in (lambda x, s: Once.apply(x), lambda x, s: torch.sign(x)):
        with pytest.raises(
            ValueError, match=r"J v needs the derivative of J\^T u.*backward pass can be differentiated"
        ):
            USES[use](broken, X, SIGMA)


@pytest.mark.parametrize("kind", sorted(CASES))
def test_check_field_accepts_good_fields_in_any_mode(kind: str) -> None:
    good, (x, sigma) = CASES[kind].make(), CASES[kind].batch()
    cf.check_field(good, x, sigma)
    cf.check_field(good, x.float() if kind == "rotation" else x, sigma)
    if isinstance(good, nn.Module):
        modes = {name: i % 2 == 0 for i, (name, _) in enumerate(good.named_modules())}
        for name, module in good.named_modules():
            module.training = modes[name]
        with torch.random.fork_rng():
            before = torch.get_rng_state()
            cf.check_field(good.eval(), x, sigma)
            assert torch.equal(torch.get_rng_state(), before)
        cf.check_field(good.train(), x, sigma)
        assert all(m.training for m in good.modules())


def test_check_field_restores_each_module() -> None:
    net = randomised(UNet()).train()
    net.norm1.eval()
    cf.check_field(net, *CASES["unet"].batch())
    assert not net.norm1.training and net.norm2.training and net.training
    with pytest.raises(ValueError, match="returned"):
        cf.check_field(randomised(MLP(4, out=3)).train(), X, SIGMA)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        return self.norm(x)


MIXING: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "mean over samples": lambda x, s: x - x.mean(0),
    "mean of everything": lambda x, s: x + x.mean(),
    "cumulative": lambda x, s: x.cumsum(0),
    "reversed": lambda x, s: x.flip(0).cumsum(0).flip(0),
    "shuffled": lambda x, s: x.roll(1, 0),
    "batch statistics": lambda x, s: x / x.std(),
    "attention over the batch": lambda x, s: torch.softmax(x @ x.T, 1) @ x,
    "detached statistics": lambda x, s: torch.tanh(x) / x.detach().std(),
    "detached mean": lambda x, s: x - x.detach().mean(0),
    "batch norm": lambda x, s: (x - x.mean(0)) / x.var(0).sqrt(),
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("batch", [2, 5])
def test_check_field_finds_mixed_samples(name: str, batch: int) -> None:
    with pytest.raises(ValueError, match=r"mixes samples.*that sample alone; replace BatchNorm by GroupNorm"):
        cf.check_field(MIXING[name], randn(batch, 4))


def test_batch_norm_is_refused_in_training_and_accepted_in_evaluation() -> None:
    with pytest.raises(ValueError, match=r"mixes samples.*GroupNorm"):
        cf.check_field(Normalised().train(), X)
    with pytest.raises(ValueError, match=r"mixes samples.*GroupNorm"):
        cf.qc_loss(Normalised().train(), X, weight=1.0)
    cf.check_field(Normalised().eval(), X)


def test_check_field_finds_randomness() -> None:
    def noisy(x: Tensor, s: Tensor | None) -> Tensor:
        return functional.dropout(x, 0.5)

    with (
        torch.random.fork_rng(),
        pytest.raises(ValueError, match=r"not deterministic.*differ by up to.*\.eval\(\)"),
    ):
        cf.check_field(noisy, X)


def test_check_field_finds_inconsistent_derivatives() -> None:
    with pytest.raises(ValueError, match=r"<u, J v> != <J\^T u, v>.*custom autograd functions"):
        cf.check_field(lambda x, s: Wrong.apply(x), X)


def test_check_field_finds_derivatives_that_are_not_finite() -> None:
    with pytest.raises(ValueError, match=r"the field's derivative must be finite.*square roots, norms"):
        cf.check_field(lambda x, s: x.abs().sqrt(), torch.zeros(3, 4))


def test_check_field_needs_two_samples() -> None:
    with pytest.raises(ValueError, match="at least two samples to see whether they mix, got 1"):
        cf.check_field(field, X[:1])


def test_check_field_looks_at_values_where_the_other_calls_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the per-call checks must not wait for the device; the one-time check does."""
    monkeypatch.setattr(checks, "can_look", lambda tensor: False)
    for x, sigma, message in (
        (X * math.nan, SIGMA, "x must be finite"),
        (X, SIGMA * math.inf, "sigma must be finite"),
        (X, -SIGMA, "sigma must be positive, got a minimum of -1"),
    ):
        checks.check_batch(x, sigma)
        with pytest.raises(ValueError, match=message):
            cf.check_field(field, x, sigma)
    with pytest.raises(ValueError, match="the field's value must be finite, got NaN or inf"):
        cf.check_field(lambda x, s: x / 0, X)


class NoLooking(TorchDispatchMode):
    """Refuses every operation that hands a tensor's value to the host, which must wait for a GPU."""

    LOOKS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in self.LOOKS, f"{func} reads a value"
        return func(*args, **(kwargs or {}))


NAMES = ("exact", "trace", "est", "paper", "skew", "pair", "loop")
CALLS: dict[str, Callable[[nn.Module], Tensor]] = {
    **{name: lambda f, n=name: cf.asymmetry(f, X, SIGMA, estimator=n) for name in NAMES},
    "double": lambda f: cf.qc_loss(f, X, SIGMA, weight=SIGMA, form="double", fraction=0.7),
    "dual": lambda f: cf.qc_loss(f, X, SIGMA, weight=SIGMA, form="dual", fraction=0.7),
    "loop_work": lambda f: cf.loop_work(f, X, SIGMA),
    "dsm": lambda f: cf.dsm(f, X, SIGMA, X),
    "ism": lambda f: cf.ism(f, X, SIGMA),
    "ssm": lambda f: cf.ssm(f, X, SIGMA, X),
    "total_loss": lambda f: cf.total_loss(SIGMA, f, X, SIGMA, lmbda=0.1).total,
    "energy": lambda f: cf.EnergyField(cf.PaperEnergy(f))(X, SIGMA),
    "preconditioned": lambda f: cf.DenoiserField(cf.Preconditioned(f, data_std=1.0))(X, SIGMA),
    "noise prediction": lambda f: cf.NoisePrediction(f, cf.VP())(X, SIGMA),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_never_wait_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the checks of values off, as they are on a GPU, whole calls and their backward read no value."""
    net = randomised(MLP(4))
    for module in (checks, penalty):
        monkeypatch.setattr(module, "can_look", lambda tensor: False)
    with NoLooking():
        CALLS[name](net).sum().backward()
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="reads a value"), NoLooking():
        checks.check_batch(X, SIGMA)


def test_values_are_looked_at_on_the_cpu_only() -> None:
    assert checks.can_look(X)
    assert not checks.can_look(X.to("meta"))
    seen = []
    torch.func.vmap(lambda x: seen.append(checks.can_look(x)) or x)(X)
    assert seen == [False]
    traced = torch.compile(lambda x: x * checks.can_look(x), backend="eager", fullgraph=True)
    assert not traced(X).any()


def test_shapes_are_checked_on_any_device() -> None:
    x = X.to("meta")
    with pytest.raises(ValueError, match=r"shape \(3,\), got \(2,\)"):
        checks.check_batch(x, SIGMA[:2].to("meta"))
    with pytest.raises(ValueError, match="sigma is on cpu but x on meta"):
        checks.check_batch(x, SIGMA)
    with pytest.raises(ValueError, match="on cpu for x on meta"):
        checks.check_value(X, x)


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@settings(max_examples=100, deadline=None)
@given(shape=shapes, level=st.lists(st.integers(0, 4), max_size=2).map(tuple))
def test_exactly_one_level_per_sample_is_accepted(shape: tuple[int, ...], level: tuple[int, ...]) -> None:
    x, sigma = torch.ones(shape), torch.ones(level)
    if level == shape[:1]:
        checks.check_batch(x, sigma)
        assert cf.asymmetry(lambda y, s: torch.sin(y), x, sigma).shape == shape[:1]
    else:
        with pytest.raises(ValueError, match="sigma must have one noise level per sample"):
            checks.check_batch(x, sigma)


@settings(max_examples=100, deadline=None)
@given(shape=shapes, answer=shapes)
def test_exactly_the_shape_of_x_is_accepted(shape: tuple[int, ...], answer: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    if answer == shape:
        checks.check_value(torch.ones(answer), x)
    else:
        with pytest.raises(ValueError, match="a field returns one vector per point"):
            checks.check_value(torch.ones(answer), x)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cf.asymmetry(field, X, estimator="hutch"), ValueError, "unknown estimator 'hutch'"),
        (lambda: cf.asymmetry(field, X, probes=0), ValueError, "probes must be at least 1, got 0"),
        (lambda: cf.qc_loss(field, X, weight=1.0, estimator="hutch"), ValueError, "unknown estimator"),
        (lambda: cf.qc_loss(field, X, weight=1.0, probes=0), ValueError, "probes must be at least 1"),
        (lambda: cf.qc_loss(field, X, weight=1.0, form="triple"), ValueError, "unknown form 'triple'"),
        (lambda: cf.qc_loss(field, X, weight=1.0, fraction=0.0), ValueError, r"fraction must be in \(0, 1\]"),
        (lambda: cf.qc_loss(field, X, weight=1.0, fraction=1.1), ValueError, r"got 1\.1"),
        (lambda: cf.qc_loss(field, X, weight=1.0, fraction=math.nan), ValueError, "got nan"),
        (lambda: cf.qc_loss(field, X, weight=1.0, fraction="some"), ValueError, "got 'some'"),
        (lambda: cf.qc_loss(field, X, weight=1.0, fraction=None), ValueError, "got None"),
        (lambda: cf.asymmetry(field, X, probes=1.5), TypeError, r"probes must be an integer.* got 1\.5"),
        (lambda: estimates(field, X, form="doubel"), ValueError, "unknown form 'doubel'"),
        (lambda: estimates(field, X, form="dual", estimator="exact"), ValueError, "dual exists for skew"),
        (lambda: cf.algorithm1(field, X, SIGMA, X[0]), ValueError, r"v must have x's shape .* \(4,\)"),
        (lambda: cf.algorithm1(field, X, SIGMA, X, weight=torch.ones(3, 1)), ValueError, r"got \(3, 1\)"),
        (lambda: cf.total_loss(SIGMA, field, X, SIGMA, lmbda=0.0, weighting=lambda s: s[:, None]), ValueError,
         r"one per sample, shape \(3,\), got \(3, 1\)"),
        (lambda: cf.total_loss(SIGMA, field, X, SIGMA, lmbda=math.nan), ValueError, "lmbda must be finite"),
        (lambda: cf.Preconditioned(field, data_std=0.0), ValueError, "data_std must be positive"),
        (lambda: cf.LinearField(torch.ones(2, 3)), ValueError, r"a square matrix, got shape \(2, 3\)"),
        (lambda: cf.GaussianMixture(X * math.nan, 1.0), ValueError, "finite means"),
        (lambda: cf.GaussianMixture(X, math.nan), ValueError, "finite std"),
        (lambda: cf.GaussianMixture(X, 1.0, torch.zeros(3)), ValueError, "with a positive sum"),
        (lambda: cf.Discrete(sigmas=(0.1, 1.0)).time(torch.tensor([3.0])), ValueError, r"from 0\.1 to 1"),
        (lambda: cf.qc_loss(field, X, weight=torch.ones(2)), ValueError, r"shape \(3,\), got \(2,\)"),
        (lambda: cf.qc_loss(field, X, weight=torch.ones(3, 1)), ValueError, r"got \(3, 1\)"),
        (lambda: cf.qc_loss(field, X, weight=math.nan), ValueError, r"weight must be finite, got 1 of 1"),
        (lambda: cf.loop_work(field, X, SIGMA, nodes=2), ValueError, "a loop needs at least 3 nodes, got 2"),
        (lambda: cf.circle_work(field, X, SIGMA, X[:1], X), ValueError, r"shape .* \(1, 4\) and \(3, 4\)"),
        (lambda: cf.loop_work(field, X, None), TypeError, "sigma must be a torch.Tensor, got NoneType"),
        (lambda: cf.dsm(field, X, None, X), TypeError, "noise levels, one per sample, got None"),
        (lambda: cf.dsm(field, X, SIGMA, X[:1]), ValueError, r"z must have x0's shape .* \(1, 4\)"),
        (lambda: cf.esm(field, X, SIGMA, X[0]), ValueError, r"score must have x's shape .* \(4,\)"),
        (lambda: cf.ssm(field, X, SIGMA, X[0]), ValueError, r"a vector of shape \(3, 4\), got \(4,\)"),
        (lambda: cf.total_loss(SIGMA.mean(), field, X, None, lmbda=1.0), ValueError, r"leave the mean"),
        (lambda: cf.jacobian(field, X)[1] @ X[:2], ValueError, r"a vector of shape \(3, 4\), got \(2, 4\)"),
    ],
)  # fmt: skip
def test_other_bad_arguments_are_refused(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_nothing_is_drawn_before_the_input_is_accepted() -> None:
    generator = rng()
    with pytest.raises(ValueError, match="weight must be"):
        cf.qc_loss(field, X, weight=torch.ones(2), fraction=0.5, generator=generator)
    assert torch.equal(generator.get_state(), rng().get_state())
