"""Seeds trained side by side, and the two evaluations of the two-dimensional experiment."""

import copy
import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import curlfree as cf
from curlfree.experiments import reproduce, toy2d, toy2d_page
from curlfree.experiments.toy2d_eval import (
    Sizes,
    corrected,
    kernel_score,
    prior_mismatch,
    published,
    with_weights,
)
from curlfree.experiments.toy2d_figures import lambda_sweep
from curlfree.experiments.toy2d_train import (
    CHUNK,
    PAPER_ARMS,
    PLUS_ARMS,
    PROBLEMS,
    Arm,
    Recipe,
    clean_points,
    draws,
    paper_recipe,
    plus_recipe,
    step_loss,
    train,
    training_set,
)
from curlfree.nets.mlp import FilmMLP, FilmMLPConfig, PaperMLP, PaperMLPConfig
from curlfree.nets.stacked import Stacked, clip_gradients, select
from curlfree.seeds import stream

CPU = torch.device("cpu")
PROBLEM = PROBLEMS["checkerboard"]


def small(arm: str, steps: int = 50) -> tuple[Arm, Recipe]:
    """An arm with few points per step; in the paper's recipe, of few passes through few points."""
    if arm in PAPER_ARMS:
        return PAPER_ARMS[arm], replace(paper_recipe(steps), batch=32, points=500)
    return PLUS_ARMS[arm], plus_recipe(steps, 32)


@pytest.mark.parametrize(
    ("arm", "dtype", "tolerance"),
    [
        ("QC", torch.float32, 1e-5),
        ("C+", torch.float32, 1e-5),
        ("C", torch.float64, 1e-12),
        ("QC+ est~", torch.float64, 1e-12),
    ],
)
def test_each_seed_is_its_own_run(arm: str, dtype: torch.dtype, tolerance: float) -> None:
    made, recipe = small(arm)
    together = train(made, recipe, PROBLEM, [3, 0, 8], dtype=dtype)
    alone = train(made, recipe, PROBLEM, [8], dtype=dtype)
    for ours, theirs in zip(select(together.field, 2).parameters(), alone.field.parameters(), strict=True):
        assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())
    for name, average in alone.average.items():
        torch.testing.assert_close(together.average[name][2:], average, rtol=0, atol=tolerance)
    first = next(iter(together.field.parameters()))
    assert not torch.equal(first[0], first[1])


def test_stacked_networks_answer_as_they_do_alone() -> None:
    networks = [PaperMLP(PaperMLPConfig(), stream(seed)).double() for seed in range(3)]
    stacked = Stacked(networks)
    g = stream(0, "points")
    x = torch.randn(12, 2, generator=g, dtype=torch.float64)
    sigma = torch.rand(12, generator=g, dtype=torch.float64) + 0.1
    parts = zip(networks, x.chunk(3), sigma.chunk(3), strict=True)
    torch.testing.assert_close(
        stacked(x, sigma), torch.cat([f(*at) for f, *at in parts]), rtol=1e-13, atol=1e-13
    )
    _, J = cf.jacobian(cf.PaperField(stacked), x, sigma)
    parts = zip(networks, x.chunk(3), sigma.chunk(3), strict=True)
    dense = torch.cat([cf.jacobian(cf.PaperField(f), *at)[1].dense() for f, *at in parts])
    torch.testing.assert_close(J.dense(), dense, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(select(stacked, 1)(x[4:8], sigma[4:8]), networks[1](x[4:8], sigma[4:8]))
    moved = Stacked([FilmMLP(FilmMLPConfig(width=8, blocks=1), stream(0))]).to("meta")  # buffers, too
    assert moved(torch.empty(4, 2, device="meta"), torch.empty(4, device="meta")).is_meta
    with pytest.raises(ValueError, match="equal parts, got 13"):
        stacked(x.repeat(2, 1)[:13], sigma.repeat(2)[:13])
    with pytest.raises(ValueError, match="at least one"):
        Stacked([])


def test_gradients_are_clipped_seed_by_seed() -> None:
    networks = [FilmMLP(FilmMLPConfig(width=8, blocks=1), stream(seed)) for seed in range(2)]
    stacked = Stacked(networks)
    x, level = torch.randn(6, 2, generator=stream(1)), torch.zeros(6)
    factor = torch.tensor([1e-3, 1e3]).repeat_interleave(3)[:, None]
    (factor * stacked(x, level)).square().sum().backward()
    norms = clip_gradients(stacked, 2, 0.5)
    for i, network in enumerate(networks):
        rows = slice(3 * i, 3 * i + 3)
        (factor[rows] * network(x[rows], level[rows])).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        torch.testing.assert_close(norms[i], norm)
        for stack, parameter in zip(stacked.parameters(), network.parameters(), strict=True):
            assert stack.grad is not None
            torch.testing.assert_close(stack.grad[i], parameter.grad)
    assert norms[0] < 0.5 < norms[1]


@pytest.mark.parametrize("arm", ["U", "QC", "QC+"])
def test_loss_is_the_papers(arm: str) -> None:
    made, recipe = small(arm)
    field = made.build(PROBLEM, [0, 1]).double()
    draw = next(draws(recipe, PROBLEM, [0, 1], CPU))
    x0, sigma, z, v = (a.double() for a in draw)
    value = step_loss(field, type(draw)(x0, sigma, z, v), recipe, made, 2)
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(2):
        rows = slice(32 * i, 32 * (i + 1))
        one, x, s = select(field, i), (x0 + sigma[:, None] * z)[rows], sigma[rows]
        weighted = (s[:, None] * one(x, s) + z[rows]).square().sum(1)
        expected = expected + (weighted.mean() if arm in PAPER_ARMS else weighted.mean() / 2)
        if made.lmbda:
            n = 32 if arm in PAPER_ARMS else 8
            J = cf.jacobian(one, x[:n], s[:n])[1].dense()
            expected = expected + 0.1 * (s[:n].square() * (J[:, 0, 1] - J[:, 1, 0]).square()).mean()
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=0)


