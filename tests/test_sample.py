"""Sampling from a run: reproducible per image, shared, resumable, counted."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import curlfree.sample
from curlfree.processes import VE
from curlfree.runs import Run
from curlfree.sample import Guided, SampleConfig, draw, sample, to_uint8
from curlfree.workers import Workers
from runs import GaussianScore, image_config, image_run, toy_run

CPU = torch.device("cpu")
FIXED = ["pc", "sde", "heun", "euler"]


@pytest.fixture
def points(tmp_path: Path) -> Run:
    field = GaussianScore(torch.zeros(1, dtype=torch.float64), 0.7)
    return toy_run(tmp_path / "run", field, VE(0.05, 5.0, data_std=0.7))


@pytest.fixture
def images(tmp_path: Path) -> Run:
    means = torch.tensor([0.2, 0.5, 0.8, 0.5], dtype=torch.float64)
    return image_run(tmp_path / "run", GaussianScore(means, 0.05), image_config(classes=3))


@pytest.mark.parametrize(
    "change",
    [*({"sampler": s, "steps": 5, "churn": 3.0} for s in FIXED), {"sampler": "ode", "per_sample": True}],
)
def test_a_sample_depends_on_its_seed_alone(points: Run, change: dict) -> None:
    config = SampleConfig(n=7, batch=7, seed=3, **change)
    whole = sample(points, config)
    parts = sample(points, replace(config, batch=3))
    torch.testing.assert_close(parts.x, whole.x, rtol=1e-12, atol=1e-12)
    assert torch.equal(parts.evaluations, whole.evaluations)
    alone = draw(points, config, range(4, 5))["x"]
    torch.testing.assert_close(alone, whole.x[4:5], rtol=1e-12, atol=1e-12)
    other = sample(points, replace(config, seed=4))
    assert (other.x - whole.x).abs().min() > 1e-6


@pytest.mark.parametrize("sampler", [*FIXED, "ode"])
def test_samples_have_the_distribution(points: Run, sampler: str) -> None:
    config = SampleConfig(n=4000, sampler=sampler, batch=4000, steps=200, denoise=False)
    x = sample(points, config).x
    std = (0.7**2 + 0.05**2) ** 0.5
    n = x.numel()
    assert abs(float(x.mean())) < 5 * std / n**0.5
    bias = 0.03 if sampler == "pc" else 0.01  # of the steps; Langevin's at snr 0.16
    assert float(x.std()) == pytest.approx(std, rel=bias + 5 / (2 * n) ** 0.5)


@pytest.mark.parametrize(("sampler", "expected"), [("pc", 12), ("sde", 6), ("heun", 11), ("euler", 6)])
def test_evaluations_are_those_that_happened(images: Run, sampler: str, expected: int) -> None:
    config = SampleConfig(n=4, sampler=sampler, steps=6, batch=4)
    assert sample(images, config).evaluations.tolist() == [expected] * 4
    assert images.field.calls == expected
    guided = sample(images, replace(config, guidance=2.0))
    assert guided.evaluations.tolist() == [2 * expected] * 4


def test_evaluations_of_the_ode_are_those_that_happened(points: Run) -> None:
    result = sample(points, SampleConfig(n=5, sampler="ode", batch=5))
    assert result.evaluations.tolist() == [points.field.calls] * 5
    tight = sample(points, SampleConfig(n=5, sampler="ode", batch=5, rtol=1e-8, atol=1e-8))
    assert bool((tight.evaluations > result.evaluations).all())
    recorded = json.loads((result.folder / "samples.json").read_text())["nfe"]
    n = result.evaluations[0].item()
    assert recorded == {"mean": n, "min": n, "max": n}


def test_guidance_extrapolates_from_the_unconditional_score(images: Run) -> None:
    x = torch.rand(3, 1, 4, 4, dtype=torch.float64)
    sigma = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)
    labels = torch.tensor([0, 1, 2])
    s_label, s_null = images.field(x, sigma, labels), images.field(x, sigma, torch.full((3,), 3))
    for w in (0.0, 1.0, 2.5):
        guided = Guided(images.field, null=3, weight=w)(x, sigma, labels)
        torch.testing.assert_close(guided, s_null + w * (s_label - s_null))


def test_classes_take_turns_and_guidance_moves_the_mean(images: Run) -> None:
    config = SampleConfig(n=60, batch=60)
    plain = sample(images, config)
    assert plain.labels.tolist() == [0, 1, 2] * 20
    means = [float(plain.x[c::3].double().mean()) / 255 for c in range(3)]
    assert means == pytest.approx([0.2, 0.5, 0.8], abs=0.01)
    # Scores of Gaussians of one width: guidance by w puts the mean at m_null + w (m_label - m_null).
    guided = sample(images, replace(config, label=0, guidance=1.5))
    assert guided.labels.tolist() == [0] * 60
    assert float(guided.x.double().mean()) / 255 == pytest.approx(0.5 + 1.5 * (0.2 - 0.5), abs=0.01)


def test_pixels_are_rounded() -> None:
    x = torch.tensor([-0.1, 0.0, 0.4999 / 255, 0.5001 / 255, 127.4 / 255, 127.6 / 255, 1.0, 1.3])
    assert to_uint8(x).tolist() == [0, 0, 0, 1, 127, 128, 255, 255]
    levels = torch.arange(256)
    assert torch.equal(to_uint8(levels / 255), levels.to(torch.uint8))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_shared_and_interrupted_runs_end_with_the_same_files(
    points: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SampleConfig(n=10, batch=3, sampler="sde", steps=4)
    single = files(sample(points, config, folder=tmp_path / "single").folder)

    # Two processes without a group: the second's share first, then the first's, which collects.
    shared = tmp_path / "shared"
    with pytest.raises(ValueError, match="no such file"):
        sample(points, config, folder=shared, team=Workers(1, 2, CPU))
    assert files(sample(points, config, folder=shared, team=Workers(0, 2, CPU)).folder) == single

    drawn: list[range] = []

    def counted(run: Run, config: SampleConfig, indices: range) -> dict[str, Tensor]:
        if len(drawn) == 2:
            raise KeyboardInterrupt
        drawn.append(indices)
        return draw(run, config, indices)

    monkeypatch.setattr(curlfree.sample, "draw", counted)
    broken = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        sample(points, config, folder=broken)
    assert not (broken / "samples.npz").exists()
    damaged = broken / "pieces" / "000001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    drawn[:] = [range(0)]
    monkeypatch.setattr(curlfree.sample, "draw", lambda *a: drawn.append(a[2]) or draw(*a))
    assert files(sample(points, config, folder=broken).folder) == single
    assert drawn[1:] == [range(3, 6), range(6, 9), range(9, 10)]  # the damaged piece and the missing ones

    drawn.clear()
    more = sample(points, replace(config, n=12), folder=broken)
    assert drawn == [range(9, 12)]
    whole = sample(points, replace(config, n=12), folder=tmp_path / "more")
    assert torch.equal(more.x, whole.x)


def test_the_packed_file_the_picture_and_the_record_agree(images: Run) -> None:
    result = sample(images, SampleConfig(n=5, batch=2))
    packed = np.load(result.folder / "samples.npz")
    assert packed["x"].shape == (5, 4, 4, 1) and packed["x"].dtype == np.uint8
    assert np.array_equal(packed["x"], result.x.numpy())
    picture = np.asarray(Image.open(io.BytesIO((result.folder / "grid.png").read_bytes())))
    assert picture.shape == (12, 12)
    for i in range(9):
        row, column = 4 * (i // 3), 4 * (i % 3)
        expected = packed["x"][i, :, :, 0] if i < 5 else 0
        assert np.array_equal(picture[row : row + 4, column : column + 4], np.broadcast_to(expected, (4, 4)))
    record = json.loads((result.folder / "samples.json").read_text())
    assert record["step"] == 7 and record["weights"] == "ema" and record["sampler"] == "heun"
    assert record["nfe"] == {"mean": 35.0, "min": 35, "max": 35}  # 17 steps of two, and the last


def test_other_weights_have_other_folders(points: Run, tmp_path: Path) -> None:
    config = SampleConfig(n=2, batch=2, steps=3)
    one = sample(points, config)
    other = toy_run(points.folder, GaussianScore(torch.ones(1, dtype=torch.float64), 0.7), points.process)
    assert sample(other, config).folder != one.folder
    assert sample(points, config).folder == one.folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": 3}, "class from 0 to 2, found 3"),
        ({"n": 0}, "n: expected at least 1"),
        ({"rtol": 0.0}, "rtol"),
    ],
)
def test_bad_requests_are_refused(images: Run, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(images, SampleConfig(**change))


def test_guidance_needs_classes(points: Run) -> None:
    with pytest.raises(ValueError, match="no classes"):
        sample(points, SampleConfig(guidance=2.0))


SCRIPT = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from runs import GaussianScore, toy_run
from curlfree.workers import join
from curlfree.sample import SampleConfig, sample
torch.set_num_threads(1)
run = toy_run(Path("run"), GaussianScore(torch.zeros(1, dtype=torch.float64), 0.7))
with join('cpu') as team:
    assert team.world == 2
    result = sample(run, SampleConfig(n=10, batch=3, steps=4), folder=Path(sys.argv[1]), team=team)
    assert len(result.x) == 10
"""


def test_two_processes_under_torchrun_write_what_one_does(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [str(tmp_path / "script.py"), str(tmp_path / "two"), str(Path(__file__).parent)]
    subprocess.run([*launch, *arguments], check=True, cwd=tmp_path, capture_output=True)
    run = toy_run(Path("run"), GaussianScore(torch.zeros(1, dtype=torch.float64), 0.7))
    one = sample(run, SampleConfig(n=10, batch=3, steps=4), folder=tmp_path / "one")
    assert files(tmp_path / "two") == files(one.folder)
