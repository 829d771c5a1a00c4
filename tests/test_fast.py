"""The fast path of the penalty: brute force's numbers, compiled or not, and a check that finds errors."""

import copy
import importlib.util
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import curlfree as cf
from curlfree.budget import PenaltyNoise, penalty_noise
from curlfree.build import ScoreDenoiser
from curlfree.estimators import rademacher
from curlfree.fast import Gradient, Recorded, check_tangents, choose_form, energy_dsm, prepare
from curlfree.nets import NCSNpp, NCSNppConfig
from curlfree.penalty import AUTO_FRACTION
from networks import SMALL, random_batch, random_net

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

# One residual block shape of each kind and attention: few regions to compile.
LEAST = NCSNppConfig(channels=1, size=4, width=4, multipliers=(1,), blocks=1, attention=(), dropout=0.3)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flat_gradient(loss: Tensor, net: nn.Module) -> Tensor:
    parameters = [p for p in net.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]
    )


def penalty(net: nn.Module, x: Tensor, sigma: Tensor, form: str = "auto", **options: object) -> Tensor:
    return cf.qc_loss(net, x, sigma, weight=sigma**2, form=form, generator=rng(1), **options)


def brute_force(net: NCSNpp, x: Tensor, sigma: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
    """The skew estimate from dense Jacobians by automatic differentiation, which keep their graph."""

    def one(i: int) -> Tensor:
        own = tuple(mask[i : i + 1] for mask in masks)
        function = lambda y: net(y[None], sigma[i : i + 1], masks=own).flatten()  # noqa: E731
        J = torch.autograd.functional.jacobian(function, x[i], create_graph=True)
        J = J.reshape(x[i].numel(), -1)
        v = probes[i].flatten()
        return 0.5 * ((J - J.T) @ v).square().sum()

    probes = rademacher(x, rng(1))
    return (sigma**2 * torch.stack([one(i) for i in range(len(x))])).mean()


def test_gradient_equals_brute_force_with_dropout() -> None:
    net, (x, sigma) = random_net(replace(LEAST, attention=(4,))).train(), random_batch(LEAST, extra=0)
    masks = net.draw_masks(2, rng())
    ours = penalty(net, x, sigma, condition={"masks": masks})
    exact = brute_force(net, x, sigma, masks)
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=0)
    a, b = flat_gradient(ours, net), flat_gradient(exact, net)
    assert b.norm() > 1e-2
    assert (a - b).norm() <= 1e-8 * b.norm()


@pytest.mark.parametrize("estimator", ["skew", "paper"])
def test_the_default_form_is_the_dual_and_both_agree(estimator: str) -> None:
    net, (x, sigma) = random_net(), random_batch(extra=0)
    gradients = {
        form: flat_gradient(penalty(net, x, sigma, form, estimator=estimator), net)
        for form in ("auto", "dual", "double")
    }
    assert torch.equal(gradients["auto"], gradients["dual"])
    error = (gradients["dual"] - gradients["double"]).norm()
    assert 0 < error <= 1e-12 * gradients["double"].norm()


def test_masks_are_drawn_once_for_both_passes_of_the_dual() -> None:
    """With masks of its own in each pass, the estimate would not be the penalty of any one function."""
    net, (x, sigma) = random_net().train(), random_batch(extra=0)
    state = torch.get_rng_state()
    ours = penalty(net, x, sigma)
    torch.set_rng_state(state)
    masks = net.draw_masks(2)
    expected = penalty(net, x, sigma, "double", condition={"masks": masks})
    a, b = flat_gradient(ours, net), flat_gradient(expected, net)
    assert (a - b).norm() <= 1e-10 * b.norm()


def test_autocast_leaves_the_difference_precise() -> None:
    net, (x, sigma) = random_net().float(), [t.float() for t in random_batch(extra=0)]
    plain = penalty(net, x, sigma)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = penalty(net, x, sigma)
    torch.testing.assert_close(mixed, plain, rtol=1e-5, atol=0)
    a, b = flat_gradient(mixed, net), flat_gradient(plain, net)
    assert 1e-4 < (a - b).norm() / b.norm() < 0.1