def test_in_the_plane_the_skew_estimator_is_exact() -> None:
    recipe = plus_recipe(1, 32)
    draw = next(draws(recipe, PROBLEM, [0], CPU))
    field = PLUS_ARMS["QC+"].build(PROBLEM, [0])
    exact, skew = (step_loss(field, draw, recipe, PLUS_ARMS[n], 1) for n in ("QC+", "QC+ skew"))
    torch.testing.assert_close(skew, exact, rtol=1e-6, atol=0)


def test_a_pass_meets_every_training_point_once() -> None:
    recipe = replace(paper_recipe(150), batch=10, points=100)
    chunks = list(clean_points(recipe, PROBLEM, 4, CPU))
    assert [chunk.shape for chunk in chunks] == [(CHUNK, 10, 2)] * 2
    points = training_set(PROBLEM, 100, CPU).sort(0).values
    passes = chunks[0].view(-1, 100, 2)
    for i in range(len(passes)):
        assert torch.equal(passes[i].sort(0).values, points)
    assert not torch.equal(passes[0], passes[1])
    assert not torch.equal(chunks[0], chunks[1])


def test_a_seeds_draws_do_not_depend_on_the_others() -> None:
    recipe = plus_recipe(CHUNK + 2, 4)
    pairs = zip(draws(recipe, PROBLEM, [5], CPU), draws(recipe, PROBLEM, [1, 5, 2], CPU), strict=True)
    for alone, together in islice(pairs, CHUNK - 1, CHUNK + 2):
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a, b[4:8])


class Truth:
    """The exact score of a set as a field."""

    def __init__(self, name: str) -> None:
        self.data = PROBLEMS[name].data

    def __call__(self, x: Tensor, sigma: Tensor | None, /, **condition: Any) -> Tensor:
        """The score at x."""
        return self.data.score(x, sigma)


@pytest.mark.parametrize("name", PROBLEMS)
def test_exact_score_is_perfect_by_the_corrected_evaluation(name: str) -> None:
    problem = PROBLEMS[name]
    process = plus_recipe(1, 1).process(problem.data.data_std)
    (found,) = corrected(Truth(name), problem, process, [0], Sizes(200, 1000, 300), CPU)
    assert found["score_error"] == 0
    assert found["asym"] < 1e-9
    assert abs(found["nll_gap"]) < 4 * found["nll_gap_se"] + 2e-3  # the prior's mismatch and the tolerance
    assert abs(found["nll"] - problem.data.entropy(0.1)) < 4 * found["nll_se"] + 2e-3
    assert min(found["precision"], found["recall"]) > 0.85
    assert len(found["lists"]["asym"]) == len(found["levels"]) == 13


