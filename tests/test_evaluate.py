"""Evaluation of runs whose metrics are known: exact scores, fields with a rotation, tiny image sets."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curlfree.measures
from curlfree import cli
from curlfree.data.images import ArrayFile
from curlfree.data.packed import prepare
from curlfree.distributions import Distribution, eight_gaussians
from curlfree.evaluate import EvaluateConfig, evaluate
from curlfree.processes import VE
from curlfree.runs import Run
from curlfree.sample import SampleConfig
from curlfree.train import train
from curlfree.workers import Workers
from runs import GaussianScore, image_config, image_run, toy_run
from training import images, pack

CPU = torch.device("cpu")
DATA = eight_gaussians()


class Exact(nn.Module):
    """A distribution's own score, plus a rotation in the plane times `turn`/sigma^2."""

    turn: Tensor

    def __init__(self, distribution: Distribution, turn: float = 0.0) -> None:
        super().__init__()
        self.distribution = distribution
        self.register_buffer("turn", torch.tensor(turn, dtype=torch.float64))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        s = self.distribution.score(x, sigma)
        rotated = torch.stack([-x[:, 1], x[:, 0]], 1)
        return s + self.turn * rotated / sigma.square()[:, None]


TOY = EvaluateConfig(
    n=200,
    batch=80,
    levels=3,
    audit_n=20,
    nfe_n=4,
    tolerances=(1e-2, 1e-4),
    samples=SampleConfig(n=300, batch=300),
)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict]:
    process = VE(0.2, 20.0, data_std=DATA.data_std)
    run = toy_run(tmp_path_factory.mktemp("exact") / "run", Exact(DATA), process)
    return run, evaluate(run, TOY)


def test_the_exact_score_is_perfect(exact: tuple[Run, dict]) -> None:
    _, metrics = exact
    assert metrics["score_error"]["value"] < 1e-20
    assert metrics["asym"]["value"] < 1e-20 and metrics["nasym"]["value"] < 1e-20
    nll = metrics["nll"]
    # What is left is the prior's mismatch, a few thousandths of a nat, and the solver's error.
    assert abs(nll["excess"]["value"]) < 0.02
    assert nll["solver_error"] < 1e-3 and nll["probe_se"] == 0
    assert abs(nll["exact"]["value"] - DATA.entropy(0.2)) < 4 * nll["exact"]["se"]
    for name in ("precision", "recall"):
        assert metrics[name]["value"] > 0.9


