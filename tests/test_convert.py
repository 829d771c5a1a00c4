"""Published checkpoints: read safely, completely, and refused by name when they do not fit."""

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from curlfree import cli
from curlfree.checkpoint import load_weights
from curlfree.config import FieldConfig, PackedData
from curlfree.convert import convert, named_weights, read_checkpoint
from curlfree.nets import PRESETS as NETWORKS
from curlfree.nets import NCSNpp
from curlfree.presets import PRESETS
from curlfree.processes import VE
from curlfree.runs import Weights, load_run

TINY = NETWORKS["ncsnpp-tiny"]


def published() -> dict[str, Any]:
    """A checkpoint with the structure of score_sde's: its averaged weights are the raw ones plus 1."""
    net = NCSNpp(TINY, seed=7)
    model = OrderedDict({"module.sigmas": torch.linspace(50, 0.01, 1000, dtype=torch.float64)})
    model.update((f"module.{name}", value.clone()) for name, value in net.state_dict().items())
    trained = [p for p in net.parameters() if p.requires_grad]
    return {
        "optimizer": {
            "state": {0: {"step": 5, "exp_avg": torch.zeros(3)}},
            "param_groups": [
                {"lr": np.float64(2e-4), "eps": np.float32(1e-8), "n": np.int64(3), "params": [0]}
            ],
        },
        "model": model,
        "ema": {
            "decay": 0.999,
            "num_updates": 600000,
            "shadow_params": [p.detach().clone() + 1 for p in trained],
        },
        "step": 600000,
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint_24.pth"
    torch.save(published(), path)
    return path


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_weights_arrive_under_their_names(source: Path, tmp_path: Path, weights: Weights) -> None:
    run = load_run(convert(source, tmp_path / "net", "ncsnpp-tiny"), weights=weights)
    original = NCSNpp(TINY, seed=7)
    assert not run.field.training
    named = zip(run.field.named_parameters(), original.named_parameters(), strict=True)
    for (name, ours), (_, expected) in named:
        moved = expected + 1 if weights == "ema" and expected.requires_grad else expected
        assert torch.equal(ours, moved), name
    x = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(run.field(x, torch.tensor([0.5]))).all()


def test_the_folder_is_a_run_that_describes_itself(source: Path, tmp_path: Path) -> None:
    folder = convert(source, tmp_path / "deep" / "net", "ncsnpp-tiny", data="images.pack")
    found = sorted(path.name for path in folder.iterdir())
    assert found == ["README.md", "checkpoint-00600000", "config.json"]
    assert [path.name for path in folder.parent.iterdir()] == ["net"]
    run = load_run(folder)
    assert run.step == 600000 and run.process == VE(0.01, 50.0)
    assert run.config.field == FieldConfig(network=TINY)
    assert run.config.data == PackedData(path=str(Path("images.pack").resolve()))
    card = (folder / "README.md").read_text()
    count = sum(p.numel() for p in run.field.parameters())
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    for fact in ("checkpoint_24.pth", f"{count:,}", "(3, 32, 32)", digest, "0.01 to 50"):
        assert fact in card


def test_the_commands_take_a_converted_network_as_a_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: object) -> str:
        code = cli.main([str(word) for word in words])
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out

    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), np.uint8)
    np.savez("images.npz", x_train=pixels[:8], x_test=pixels[8:])
    run("prepare", "array", "images.npz", "--out", "images.pack")
    words = ("--preset", "ncsnpp-tiny", "--data", "images.pack", "--out", "net")
    assert run("convert", source, *words) == "net\n"
    cpu = ("--device", "cpu")
    assert ": 2 samples" in run("sample", "net", "--n", 2, "--steps", 2, *cpu)
    assert len(run("audit", "net", "--levels", 1, "--images", 2, "--weights", "raw", *cpu).splitlines()) == 2
    few = ("--metrics", "asymmetry", "--n", 2, "--audit-n", 2, "--levels", 1)
    run("evaluate", "net", *few, *cpu)
    measured = json.loads(Path("net/metrics.json").read_text())
    assert measured["model"]["step"] == 600000 and measured["metrics"]["asym"]["value"] > 0
    same = [f"--field.network.{name}" for name in ("size=32", "width=16", "attention=16")]
    short = ("--train.steps", 1, "--train.batch-size", 2, "--train.validation-samples", 0)
    words = ("--data.path", "images.pack", *same, *short, "--optim.lr", 1e-30)
    run("train", "tiny-qc", "--init", "net", *words, "--out", "qc", *cpu)
    first, second = (load_run(Path(name), weights="raw").field.state_dict() for name in ("net", "qc"))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-25)


def test_zip_and_legacy_files_are_the_same(source: Path, tmp_path: Path) -> None:
    legacy = tmp_path / "legacy.pth"
    torch.save(published(), legacy, _use_new_zipfile_serialization=False)
    first, second = (convert(path, tmp_path / path.stem, "ncsnpp-tiny") for path in (source, legacy))
    for ema in (True, False):
        a, b = (load_weights(path / "checkpoint-00600000", ema=ema) for path in (first, second))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda checkpoint: checkpoint["model"].pop(name)


