"""The autoencoder of Sec. 6: the published run, seeds side by side, closed forms against the library's."""

import math

import pytest
import torch

from curlfree import estimators
from curlfree.experiments import autoencoder as a
from curlfree.operators import jacobian

SEEDS = (0, 8, 3)


def double(weights: a.Weights) -> a.Weights:
    return {name: w.double() for name, w in weights.items()}


def one(weights: a.Weights, index: int) -> a.Weights:
    return {name: w[index : index + 1] for name, w in weights.items()}


def field_of(weights: a.Weights, decoder: a.Decoder):
    """One seed as a field of the library, through autograd."""

    def field(x, sigma=None, /, **_):
        z = x @ weights["W"][0] + weights["b"][0]
        h = z * torch.sigmoid(weights["slope"][0] * z)
        return h @ decoder(weights)[0].T + weights["c"][0]

    return field


def test_seed_8_starts_where_the_published_run_starts():
    weights = a.draw_weights([a.PAPER_SEED])
    loss = float(a.rotation(weights, a.grid()).square().mean())
    found = {name: float(value) for name, value in a.conditions(weights).items()}
    printed = a.PAPER["first"]
    assert f"{loss:.4f}" == f"{printed['loss']:.4f}"
    assert f"{found['sym'] / math.sqrt(2):.3f}" == f"{printed['sym']:.3f}"
    assert f"{found['difference']:.3f}" == f"{printed['difference']:.3f}"


@pytest.mark.slow
def test_seed_8_ends_where_the_published_run_ends():
    run = a.without_data([a.PAPER_SEED])
    final = {name: value[0] for name, value in run["final"].items()}
    assert a.reached(final)
    assert f"{final['difference']:.3f}" == f"{a.PAPER['last']['difference']:.3f}"
    assert run["outcome"] == [a.PARALLEL]
    assert run["history"]["step"][-1] == 10_001


@pytest.mark.parametrize("decoder", [a.free, a.tied, a.parallel])
def test_closed_forms_agree_with_the_library(decoder):
    weights = double(a.draw_weights(SEEDS, hidden=5))
    weights["slope"] = weights["slope"] + 0.3 * weights["b"]
    x = 3 * torch.randn(40, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    s, rot = a.evaluate(weights, x.T, decoder)
    for i in range(len(SEEDS)):
        field = field_of(one(weights, i), decoder)
        torch.testing.assert_close(s[i].T, field(x), rtol=1e-12, atol=1e-12)
        exact = estimators.asymmetry(field, x, estimator="exact")
        torch.testing.assert_close(rot[i].square(), exact.detach(), rtol=1e-10, atol=1e-14)
        nasym = estimators.asymmetry(field, x, estimator="exact").sum() / 2
        _, J = jacobian(field, x)
        pooled = float((nasym / J.dense().square().sum()).detach())
        arm = a.Arm("any", 0.0, decoder)
        scored = a.score_arm(arm, one(weights, i), x.T, torch.zeros(2, 40, dtype=torch.float64))
        assert float(scored["nasym"]) == pytest.approx(pooled, rel=1e-9, abs=1e-15)


def test_the_trace_form_equals_the_squared_rotation_density():
    weights, points = double(a.draw_weights(SEEDS)), a.grid().double()
    exact = a.rotation(weights, points).square().mean(1)
    torch.testing.assert_close(a.trace_form(weights, points), exact, rtol=1e-12, atol=1e-14)


def test_every_seed_equals_its_own_single_run_without_data():
    together = a.without_data(SEEDS, steps=60)
    for i, seed in enumerate(SEEDS):
        alone = a.without_data([seed], steps=60)
        for name in ("loss", "sym", "difference"):
            assert together["final"][name][i] == pytest.approx(alone["final"][name][0], rel=1e-4)


@pytest.mark.parametrize("arm", a.ARMS, ids=lambda arm: arm.name)
def test_every_seed_equals_its_own_single_run_with_data(arm):
    def weights(seeds: tuple[int, ...]) -> a.Weights:
        start = double(a.draw_weights(seeds, a.DATA_HIDDEN))
        loss = a.dsm_with_penalty(arm, seeds)
        return a.train(
            start, loss, steps=60, learning_rate=a.DATA_RATE, log_every=60, log=lambda w, losses: {}
        )[0]

    together = weights(SEEDS)
    for i, seed in enumerate(SEEDS):
        for name, value in weights((seed,)).items():
            torch.testing.assert_close(together[name][i], value[0], rtol=1e-9, atol=1e-10)


def test_clipping_is_that_of_torch_for_every_seed():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(4, *shape, generator=generator) for shape in ((2, 3), (3,))]
    gradients = [g * torch.tensor([0.01, 0.3, 3.0, 100.0]).view(-1, *[1] * (g.ndim - 1)) for g in gradients]
    expected = []
    for i in range(4):
        parameters = [torch.zeros_like(g[i]).requires_grad_() for g in gradients]
        for parameter, g in zip(parameters, gradients, strict=True):
            parameter.grad = g[i].clone()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        expected.append([parameter.grad for parameter in parameters])
    a._clip(gradients)
    for i, wanted in enumerate(expected):
        for g, w in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(g[i], w)


def test_parallel_columns_are_conservative_and_equal_products_are_not():
    weights = double(a.draw_weights([0]))
    points = a.grid().double()
    R, W = weights["R"][0], weights["W"][0]
    mixing = torch.tensor([[1.0, 0.8], [0.8, -0.5]], dtype=torch.float64)
    symmetric = {**weights, "W": (R @ mixing)[None]}
    assert float(a.conditions(symmetric)["sym"]) < 1e-12
    assert float(a.conditions(symmetric)["angle"]) > 1.0
    assert float(a.rotation(symmetric, points).square().mean()) > 1e-4
    parallel = {**weights, "R": (W * torch.tensor([2.0, -0.3], dtype=torch.float64))[None]}
    assert float(a.conditions(parallel)["difference"]) > 0.1
    assert float(a.conditions(parallel)["angle"]) < 1e-10
    assert float(a.rotation(parallel, points).square().mean()) < 1e-25


def test_two_equal_units_need_only_their_sum_to_be_parallel():
    weights = double(a.draw_weights([0]))
    column = weights["W"][:, :, :1]
    weights |= {"W": column.expand(-1, -1, 2), "b": weights["b"][:, :1].expand(-1, 2)}
    weights["R"] = torch.cat([weights["R"][:, :, :1], 0.7 * column - weights["R"][:, :, :1]], dim=2)
    points = a.grid().double()
    assert float(a.conditions(weights)["angle"]) > 1.0
    assert float(a.gate_difference(weights, points)) == 0.0
    assert float(a.rotation(weights, points).square().mean()) < 1e-25


def test_data_of_a_seed_do_not_depend_on_the_other_seeds_or_on_the_order_of_steps():
    weights = a.draw_weights(SEEDS, a.DATA_HIDDEN)
    loss = a.dsm_with_penalty(a.ARMS[1], SEEDS)
    later, first = loss(weights, a.DATA_CHUNK + 3), loss(weights, 0)
    alone = a.dsm_with_penalty(a.ARMS[1], SEEDS[1:2])
    torch.testing.assert_close(alone(one(weights, 1), a.DATA_CHUNK + 3), later[1:2])
    torch.testing.assert_close(alone(one(weights, 1), 0), first[1:2])
