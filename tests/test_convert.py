"""Published checkpoints: read safely, completely, and refused by name when they do not fit."""

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from curlfree.convert import convert, load_ncsnpp, read_checkpoint
from curlfree.nets import PRESETS, NCSNpp

TINY = PRESETS["ncsnpp-tiny"]


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
def test_weights_arrive_under_their_names(source: Path, tmp_path: Path, weights: str) -> None:
    net = load_ncsnpp(convert(source, tmp_path / "net", "ncsnpp-tiny", weights))
    original = NCSNpp(TINY, seed=7)
    assert not net.training
    for (name, ours), (_, expected) in zip(net.named_parameters(), original.named_parameters(), strict=True):
        moved = expected + 1 if weights == "ema" and expected.requires_grad else expected
        assert torch.equal(ours, moved), name
    x = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(net(x, torch.tensor([0.5]))).all()


def test_folder_describes_itself(source: Path, tmp_path: Path) -> None:
    folder = convert(source, tmp_path / "deep" / "net", "ncsnpp-tiny")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["net"]
    description = json.loads((folder / "config.json").read_text())
    assert (description["weights"], description["step"]) == ("ema", 600000)
    card = (folder / "README.md").read_text()
    count = sum(value.numel() for value in load_file(folder / "model.safetensors").values())
    for fact in ("checkpoint_24.pth", f"{count:,}", "(3, 32, 32)", description["source_sha256"]):
        assert fact in card


def test_zip_and_legacy_files_are_the_same(source: Path, tmp_path: Path) -> None:
    legacy = tmp_path / "legacy.pth"
    torch.save(published(), legacy, _use_new_zipfile_serialization=False)
    first = load_file(convert(source, tmp_path / "a", "ncsnpp-tiny") / "model.safetensors")
    second = load_file(convert(legacy, tmp_path / "b", "ncsnpp-tiny") / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


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
        (_with("module.all_modules.3.bias", torch.full((16,), torch.nan)), r"3\.bias is not finite"),
        (lambda checkpoint: checkpoint["ema"]["shadow_params"].pop(), "averaged weights for"),
        (
            lambda checkpoint: (
                checkpoint["ema"]["shadow_params"].insert(0, torch.zeros(2))
                or checkpoint["ema"]["shadow_params"].pop()
            ),
            r"averaged.*all_modules\.1\.weight has shape \(2,\)",
        ),
        (lambda checkpoint: checkpoint.pop("ema"), "use weights='raw'"),
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
    with pytest.raises(ValueError, match="'ema' or 'raw'"):
        convert(absent, tmp_path / "net", weights="both")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        convert(absent, tmp_path.parent)
    with pytest.raises(FileNotFoundError):
        convert(absent, tmp_path / "net")


def test_damaged_folders_are_refused(source: Path, tmp_path: Path) -> None:
    folder = convert(source, tmp_path / "net", "ncsnpp-tiny")
    weights, config = folder / "model.safetensors", folder / "config.json"
    good, description = weights.read_bytes(), config.read_text()
    weights.write_bytes(good[:-10])
    with pytest.raises(ValueError, match="convert it again"):
        load_ncsnpp(folder)
    weights.write_bytes(good)
    config.write_text(description.replace("curlfree-ncsnpp-1", "other"))
    with pytest.raises(ValueError, match="format 'other'"):
        load_ncsnpp(folder)
    config.write_text(description.replace('"blocks": 1', '"blocks": 2'))
    with pytest.raises(ValueError, match="is missing"):
        load_ncsnpp(folder)
    config.unlink()
    with pytest.raises(ValueError, match="convert it again"):
        load_ncsnpp(folder)