def test_seeds_measured_together_are_measured_as_alone() -> None:
    made, recipe = small("QC+", 3)
    field = made.build(PROBLEM, [0, 4, 7])
    process, sizes = recipe.process(PROBLEM.data.data_std), Sizes(50, 40, 60)
    for evaluate in (
        lambda field, seeds: corrected(field, PROBLEM, process, seeds, sizes, CPU),
        lambda field, seeds: published(field, PROBLEM, seeds, sizes, CPU),
    ):
        together, (alone,) = evaluate(field, [0, 4, 7]), evaluate(select(field, 1), [4])
        for name, value in alone.items():
            if isinstance(value, float | int):
                assert together[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        assert together[1]["nfe"] == alone["nfe"]
        assert together[0]["nll"] != together[1]["nll"]


def test_corrected_evaluation_sees_a_known_error() -> None:
    """The score plus the rotation c (-x2, x1) has error c^2 |x|^2/2 and Asym 4c^2."""
    c, problem = 0.3, PROBLEMS["8gaussian"]
    truth, turn = Truth("8gaussian"), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])

    def field(x: Tensor, sigma: Tensor | None, /, **condition: Any) -> Tensor:
        return truth(x, sigma) + c * x @ turn

    process = paper_recipe(1).process(problem.data.data_std)
    (found,) = corrected(field, problem, process, [0], Sizes(4000, 100, 100), CPU)
    assert len(found["levels"]) == 11
    assert found["asym"] == pytest.approx(4 * c**2, rel=1e-5)
    levels = torch.tensor(found["levels"], dtype=torch.float64)
    expected = c**2 * (levels.square() + problem.data.data_std**2)  # half the mean of |x|^2 is its variance
    assert found["score_error"] == pytest.approx(float(expected.mean()), rel=0.02)


def test_published_oracle_is_blurred_twice_and_asked_elsewhere() -> None:
    """A perfect model (8-Gaussian) has an error of 0.009, of 0.2 by kernels; the oracle has one of 0."""
    problem, truth = PROBLEMS["8gaussian"], Truth("8gaussian")
    sizes = Sizes(2000, 20, 50)
    perfect = published(truth, problem, [0], sizes, CPU)[0]
    assert perfect["score_error_limit"] == pytest.approx(0.009, abs=0.002)
    assert perfect["score_error_matched"] == 0
    assert perfect["score_error"] == pytest.approx(0.2, abs=0.03)

    def mistaken(x: Tensor, sigma: Tensor | None, /, **condition: Any) -> Tensor:
        assert sigma is not None
        n = 10 * torch.log(sigma / 0.1) / math.log(30) - 1
        return truth(x, math.sqrt(2) * 0.1 * 30 ** (n / 11).clamp(min=0))

    assert published(mistaken, problem, [0], sizes, CPU)[0]["score_error_limit"] < 1e-6


def test_kernel_score_is_the_gradient_of_the_density_estimate() -> None:
    g = stream(0)
    centres = torch.randn(50, 2, generator=g, dtype=torch.float64)
    x = torch.randn(7, 2, generator=g, dtype=torch.float64).requires_grad_()
    density = torch.exp(-(x[:, None] - centres).square().sum(2) / (2 * 0.3**2)).mean(1)
    (gradient,) = torch.autograd.grad(density.log().sum(), x)
    torch.testing.assert_close(kernel_score(x.detach(), centres, 0.3, rows=3), gradient)


def test_prior_mismatch_of_a_gaussian_is_known() -> None:
    data = cf.GaussianMixture(torch.zeros(1, 2), 2.0)
    for wide in (0.0, 2.0):
        ratio = (4 + 9) / (9 + wide**2)
        assert prior_mismatch(data, cf.VE(0.1, 3.0, data_std=wide)) == pytest.approx(
            ratio - 1 - math.log(ratio), abs=1e-3
        )


def test_what_is_kept_is_used_only_for_the_same_constants(tmp_path: Path) -> None:
    answers = iter([1.0, 2.0])

    def measure() -> float:
        return next(answers)

    path = tmp_path / "kept.json"
    assert [toy2d.kept(path, {"levels": (1, n)}, measure) for n in (2, 2, 3, 3)] == [1.0, 1.0, 2.0, 2.0]


