"""The autoencoder of Sec. 6: the published run, seeds side by side, closed forms against the library's."""

import math
from typing import Any

import pytest
import torch

from curlfree import estimators
from curlfree.experiments import autoencoder as a
from curlfree.experiments import autoencoder_page as page
from curlfree.operators import jacobian

SEEDS = (0, 3, 8)


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


def test_seed_8_ends_where_the_published_run_ends():
    """Within 7,200 of its 10,002 steps; the committed record has them all."""
    run = a.without_data([a.PAPER_SEED], steps=7200)
    final = {name: value[0] for name, value in run["final"].items()}
    assert a.reached(final)
    assert f"{final['difference']:.3f}" == f"{a.PAPER['last']['difference']:.3f}"
    assert run["outcome"] == [a.PARALLEL]
    assert run["history"]["step"][-1] == 7199


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


def test_signs_are_shares_of_points():
    J = torch.tensor([[[-2.0, 9.0], [-9.0, -1.0]], [[-2.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, -1.0]]])
    found = a.signs(torch.stack([J, -J]))
    assert found["negative_trace"].tolist() == pytest.approx([2 / 3, 1 / 3])
    assert found["negative"].tolist() == pytest.approx([1 / 3, 0.0])


def test_the_exact_scores_jacobian_has_the_recorded_signs():
    """Against the closed form of the smoothed mixture's Hessian: the score is of a density with valleys."""
    data = a.with_data([8], steps=1)["score"]
    mixture, variance = a.mixture(), a.DATA_STD**2 + a.SIGMA**2
    x = mixture.sample(20_000, torch.Generator().manual_seed(5), torch.float64)
    x = x + a.SIGMA * torch.randn(x.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    offset = mixture.means.double() - x[:, None]
    share = torch.softmax(-offset.square().sum(2) / (2 * variance), dim=1)
    mean = (share[..., None] * offset).sum(1, keepdim=True)
    spread = torch.einsum("nk,nki,nkj->nij", share, offset - mean, offset - mean)
    hessian = spread / variance**2 - torch.eye(2).double() / variance
    positive = float((torch.linalg.eigvalsh(hessian)[:, -1] > 0).double().mean())
    assert 0.1 < positive < 0.4
    assert 1 - data["negative"] == pytest.approx(positive, abs=0.02)
    trace = hessian.diagonal(dim1=1, dim2=2).sum(1)
    assert data["negative_trace"] == pytest.approx(float((trace < 0).double().mean()), abs=0.02)


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return {"without_data": a.without_data(SEEDS, steps=3), "with_data": a.with_data(SEEDS, steps=3)}


def text_of(values: dict[str, Any]) -> str:
    items = page.disagreements(values)
    return "\n".join([*page.summary(values), *(f"{d.paper} {d.ours} {d.why}" for d in items)])


def ended(values: dict[str, Any], outcome: list[str], **final: list[float]) -> dict[str, Any]:
    """The values, had the runs without data ended so."""
    run = values["without_data"]
    return {**values, "without_data": {**run, "outcome": outcome, "final": {**run["final"], **final}}}


def test_sentences_about_the_kinds_of_conservative_runs_follow_the_values(values):
    zero, apart = [1e-12, 1e-12, 1e-12], [1.0, 0.5, 2.0]
    now = {"loss": zero, "sym": zero, "difference": apart}
    parallel = text_of(ended(values, [a.PARALLEL] * 3, **now))
    assert "3 of 3 seeds end as Fig. 3 shows" in parallel
    assert "both are rounding" in parallel
    assert "both are rounding" not in text_of(values)
    assert "One number per unit gives 3 of the 3 by construction" in parallel
    mixed = text_of(ended(values, [a.PARALLEL, a.MERGED, a.OTHERWISE], **now, joint_angle=[90.0, 0.01, 90.0]))
    assert "One number per unit gives 2 of the 3 by construction" in mixed
    assert "1 use more freedom" in mixed
    crooked = ended(values, [a.PARALLEL, a.MERGED, a.MERGED], **now, joint_angle=[0.0, 0.01, 5.0])
    assert "in 2 two units became one, in 1 of them with parallel sums" in text_of(crooked)
    assert "gives 2 of the 3 by construction" in text_of(crooked)


def test_sentences_about_the_arms_follow_the_values(values):
    def scored(**esm: list[float]) -> dict[str, Any]:
        data = values["with_data"]
        arms = {
            name: {**arm, "esm": esm.get(name.removeprefix("C "), arm["esm"])}
            for name, arm in data["arms"].items()
        }
        return {**values, "with_data": {**data, "arms": arms}}

    better = scored(QC=[0.2, 0.2, 0.2], tied=[0.3, 0.1, 0.3], parallel=[0.1, 0.1, 0.4])
    found = text_of(better)
    assert "QC has a lower score error than tied weights on 2 of 3 seeds" in found
    assert "a lower one than QC on 2, and Asym of at most 0." in found
    assert "preferable" not in text_of(scored(QC=[0.2, 0.2, 0.2], parallel=[0.3, 0.1, 0.3]))
    score = {**better["with_data"], "score": {"negative_trace": 0.25, "negative": 0.125}}
    found = text_of({**better, "with_data": score})
    assert "Jacobian is negative at 25% of the test points" in found
    assert "of the exact score 0.25 and 0.125" in page.tables({**better, "with_data": score})[-1].note


def test_captions_follow_the_values(values, tmp_path, monkeypatch):
    monkeypatch.setattr(page.figures, "save", lambda *_: None)
    arms = values["with_data"]["arms"]
    changed = {**arms, "QC": {**arms["QC"], "asym": [0.5, 0.25, 0.75], "angle": [1.0, 2.0, 3.0]}}
    changed["C parallel"] = {**arms["C parallel"], "asym": [0.0, 1e-31, 0.0]}
    values = ended(values, [a.FALLING] * 3, difference=[0.5, 0.02, 0.7])
    captions = [
        p.caption
        for p in page.draw({**values, "with_data": {**values["with_data"], "arms": changed}}, tmp_path)
    ]
    assert "smallest ||W - R|| at the end is 0.02" in captions[1]
    assert "between 0.25 and 0.75, its largest angles between 1 and 3 degrees" in captions[2]
    assert "largest asymmetry of parallel columns is 1e-31" in captions[2]


def test_progress_is_called_once_a_step():
    done: list[str] = []
    a.without_data([8], 3, done.append)
    a.with_data([8], 2, done.append)
    assert done == ["without data"] * 3 + [f"with data: {arm.name}" for arm in a.ARMS for _ in range(2)]