def _with(name: str, value: Tensor) -> Callable[[dict[str, Any]], Any]:
    return lambda checkpoint: checkpoint["model"].update({name: value})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("module.all_modules.4.Conv_0.weight"), r"all_modules\.4\.Conv_0\.weight is missing"),
        (_with("module.extra", torch.zeros(1)), "extra is not part of this network"),
        (
            _with("module.all_modules.3.bias", torch.zeros(5)),
            r"all_modules\.3\.bias has shape \(5,\), expected \(16,\)",
        ),
        (_with("module.all_modules.3.bias", torch.full((16,), torch.nan)), r"3\.bias not finite"),
        (lambda checkpoint: checkpoint["ema"]["shadow_params"].pop(), "averaged weights for"),
        (
            lambda checkpoint: (
                checkpoint["ema"]["shadow_params"].insert(0, torch.zeros(2))
                or checkpoint["ema"]["shadow_params"].pop()
            ),
            r"averaged.*all_modules\.1\.weight has shape \(2,\)",
        ),
        (lambda checkpoint: checkpoint.pop("ema"), "no averaged weights"),
        (lambda checkpoint: checkpoint.pop("step"), "number of training steps under 'step', found None"),
        (_with("module.sigmas", torch.zeros(3)), "'sigmas' must hold noise levels"),
        (lambda checkpoint: checkpoint.pop("model"), "no state dict under 'model'"),
    ],
)
def test_what_does_not_fit_is_named(
    damage: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    checkpoint = published()
    damage(checkpoint)
    torch.save(checkpoint, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "bad.pth", tmp_path / "net", "ncsnpp-tiny")
    assert not (tmp_path / "net").exists()


def deep() -> dict[str, Any]:
    """A checkpoint with the complete structure of the paper's network, each tensor a view of one number."""
    lines = (Path(__file__).parent / "data" / "ncsnpp_deep_parameters.txt").read_text().splitlines()[1:]
    shapes = {name: tuple(map(int, shape)) for name, *shape in map(str.split, lines)}
    model = {f"module.{name}": torch.full((), 0.5).expand(shape) for name, shape in shapes.items()}
    fixed = ("module.sigmas", "module.all_modules.0.W")  # not trained
    shadow = [torch.full((), 0.25).expand(value.shape) for name, value in model.items() if name not in fixed]
    model["module.sigmas"] = torch.linspace(50, 0.01, 1000)
    return {"model": model, "ema": {"shadow_params": shadow}, "step": 600000}


def test_the_complete_structure_of_the_published_network_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep.pth"
    torch.save(deep(), path)
    config = replace(PRESETS["cifar10-u"], name="ncsnpp-deep")
    found = named_weights(read_checkpoint(path), config, path)
    for weights in (found.model, found.ema):
        assert len(weights) == len(deep()["model"]) - 1
        assert sum(value.numel() for value in weights.values()) == 107_587_075
    assert all(float(value.view(-1)[0]) == 0.5 for value in found.model.values())
    fixed = [name for name, value in found.ema.items() if float(value.view(-1)[0]) == 0.5]
    assert fixed == ["all_modules.0.W"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("module.all_modules.18.Conv_1.bias"), r"all_modules\.18\.Conv_1\.bias is missing"),
        (
            _with("module.all_modules.18.Conv_1.bias", torch.zeros(255)),
            r"all_modules\.18\.Conv_1\.bias has shape \(255,\), expected \(256,\)",
        ),
    ],
)
def test_a_missing_or_misshapen_key_of_the_published_network_is_named(
    damage: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    checkpoint = deep()
    damage(checkpoint)
    torch.save(checkpoint, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match=rf"bad\.pth \(preset ncsnpp-deep\) .*: {message};"):
        convert(tmp_path / "bad.pth", tmp_path / "net")
    assert not (tmp_path / "net").exists()


def test_wrong_preset_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"all_modules.* and \d+ more"):
        convert(source, tmp_path / "net")


class Malicious:
    """Creates a file when a plain unpickler reads it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path: Path, zipped: bool) -> None:
    target = tmp_path / "executed"
    path = tmp_path / "bad.pth"
    torch.save(published() | {"x": Malicious(target)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"refused.*mkdir"):
        convert(path, tmp_path / "net", "ncsnpp-tiny")
    assert b"mkdir" in path.read_bytes()
    assert not target.exists()


def test_objects_disguised_as_numpy_numbers_are_refused(tmp_path: Path) -> None:
    class Disguised:
        def __reduce__(self) -> tuple:
            return np.float64(0).__reduce__()[0], (np.dtype("O"), b"\0" * 8)

    torch.save(published() | {"x": Disguised()}, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match="refused"):
        convert(tmp_path / "bad.pth", tmp_path / "net", "ncsnpp-tiny")


def test_damaged_files_are_refused(source: Path, tmp_path: Path) -> None:
    content = source.read_bytes()
    for i, damaged in enumerate((b"", b"not a checkpoint", content[:100], content[: len(content) // 2])):
        path = tmp_path / f"{i}.pth"
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="refused"):
            convert(path, tmp_path / "net", "ncsnpp-tiny")


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one piece (no zip checksums stand before the unpickler)."""
    path = tmp_path_factory.mktemp("legacy") / "checkpoint.pth"
    torch.save(published(), path, _use_new_zipfile_serialization=False)
    return path


@given(st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 255)), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None, derandomize=True)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on unknown protocol numbers
def test_altered_bytes_are_refused_or_harmless(legacy: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(legacy.read_bytes())
    for position, value in changes:
        content[position] = value
    altered = legacy.with_name("altered.pth")
    altered.write_bytes(content)
    refusal = ""
    try:
        found: object = read_checkpoint(altered)
    except ValueError as error:
        found, refusal = {}, str(error)
    assert isinstance(found, dict)
    assert not refusal or str(altered) in refusal


def test_arguments_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    absent = tmp_path / "absent.pth"
    with pytest.raises(ValueError, match="unknown preset 'deep'; choose one of ncsnpp-deep"):
        convert(absent, tmp_path / "net", "deep")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        convert(absent, tmp_path.parent)
    with pytest.raises(FileNotFoundError):
        convert(absent, tmp_path / "net")