def test_parameters_stay_trainable_and_get_no_gradient_from_the_estimate() -> None:
    net, (x, sigma) = random_net(), random_batch(extra=0)
    frozen = {name for name, p in net.named_parameters() if not p.requires_grad}
    penalty(net, x, sigma)
    assert {name for name, p in net.named_parameters() if not p.requires_grad} == frozen
    assert all(p.grad is None for p in net.parameters())


def test_auto_fraction_is_a_thirty_second_and_at_least_one_sample() -> None:
    x, sigma = torch.randn(64, 2, generator=rng(), dtype=torch.float64), None
    seen = []

    def field(y: Tensor, sigma: None) -> Tensor:
        seen.append(len(y))
        return torch.sin(y @ torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=y.dtype))

    for n in (64, 3):
        cf.qc_loss(field, x[:n], sigma, weight=1.0, fraction="auto", generator=rng())
        explicit = cf.qc_loss(field, x[:n], sigma, weight=1.0, fraction=1 / 32, generator=rng())
        auto = cf.qc_loss(field, x[:n], sigma, weight=1.0, fraction="auto", generator=rng())
        assert torch.equal(auto, explicit)
    assert seen == [2, 2, 2, 1, 1, 1]
    assert AUTO_FRACTION == 1 / 32
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\] or 'auto', got 'all'"):
        cf.qc_loss(field, x, None, weight=1.0, fraction="all")