def test_models_are_resumed_not_retrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = next(t for t in toy2d.plan("corrected", True, 2) if t.name == "QC+")
    task = replace(task, recipe=plus_recipe(3, 8))
    steps: list[int] = []
    made = toy2d.kept_model(task, CPU, tmp_path, lambda: steps.append(1))
    with monkeypatch.context() as patch:
        patch.setattr(toy2d, "train", None)
        again = toy2d.kept_model(task, CPU, tmp_path, lambda: steps.append(1))
    assert len(steps) == 6
    for a, b in zip(made.field.parameters(), again.field.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(made.average[n], again.average[n]) for n in made.average)
    longer = replace(task, recipe=plus_recipe(4, 8))
    assert toy2d.kept_model(longer, CPU, tmp_path, lambda: steps.append(1)) is not None
    assert len(steps) == 10


def test_plan_has_every_arm_of_each_mode() -> None:
    full = toy2d.plan("corrected", False, 5)
    assert len(full) == 3 * (len(PAPER_ARMS) + len(PLUS_ARMS))
    assert {t.name for t in toy2d.plan("paper", False, 5)} == set(PAPER_ARMS)
    assert len({t.stem for t in full}) == len(full)
    assert {t.key for t in full} == set(toy2d_page.PAPER)
    assert list(lambda_sweep(PLUS_ARMS).values()) == ["U+", "QC+ 0.01", "QC+ 0.03", "QC+", "QC+ 0.3", "QC+ 1"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with next to no steps and points."""
    monkeypatch.setattr(toy2d, "DEMO_STEPS", 2)
    monkeypatch.setattr(toy2d, "DEMO_BATCH", 16)
    monkeypatch.setattr(toy2d, "DEMO_SIZES", Sizes(20, 10, 20))
    monkeypatch.setattr("curlfree.experiments.toy2d_figures.SAMPLES", 50)
    monkeypatch.setattr("curlfree.experiments.toy2d_figures.PATH_STEPS", 5)
    monkeypatch.setattr("curlfree.experiments.toy2d_figures.FINE_GRID", 9)


@pytest.mark.parametrize("mode", ["corrected", "paper"])
@pytest.mark.usefixtures("tiny")
def test_demo_writes_a_record_figures_and_a_report(mode: Any, tmp_path: Path) -> None:
    record = reproduce("toy2d", out=tmp_path, mode=mode, seeds=2, quick=True)
    stored = json.loads((tmp_path / "metrics.json").read_text())
    arms = stored["values"][{"paper": "published"}.get(mode, mode)]["checkerboard"]
    assert set(arms) == (set(PAPER_ARMS) if mode == "paper" else {"C+", "U+", "QC+"})
    (perfect,) = stored["values"]["sets"]["checkerboard"].get("exact score by the authors' rules", [{}])
    assert (perfect.get("score_error_matched") == 0) == (mode == "paper")
    assert all(len(runs) == 2 for runs in arms.values())
    assert stored["seeds"] == [0, 1]
    page = (tmp_path / "report.html").read_text()
    for plot in record.plots:
        assert (tmp_path / f"{plot.name}.svg").stat().st_size > 1000
        assert plot.title in page
    again = copy.deepcopy(stored["values"])
    assert (
        json.loads(json.dumps(reproduce("toy2d", out=tmp_path, mode=mode, seeds=2, quick=True).values))
        == again
    )


def test_intervals_overlap_or_differ() -> None:
    runs = [{"nll": 5.0}, {"nll": 5.1}, {"nll": 5.2}]  # 5.1 ± 0.248
    assert toy2d_page.agrees((5.4, 0.06), runs, "nll")
    assert not toy2d_page.agrees((5.4, 0.04), runs, "nll")
    assert toy2d_page.agrees((0.0, 0.0), [{"asym": 1e-12}], "asym")


def test_every_cell_that_differs_has_a_measured_cause() -> None:
    made, recipe = small("QC", 2)
    runs = published(train(made, recipe, PROBLEM, [0, 1]).field, PROBLEM, [0, 1], Sizes(20, 10, 20), CPU)
    far = [{name: value + 1e3 for name, value in run.items()} for run in runs]
    values = {"published": {"checkerboard": {"C": far, "U": far, "QC": far}}, "corrected": {}, "sets": {}}
    stated = toy2d_page.disagreements(values)
    assert len(stated) == len(PAPER_ARMS) * len(toy2d_page.METRICS)
    assert all(item.why.startswith("None of what was varied explains it. Measured: ") for item in stated)


def test_a_cause_is_what_gives_the_printed_number() -> None:
    runs = [{"nll": 5.0, "nll_prior": 4.2}, {"nll": 5.1, "nll_prior": 4.3}, {"nll": 5.05, "nll_prior": 4.25}]

    def verdict(value: float) -> str:
        return toy2d_page.cause((value, 0.01), runs, "nll").split(":")[1].split(".")[0].strip()

    assert verdict(4.25) == "a prior of the right variance"
    assert verdict(5.1) == "the spread over seeds"
    assert toy2d_page.cause((4.7, 0.01), runs, "nll").startswith("None of what was varied")
    doubled = toy2d_page.cause((0.8, 0.0), [{"score_error": 0.4, "score_error_matched": 0.1,
                                             "score_error_limit": 0.2}], "score_error")  # fmt: skip
    assert doubled.startswith("Would explain it: no 1/2, as printed. Measured: our seeds (1)")


def test_a_run_that_did_not_train_is_named() -> None:
    def runs(*losses: float) -> list[dict[str, float]]:
        return [{"dsm": loss} for loss in losses]

    sets = {"spirals": {toy2d_page.EXACT: runs(0.5)}}
    values = {"published": {}, "corrected": {"spirals": {"U": runs(0.6, 1.2), "C": runs(0.7)}}, "sets": sets}
    (line,) = toy2d_page.summary(values)
    assert "DID NOT TRAIN" in line
    assert line.endswith("U (1 of 2).")


def test_cells_that_were_not_run_say_so() -> None:
    run = dict.fromkeys([*toy2d_page.METRICS, "nll_prior"], 1.0)
    values = {"published": {"spirals": {"U": [run, run]}}, "corrected": {}, "sets": {}}
    (table, *_) = toy2d_page.tables(values)
    assert [row[0] for row in table.rows] == ["Spirals: C", "Spirals: U", "Spirals: QC"]
    assert [row[2] for row in table.rows] == ["not run", "1", "not run"]


@pytest.mark.parametrize("arm", ["U", "QC", "U+", "QC+"])
def test_training_is_plain_adam(arm: str) -> None:
    """The weights of a seed are those of its network alone in an ordinary loop."""
    made, recipe = small(arm, 20)
    trained = select(train(made, recipe, PROBLEM, [2, 6], dtype=torch.float64).field, 1)
    field = made.build(PROBLEM, [6]).double()
    optimizer = torch.optim.Adam(field.parameters(), fused=False, foreach=False)
    for step, draw in enumerate(draws(recipe, PROBLEM, [6], CPU)):
        optimizer.zero_grad()
        step_loss(field, type(draw)(*(a.double() for a in draw)), recipe, made, 1).backward()
        for parameter in field.parameters():
            parameter.grad = parameter.grad.contiguous()
        torch.nn.utils.clip_grad_norm_(field.parameters(), recipe.clip)
        optimizer.param_groups[0]["lr"] = recipe.rate_at(step)
        optimizer.step()
    for ours, plain in zip(trained.parameters(), field.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("arm", ["U", "C", "QC", "U+", "C+", "QC+"])
def test_training_lowers_the_loss(arm: str) -> None:
    """Three hundred steps bring the denoising loss to within a fifth of that of the exact score."""
    made, recipe = small(arm, 300)
    recipe = replace(recipe, batch=256, points=None if recipe.points is None else 5000)
    average = train(made, recipe, PROBLEM, [0])
    field = with_weights(average.field, average.average)
    g = stream(1, "test")
    sigma = recipe.process().sample_sigma(4000, g)
    x0, z = PROBLEM.data.sample(4000, g), torch.randn(4000, 2, generator=g)

    def loss(score: Any) -> float:
        with torch.no_grad():
            return float((sigma.square() * cf.dsm(score, x0, sigma, z)).mean())

    assert loss(field) < 1.2 * loss(Truth("checkerboard"))