def test_the_loss_is_the_conditional_variance(exact: tuple[Run, dict]) -> None:
    # E sigma^2/2 ||s + z/sigma||^2 = (D - sigma^2 E||s||^2)/2 for the exact score.
    levels = exact[1]["loss"]["levels"]
    x0 = DATA.sample(20_000, torch.Generator().manual_seed(3), torch.float64)
    z = torch.randn(x0.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for level in levels:
        sigma = torch.full((len(x0),), level["sigma"], dtype=torch.float64)
        s2 = sigma**2 * DATA.score(x0 + sigma[:, None] * z, sigma).square().sum(1)
        expected, noise = float(1 - s2.mean() / 2), float(s2.std() / 2 / len(x0) ** 0.5)
        assert abs(level["value"] - expected) < 4 * math.hypot(level["se"], noise)


def test_a_rotation_is_found_at_every_level(tmp_path: Path) -> None:
    turn = 0.3
    run = toy_run(tmp_path / "run", Exact(DATA, turn), VE(0.2, 20.0))
    metrics = evaluate(run, replace(TOY, metrics=("asymmetry", "score-error")))
    for level in metrics["asym"]["levels"]:
        # J - J^T = 2 turn/sigma^2 [[0, -1], [1, 0]]: half its squared norm is 4 turn^2/sigma^4.
        assert level["value"] == pytest.approx(4 * turn**2 / level["sigma"] ** 4, rel=1e-6)
    for level in metrics["score_error"]["levels"]:
        radius2 = 32 + 2 * 0.5 + 2 * level["sigma"] ** 2
        expected = 0.5 * turn**2 / level["sigma"] ** 4 * radius2
        assert abs(level["value"] - expected) < 4 * level["se"]
    assert metrics["asym"]["n"] == 20 and metrics["score_error"]["n"] == 200


def test_evaluations_rise_with_the_tolerance(exact: tuple[Run, dict]) -> None:
    rows = exact[1]["nfe"]["tolerances"]
    assert rows[1]["value"] > 1.5 * rows[0]["value"]
    assert exact[1]["nfe"]["value"] == rows[1]["value"]


def test_every_metric_says_what_it_is(exact: tuple[Run, dict]) -> None:
    run, metrics = exact
    written = json.loads((run.folder / "metrics.json").read_text())
    assert written["metrics"] == metrics
    assert written["model"]["step"] == 7 and written["model"]["weights"] == "ema"
    for metric in metrics.values():
        assert {"value", "se", "n", "how"} <= metric.keys() and len(metric["how"]) > 20


def test_shared_and_interrupted_evaluations_end_with_the_same_numbers(
    exact: tuple[Run, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, expected = exact
    expected = {name: expected[name] for name in ("loss", "nll")}
    config = replace(TOY, metrics=("loss", "nll"))
    two = replace(run, folder=tmp_path / "two")
    # Without a group a process does not wait, but stops at the first metric that lacks the other's pieces.
    for rank, metrics in ((1, config.metrics), (0, config.metrics), (1, ("nll",))):
        with pytest.raises(ValueError, match="no such file"):
            evaluate(two, replace(config, metrics=metrics), team=Workers(rank, 2, CPU))
    assert evaluate(two, config, team=Workers(0, 2, CPU)) == expected

    calls = 0
    log_prob = curlfree.measures.log_prob

    def stopped(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return log_prob(*arguments, **options)

    broken = replace(run, folder=tmp_path / "broken")
    monkeypatch.setattr(curlfree.measures, "log_prob", stopped)
    with pytest.raises(KeyboardInterrupt):
        evaluate(broken, config)
    assert evaluate(broken, config) == expected
    assert calls == 2 + 2 + 2  # the interrupted batch again, the last one, and the two of the solver's error
    assert evaluate(broken, config) == expected and calls == 6


def test_other_weights_start_their_own_record(exact: tuple[Run, dict], tmp_path: Path) -> None:
    run = replace(exact[0], folder=tmp_path / "run")
    small = replace(TOY, n=10)
    assert evaluate(run, replace(small, metrics=("loss",))).keys() == {"loss"}
    assert evaluate(run, replace(small, metrics=("score-error",))).keys() == {"loss", "score_error"}
    assert evaluate(replace(run, step=8), replace(small, metrics=("score-error",))).keys() == {"score_error"}
    (run.folder / "metrics.json").write_text("{")
    with pytest.raises(ValueError, match="expected the metrics of an evaluation"):
        evaluate(run, small)


def bytes_of(n: int, seed: int, side: int = 4, channels: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, side, side, channels), dtype=np.uint8)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    np.savez(
        folder / "images.npz",
        x_train=bytes_of(60, 0),
        x_test=bytes_of(40, 1),
        y_train=np.arange(60) % 3,
        y_test=np.arange(40) % 3,
    )
    prepare(ArrayFile(folder / "images.npz").open(), folder / "images.pack")
    return folder / "images.pack"


IMAGES = EvaluateConfig(
    n=40,
    batch=16,
    levels=2,
    audit_n=6,
    nfe_n=2,
    tolerances=(1e-3,),
    samples=SampleConfig(n=48, batch=20, steps=4),
)


def test_nll_of_a_gaussian_equals_the_closed_form(packed: Path, tmp_path: Path) -> None:
    std = 0.5
    field = GaussianScore(torch.zeros(1, dtype=torch.float64), std)
    process = VE(0.01, 5.0, data_std=std)
    run = image_run(tmp_path / "run", field, image_config(path=str(packed)), process)
    nll = evaluate(run, replace(IMAGES, metrics=("nll",), rtol=1e-8, atol=1e-8))["nll"]
    # x = (b + u)/256 with uniform u: the mean of x^2 is (b^2 + b + 1/3)/256^2, with this variance.
    b = bytes_of(40, 1).astype(np.float64)
    variance = std**2 + 0.01**2
    x2 = (b**2 + b + 1 / 3) / 256**2
    nats = 0.5 * (x2 / variance + math.log(2 * math.pi * variance)).mean()
    spread = np.sqrt((((2 * b + 1) ** 2 / 12 + 1 / 180) / 256**4).sum()) / b.size / (2 * variance)
    assert abs(nll["value"] - (nats / math.log(2) + 8)) < 4 * spread / math.log(2) + 1e-6
    assert nll["unit"] == "bits/dim" and nll["n"] == 40
    # J is a multiple of the identity: Hutchinson's probes of signs are exact.
    assert nll["probe_se"] < 1e-10 and nll["solver_error"] < 1e-6
    one_probe = evaluate(run, replace(IMAGES, metrics=("nll",), probes=1))["nll"]
    assert one_probe["probe_se"] is None and one_probe["value"] == pytest.approx(nll["value"], abs=1e-4)
    per_image = (0.5 * (x2 / variance)).mean((1, 2, 3)) / math.log(2)
    assert nll["se"] == pytest.approx(per_image.std(ddof=1) / 40**0.5, rel=0.05)


def test_images_are_evaluated_without_a_download(packed: Path, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 5, 3), nn.Flatten(), nn.ReLU(), nn.Linear(20, 4))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
            features = self.net(images.float() / 255)
            return features, features.softmax(1)

    torch.jit.trace(Network(), torch.zeros(2, 1, 4, 4, dtype=torch.uint8)).save(tmp_path / "net.ts")
    means = torch.full((4,), 0.5, dtype=torch.float64)
    run = image_run(tmp_path / "run", GaussianScore(means, 0.3), image_config(path=str(packed), classes=3))
    config = replace(IMAGES, features=str(tmp_path / "net.ts"), references=tmp_path / "references")
    metrics = evaluate(run, config)
    named = {"loss", "nll", "asym", "nasym", "work_nats", "nfe"}
    named |= {"fid", "kid", "inception_score", "precision", "recall"}
    assert metrics.keys() == named
    assert metrics["fid"]["n"] == 48 and metrics["fid"]["se"] > 0 and "60 images" in metrics["fid"]["how"]
    assert 1 <= metrics["inception_score"]["value"] <= 4
    # 4 levels of heun: 3 steps of two evaluations, and Tweedie's.
    assert metrics["fid"]["samples"] == {
        "sampler": "heun",
        "steps": 4,
        "guidance": 1.0,
        "seed": 0,
        "nfe": 7.0,
    }

    # Another run uses the kept reference; damage to it is refused.
    (reference,) = (tmp_path / "references").iterdir()
    again = image_run(tmp_path / "again", run.field, run.config)
    assert evaluate(again, replace(config, metrics=("samples",)))["fid"] == metrics["fid"]
    assert not list((tmp_path / "again").rglob("reference-*"))
    whole = reference.read_bytes()
    for damaged in (whole[:-5], whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]):
        reference.write_bytes(damaged)
        with pytest.raises(ValueError, match="truncated or altered"):
            evaluate(again, replace(config, metrics=("samples",)))


def means_of_rows(images: Tensor) -> Tensor:
    """A feature network of four numbers."""
    return images.float().mean((1, 3)) / 255


def few_samples(packed: Path, folder: Path, n: int, **changes: object) -> tuple[Run, EvaluateConfig]:
    """A run, and an evaluation of few samples by the network above."""
    run = image_run(folder, GaussianScore(torch.zeros(1), 0.3), image_config(path=str(packed)))
    few = replace(IMAGES.samples, n=n)
    network = f"{__name__}:means_of_rows"
    return run, replace(IMAGES, metrics=("samples",), samples=few, features=network, **changes)


@pytest.mark.parametrize(("n", "missing"), [(6, {"kid"}), (3, {"kid", "precision", "recall"})])
def test_too_few_samples_for_one_metric_leave_the_others(
    packed: Path, tmp_path: Path, n: int, missing: set[str]
) -> None:
    run, config = few_samples(packed, tmp_path / "run", n)
    metrics = evaluate(run, config)
    assert metrics.keys() == {"fid", "kid", "precision", "recall"}
    for name, metric in metrics.items():
        assert (metric["value"] is None) == (name in missing)
        assert metric["how"].startswith("not computed: ") == (name in missing)
    assert f"found 60 real and {n} generated" in metrics["kid"]["how"]
    assert json.loads((run.folder / "metrics.json").read_text())["metrics"] == metrics


def test_rank_0_decides_whether_the_reference_is_there(packed: Path, tmp_path: Path) -> None:
    """Another job may write the file between the looks of two ranks; both must then make the pieces."""
    answers = []

    class Second(Workers):
        def agree(self, number: int) -> int:
            answers.append(number)
            return 0  # rank 0 saw no file

    run, config = few_samples(packed, tmp_path / "run", 8, references=tmp_path / "references")
    evaluate(run, config)
    pieces = next((run.folder / "evaluation").glob("reference-*"))
    for piece in pieces.iterdir():
        piece.unlink()
    with pytest.raises(ValueError, match="no such file"):  # nobody makes rank 0's pieces here
        evaluate(run, config, team=Second(1, 2, CPU))
    assert answers == [0] and sorted(p.stem for p in pieces.iterdir()) == ["000001", "000003"]


def test_damaged_reference_statistics_are_refused_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = images(pack(tmp_path))
    train(replace(config, train=replace(config.train, steps=1)), tmp_path / "run", device="cpu")
    words = ["evaluate", tmp_path / "run", "--device", "cpu", "--references", tmp_path / "references"]
    words += ["--metrics", "samples", "--features", f"{__name__}:means_of_rows"]
    words += ["--samples.n", 8, "--samples.steps", 2]
    command = [str(word) for word in words]
    assert cli.main(command) == 0
    (reference,) = (tmp_path / "references").iterdir()
    whole = reference.read_bytes()
    for damaged in (whole[:-5], whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:], b""):
        reference.write_bytes(damaged)
        capsys.readouterr()
        assert cli.main(command) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"curlfree: {reference}: ") and said.err.count("\n") == 1
        assert "truncated or altered" in said.err and "delete it to have it made again" in said.err
    reference.unlink()
    assert cli.main(command) == 0 and reference.read_bytes() == whole


def test_the_class_of_the_data_reaches_the_field(packed: Path, tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Listening(GaussianScore):
        def forward(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
            assert labels is not None
            seen.append(labels)
            return super().forward(x, sigma, labels)

    field = Listening(torch.zeros(4, dtype=torch.float64), 0.3)
    run = image_run(tmp_path / "run", field, image_config(path=str(packed), classes=3))
    evaluate(run, replace(IMAGES, metrics=("loss",), levels=1))
    counts = torch.cat(seen).bincount(minlength=3)
    assert counts.tolist() == [14, 13, 13]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metrics": ("score-error",)}, "known score, found images"),
        ({"metrics": ("samples",)}, "needs a feature network"),
        ({"split": "validation"}, "not 'validation'"),
        ({"n": 1}, "n: expected at least 2"),
        ({"tolerances": (0.0,)}, "tolerances"),
    ],
)
def test_bad_requests_are_refused(packed: Path, tmp_path: Path, change: dict, message: str) -> None:
    run = image_run(tmp_path, GaussianScore(torch.zeros(1), 0.3), image_config(path=str(packed)))
    with pytest.raises(ValueError, match=message):
        evaluate(run, replace(IMAGES, **change))