@pytest.mark.parametrize("train", [False, True])
def test_without_gradients_products_are_the_fields_own(train: bool) -> None:
    net, (x, sigma, v, w) = random_net().train(train), random_batch(extra=2)
    state = torch.get_rng_state()
    live, expected = cf.jacobian(net, x, sigma)
    torch.set_rng_state(state)
    calls = []
    tangents = net.tangents
    net.tangents = lambda *args, **kwargs: calls.append(len(args[2])) or tangents(*args, **kwargs)
    with torch.no_grad():
        value, J = cf.jacobian(net, x, sigma)
        Jv, JTw = J @ v, J.T @ w
    assert calls == [0, 1]
    assert not value.requires_grad and not Jv.requires_grad and not JTw.requires_grad
    assert torch.equal(value, live)
    torch.testing.assert_close(Jv, (expected @ v).detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(JTw, (expected.T @ w).detach(), rtol=1e-10, atol=1e-12)
    assert all(p.requires_grad for p in list(net.parameters())[1:])


def test_an_audit_takes_no_product_twice() -> None:
    """Two for the skew estimate and none for the trace, per batch and level, beside the loop's values."""
    net, x0 = random_net(), random_batch(batch=4, extra=0)[0]
    passes = []
    tangents = net.tangents
    net.tangents = lambda *args, **kwargs: (
        passes.append((len(args[2]), args[0].requires_grad)) or tangents(*args, **kwargs)
    )
    net.forward = lambda x, sigma: net.tangents(x, sigma, ())[0]
    cf.audit(net, x0, cf.VE(0.1, 1.0), levels=1, nodes=6, generator=rng())
    assert passes[-8:] == [(0, True), (1, False)] + 6 * [(0, False)]


class Linear(nn.Module):
    """``s = x A^T + b``: one sample's gradients have known variances."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return x @ self.A.T


def test_penalty_noise_equals_closed_forms() -> None:
    """The skew form is exact in two dimensions, and linear here: its only noise is the level's weight.

    1/2 ||A - A^T||^2 with K = [[0, 1], [-1, 0]] has the gradient 2 (A - A^T) = 4 K of norm^2 32, times the
    weight w: variance 32 lambda^2 Var w. Score matching at x0 = 0 with weight sigma^2: x = sigma z, residual
    sigma A z + z/sigma, gradient sigma^2 (sigma A z + z/sigma) (sigma z)^T = sigma^2 (sigma^2 A + I) z z^T.
    """
    n, lmbda = 1000, 0.1
    sigma = torch.where(torch.arange(n) % 2 == 0, 0.5, 1.0).double()
    x0 = torch.zeros(n, 2, dtype=torch.float64)
    noise = penalty_noise(Linear(), x0, sigma, lmbda=lmbda, generator=rng())
    w = sigma**2
    assert noise.samples == n
    assert math.isclose(noise.penalty, 32 * lmbda**2 * float(w.var()), rel_tol=1e-9)
    # E ||M z z^T||^2 = tr(M^T M) (D + 2), E[M z z^T] = M, with M = w (w A + I) and ||M||^2 = 2 w^2 (w^2 + 1)
    M = torch.stack([v * (v * Linear().A.detach() + torch.eye(2)) for v in (w[0], w[1])])
    variance = 4 * M.square().sum((1, 2)).mean() - M.mean(0).square().sum()
    assert abs(noise.score_matching - float(variance)) < 4 * noise.score_matching_se
    assert noise.score_matching_se < 0.2 * float(variance)
    assert math.isclose(noise.fraction, min(1.0, 20 * noise.penalty / noise.score_matching))


def test_penalty_noise_is_quadratic_in_lambda_and_bounds_the_fraction() -> None:
    x0, sigma = torch.zeros(8, 2, dtype=torch.float64), torch.linspace(0.5, 1, 8, dtype=torch.float64)
    one, ten = (penalty_noise(Linear(), x0, sigma, lmbda=v, generator=rng()) for v in (0.01, 0.1))
    assert math.isclose(ten.penalty, 100 * one.penalty, rel_tol=1e-9)
    assert PenaltyNoise(1.0, 0.0, 7.0, 0.0, 2).fraction == 1
    assert math.isclose(PenaltyNoise(1.0, 0.0, 0.01, 0.0, 2).fraction, 0.2)
    with pytest.raises(ValueError, match="at least two samples"):
        penalty_noise(Linear(), x0[:1], sigma[:1], lmbda=0.1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_audit_of_a_compiled_network_is_that_of_the_network() -> None:
    """Up to the rounding of float32: nothing in it runs in half precision."""
    net, x0 = random_net(LEAST).float(), random_batch(LEAST, 4, extra=0)[0].float()
    options = {"levels": 2, "nodes": 6, "batch": 2}
    eager = cf.audit(net, x0, cf.VE(0.1, 1.0), generator=rng(), **options)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    prepare(net, backend="eager")
    compiled = cf.audit(net, x0, cf.VE(0.1, 1.0), generator=rng(), **options)
    # Four regions; with a graph to x, with a tangent, and as they are. Nothing else was compiled.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 12
    for name in ("asym", "nasym", "work_nats", "nasym_denoiser"):
        assert compiled.column(name) == pytest.approx(eager.column(name), rel=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("n", [2, 1])
def test_compiled_regions_give_the_same_penalty(n: int) -> None:
    """Of one sample, too: its images have no order in memory that torch.cat could keep."""
    config = replace(LEAST, size=8, channels=3)
    net, (x, sigma) = random_net(config).train(), random_batch(config, n, extra=0)
    masks = net.draw_masks(n, rng())
    eager = flat_gradient(penalty(net, x, sigma, condition={"masks": masks}), net)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    prepare(net, backend="aot_eager")
    compiled = flat_gradient(penalty(net, x, sigma, condition={"masks": masks}), net)
    assert (compiled - eager).norm() <= 1e-12 * eager.norm()
    # Blocks of one shape share a graph: two shapes of blocks, the attention and the last norm, in two passes.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 8
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in net.parameters() if p.ndim == 4)


def test_double_backward_that_nobody_asked_for_is_noted_once_for_each_network() -> None:
    x, sigma = (torch.randn(3, 2, generator=rng(), dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    for net in (Linear(), Linear()):
        with pytest.warns(UserWarning, match="Linear has no method `tangents`.*try form='dual'"):
            penalty(net, x, sigma)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*has no method `tangents`")
            penalty(net, x, sigma)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has no method `tangents`")
        for form in ("dual", "double"):
            penalty(Linear(), x, sigma, form)
        penalty(random_net(), *random_batch(extra=0))


def test_only_networks_with_regions_are_prepared() -> None:
    with pytest.raises(ValueError, match="expected one in the field, found Linear without"):
        prepare(Linear())


def test_gradients_add_up_and_match_backward() -> None:
    net, (x, sigma) = random_net(), random_batch(extra=0)
    parameters = list(net.parameters())

    def loss(x: Tensor, sigma: Tensor) -> Tensor:
        return net(x, sigma).square().mean()

    gradient = Gradient(loss, parameters)
    first = gradient(x, sigma)
    assert not first.requires_grad
    gradient(2 * x, sigma, weight=3.0)
    ours = [p.grad for p in parameters if p.requires_grad]
    net.zero_grad()
    (loss(x, sigma) + 3 * loss(2 * x, sigma)).backward()
    expected = [p.grad for p in parameters if p.requires_grad]
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    assert net.all_modules[0].W.grad is None


def test_gradients_have_the_layout_of_their_parameters() -> None:
    """So that they are added in one pass over memory, and fused optimisers take them."""
    net, (x, sigma) = random_net(SMALL), random_batch(extra=0)
    for p in net.parameters():
        if p.ndim == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    parameters = [p for p in net.parameters() if p.requires_grad]
    _, found = Gradient(lambda x, s: net(x, s).square().sum(), parameters).evaluate(torch.ones(()), x, sigma)
    assert all(g is None or g.stride() == p.stride() for g, p in zip(found, parameters, strict=True))
    assert any(p.stride() != torch.empty(p.shape).stride() for p in parameters)


class Overwriting:
    """In place of a CUDA graph: gives the same tensors in each call, with new values."""

    def __init__(self, function: Callable, arguments: tuple, generators: tuple) -> None:
        self.inputs = tuple(a.clone() for a in arguments)
        self.function, self.outputs = function, function(*self.inputs)

    def __call__(self, arguments: tuple) -> tuple:
        for own, new in zip(self.inputs, arguments, strict=True):
            own.copy_(new)
        losses, gradients = self.function(*self.inputs)
        self.outputs[0].copy_(losses)
        for own, new in zip(self.outputs[1], gradients, strict=True):
            assert (own is None) == (new is None)
            if own is not None:
                own.copy_(new)
        return self.outputs


def test_each_shape_is_recorded_after_its_warm_up_and_replayed_from_then_on(monkeypatch) -> None:
    monkeypatch.setattr(Recorded, "DEVICE", "cpu")
    monkeypatch.setattr("curlfree.fast._Graph", Overwriting)
    net = Linear()
    gradient, found = Gradient(lambda x: net(x, None).square().sum(1), net.parameters()), []
    total = torch.zeros(2, 2, dtype=torch.float64)
    for call in range(2 * (Recorded.WARM_UP + 3)):
        x = torch.randn(3 - call % 2, 2, generator=rng(call), dtype=torch.float64)
        found.append(gradient(x, weight=torch.full((len(x),), 0.5, dtype=torch.float64)))
        assert torch.equal(found[-1], net(x, None).square().sum(1).detach())
        assert gradient._evaluate.graphs == max(0, min(2, call + 1 - 2 * Recorded.WARM_UP))
        total += net.A.detach() @ x.T @ x  # the gradient of 1/2 ||x A^T||^2
        torch.testing.assert_close(net.A.grad, total)
    assert len({value.data_ptr() for value in found}) == len(found)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_recorded_gradients_train_as_the_eager_ones(compiled: bool, half: bool) -> None:
    """Score matching and penalty, each a CUDA graph per shape, replayed in turn while Adam moves the weights.

    In bfloat16 the same kernels run in both, if nothing is compiled; compiled ones round elsewhere.
    """
    dtype, autocast = (torch.float32, torch.bfloat16) if half else (torch.float64, None)
    net = random_net(LEAST).cuda().train().to(dtype)
    eager = copy.deepcopy(net)
    if compiled:
        prepare(net)
    source = torch.Generator("cuda")

    def trainer(net: NCSNpp, record: bool) -> tuple[Gradient, Gradient, torch.optim.Adam]:
        def matching(x: Tensor, sigma: Tensor, z: Tensor) -> Tensor:
            return cf.dsm(net, x, sigma, z, condition={"masks": net.draw_masks(len(x), source)})

        def loss(x: Tensor, sigma: Tensor) -> Tensor:
            masks = {"masks": net.draw_masks(len(x), source)}
            return cf.qc_loss(net, x, sigma, weight=sigma**2, generator=source, condition=masks)

        options = {"generators": (source,), "record": record, "autocast": autocast}
        parameters = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(parameters, 1e-3, fused=True)
        return Gradient(matching, parameters, **options), Gradient(loss, parameters, **options), optimizer

    fast, plain = trainer(net, True), trainer(eager, False)
    for step in range(2 * (Recorded.WARM_UP + 3)):
        x, sigma = (t.cuda().to(dtype) for t in random_batch(LEAST, 4 - step % 2, extra=0))  # two shapes
        z, found = torch.sin(x + step), []
        eager.load_state_dict(net.state_dict())  # so that no difference is amplified by training
        for matching, loss, optimizer in (fast, plain):
            optimizer.zero_grad(set_to_none=False)
            source.manual_seed(step)
            values = [matching(x, sigma, z, weight=0.25)]
            source.manual_seed(100 + step)
            values.append(loss(x[: 2 - step % 2], sigma[: 2 - step % 2]))
            tensors = (*values, *(p.grad for p in matching.parameters))
            found.append(torch.cat([t.flatten().double() for t in tensors]))
            optimizer.step()
        bound = 1e-9 if not half else (0.05 if compiled else 1e-3)
        assert (found[0] - found[1]).norm() <= bound * found[1].norm(), step
    assert [g._evaluate.graphs for g in fast[:2]] == [2, 2]


def test_gradients_in_autocast() -> None:
    net, (x, sigma) = random_net().float(), [t.float() for t in random_batch(extra=0)]
    seen = []

    def loss(x: Tensor, sigma: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return net(x, sigma).square().mean()

    Gradient(loss, net.parameters(), autocast=torch.bfloat16)(x, sigma)
    Gradient(loss, net.parameters())(x, sigma)
    assert seen[0] == (True, torch.bfloat16)
    assert not seen[1][0]
    assert all(p.grad.dtype == torch.float32 for p in net.parameters() if p.requires_grad)


@pytest.mark.parametrize("energy", [cf.ScoreNormEnergy, lambda net: cf.DenoiserEnergy(ScoreDenoiser(net))])
def test_an_energy_never_learns_in_half_precision(energy: Callable) -> None:
    """At sigma = 50 a network in its first steps had a gradient of cosine 0.8 with the right one."""
    net, (x0, sigma, z) = random_net().float(), [t.float() for t in random_batch(extra=1)]
    E = energy(net)
    plain = flat_gradient(energy_dsm(E, x0, sigma, z).sum(), net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = energy_dsm(E, x0, sigma, z).sum()
    assert torch.equal(plain, flat_gradient(loss, net))


def test_nothing_is_replayed_if_masks_are_given(monkeypatch) -> None:
    """A CUDA graph that is being recorded has no random state that could be read or set."""

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("curlfree.operators.Replay.__init__", refuse)
    net, (x0, sigma, z) = random_net().train(), random_batch()
    condition = {"masks": net.draw_masks(2, rng())}
    assert energy_dsm(cf.ScoreNormEnergy(net), x0, sigma, z, condition=condition).isfinite().all()
    assert penalty(net, x0, sigma, condition=condition).isfinite()


@pytest.mark.parametrize("energy", [cf.ScoreNormEnergy, lambda net: cf.DenoiserEnergy(ScoreDenoiser(net))])
@pytest.mark.parametrize("replayed", [False, True])
def test_energies_learn_by_one_ordinary_backward(energy: Callable, replayed: bool) -> None:
    net, (x0, sigma, z) = random_net().train(), random_batch()
    E = energy(net)
    condition = {} if replayed else {"masks": net.draw_masks(2, rng())}
    state = torch.get_rng_state()
    ours = energy_dsm(E, x0, sigma, z, condition=condition)
    torch.set_rng_state(state)
    expected = cf.dsm(cf.EnergyField(E), x0, sigma, z, condition=condition)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
    weight = sigma**2
    a, b = flat_gradient((weight * ours).mean(), net), flat_gradient((weight * expected).mean(), net)
    assert (a - b).norm() <= 1e-10 * b.norm()


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "config", [SMALL, replace(SMALL, size=16, multipliers=(1, 1, 2), blocks=2, channels=3)]
)
def test_the_baseline_in_the_authors_style_computes_our_network(config: NCSNppConfig) -> None:
    net, (x, sigma) = random_net(config), random_batch(config, extra=0)
    theirs = benchmark("authors_style").AuthorsNet.like(net)
    torch.testing.assert_close(theirs(x, sigma), net(x, sigma), rtol=1e-10, atol=1e-10)
    assert theirs(x, sigma).abs().max() > 1
    gradients = [flat_gradient(f(x, sigma).square().mean(), f) for f in (theirs, net)]
    assert len(gradients[0]) == len(gradients[1])


class Spoilt(nn.Module):
    """A network whose tangents, and nothing else, go through `spoil`."""

    def __init__(self, net: NCSNpp, spoil: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.spoil = net, spoil

    def draw_masks(self, batch: int) -> tuple[Tensor, ...]:
        return self.net.draw_masks(batch)

    def forward(self, x: Tensor, sigma: Tensor, masks: tuple[Tensor, ...] | None = None) -> Tensor:
        return self.net(x, sigma, masks=masks)

    def tangents(
        self, x: Tensor, sigma: Tensor, vs: tuple[Tensor, ...], masks: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, products = self.net.tangents(x, sigma, vs, masks=masks)
        return value, tuple(self.spoil(p) for p in products)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_check_passes_correct_tangents(train: bool, dtype: torch.dtype) -> None:
    net, (x, sigma) = random_net().train(train).to(dtype), [t.to(dtype) for t in random_batch(extra=0)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_form(net, x, sigma) == "dual"


def test_check_finds_wrong_products() -> None:
    field, (x, sigma) = Spoilt(random_net(), lambda p: 1.03 * p).float(), random_batch(extra=0)
    x, sigma = x.float(), sigma.float()
    with pytest.raises(ValueError, match="expected the product J v of automatic differentiation"):
        check_tangents(field, x, sigma)
    with pytest.warns(UserWarning, match="falls back to double backward"):
        assert choose_form(field, x, sigma) == "double"


def test_check_finds_wrong_gradients_of_right_products() -> None:
    field, (x, sigma) = (
        Spoilt(random_net(), lambda p: p.detach() + 0.5 * (p - p.detach())),
        random_batch(extra=0),
    )
    with pytest.raises(ValueError, match="expected the gradient of automatic differentiation"):
        check_tangents(field, x, sigma)


def test_check_finds_wrong_gradients_in_autocast() -> None:
    def spoil(p: Tensor) -> Tensor:
        return -p if torch.is_autocast_enabled("cpu") else p

    field, (x, sigma) = Spoilt(random_net(SMALL), spoil).float(), random_batch(extra=0)
    x, sigma = x.float(), sigma.float()
    check_tangents(field, x, sigma)
    with pytest.raises(ValueError, match=r"expected the gradient in torch\.bfloat16"):
        check_tangents(field, x, sigma, autocast=torch.bfloat16)
