import json
import os

import pytest
import torch

from curlfree import checkpoint as ckpt
from curlfree.checkpoint import Checkpoint, State


def some(step: int, validation: float | None = None) -> Checkpoint:
    g = torch.Generator().manual_seed(step)
    weights = {"a.weight": torch.randn(3, 4, generator=g), "b": torch.randn(5, generator=g).double()}
    moments = {f"{name}.exp_avg": value + 1 for name, value in weights.items()}
    return Checkpoint(
        State(step=step, validation=validation, data="abc"),
        weights,
        {name: -value for name, value in weights.items()},
        moments,
    )


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def steps(run) -> list[int]:
    return [ckpt.step_of(path) for path in ckpt.checkpoints(run)]


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    written = some(1000, 0.25)
    path = ckpt.save(tmp_path, written)
    read = ckpt.load(path)
    assert path.name == "checkpoint-00001000"
    assert read.state == written.state
    assert equal(read.model, written.model) and equal(read.ema, written.ema)
    assert equal(read.optimizer, written.optimizer)
    assert equal(ckpt.load_weights(path, ema=True), written.ema)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-00001000"]


def test_channels_last_weights_can_be_saved(tmp_path):
    w = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    path = ckpt.save(tmp_path, Checkpoint(State(step=1), {"w": w}, {"w": w}, {"w.exp_avg": w}))
    assert torch.equal(ckpt.load(path).model["w"], w)


@pytest.mark.parametrize("name", [*ckpt.FILES, "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["truncate", "alter", "delete"])
def test_a_damaged_file_is_refused_by_name_and_the_checkpoint_before_is_used(tmp_path, name, harm):
    good, bad = ckpt.save(tmp_path, some(1)), ckpt.save(tmp_path, some(2))
    file = bad / name
    raw = bytearray(file.read_bytes())
    if harm == "delete":
        file.unlink()
    elif harm == "truncate":
        file.write_bytes(raw[: len(raw) // 2])
    else:
        raw[len(raw) // 2] ^= 0x55
        file.write_bytes(raw)
    with pytest.raises(ValueError, match="checkpoint-00000002") as error:
        ckpt.load(bad)
    assert name in str(error.value) or name == "manifest.json"
    told = []
    assert ckpt.newest(tmp_path, told.append) == good
    assert len(told) == 1 and "checkpoint-00000002" in told[0]


def test_if_every_checkpoint_is_damaged_nothing_is_made_up(tmp_path):
    assert ckpt.newest(tmp_path, pytest.fail) is None
    path = ckpt.save(tmp_path, some(1))
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        ckpt.newest(tmp_path, lambda _: None)


def test_the_latest_and_the_best_are_kept(tmp_path):
    for step, loss in enumerate([0.5, 0.2, None, 0.4, 0.3, 0.25]):
        ckpt.save(tmp_path, some(step, loss))
        ckpt.prune(tmp_path, 2, pytest.fail)
    assert steps(tmp_path) == [1, 4, 5]


@pytest.mark.parametrize("best", ["truncated", "altered", "not finite"])
def test_a_best_checkpoint_whose_state_cannot_be_trusted_counts_as_not_measured(tmp_path, best):
    for step, loss in enumerate([float("nan") if best == "not finite" else 0.1, 0.3, 0.4, 0.5]):
        ckpt.save(tmp_path, some(step, loss))
    file = tmp_path / "checkpoint-00000000" / "state.json"
    if best != "not finite":
        file.write_text("{" if best == "truncated" else file.read_text().replace("0.1", "0.2"))
    told = []
    ckpt.prune(tmp_path, 1, told.append)
    assert steps(tmp_path) == [1, 3]
    assert ["checkpoint-00000000" in line and "not measured" in line for line in told] == [True] * len(told)
    assert len(told) == (best != "not finite")


def test_resuming_sets_damaged_checkpoints_aside_and_keeps_the_others(tmp_path):
    for step in (2, 4, 6, 8):
        ckpt.save(tmp_path, some(step))
    for step in (2, 6, 8):
        (ckpt.path_of(tmp_path, step) / "model.safetensors").write_bytes(b"")
    (tmp_path / "refused-00000008").mkdir()
    told = []
    assert ckpt.resume(tmp_path, told.append) == ckpt.path_of(tmp_path, 4)
    assert steps(tmp_path) == [4]
    assert sorted(path.name for path in tmp_path.glob("refused-*")) == [
        f"refused-0000000{step}" for step in (2, 6, 8)
    ]
    assert (tmp_path / "refused-00000008" / "manifest.json").is_file()
    assert [f"checkpoint-0000000{n}" in line for n, line in zip((2, 6, 8), told, strict=True)] == [True] * 3


def test_if_every_checkpoint_is_damaged_none_is_set_aside(tmp_path):
    assert ckpt.resume(tmp_path, pytest.fail) is None
    path = ckpt.save(tmp_path, some(1))
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        ckpt.resume(tmp_path, pytest.fail)
    assert steps(tmp_path) == [1]


def test_leftovers_of_an_interrupted_write_are_no_checkpoints(tmp_path):
    ckpt.save(tmp_path, some(1))
    part = tmp_path / ".checkpoint-00000002.part"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    assert [path.name for path in ckpt.checkpoints(tmp_path)] == ["checkpoint-00000001"]
    ckpt.save(tmp_path, some(2))
    assert ckpt.load(tmp_path / "checkpoint-00000002").state.step == 2
    part.mkdir()
    ckpt.clean(tmp_path)
    assert not part.exists()


def test_a_refused_checkpoint_is_replaced_when_its_step_is_reached_again(tmp_path):
    path = ckpt.save(tmp_path, some(7))
    (path / "ema.safetensors").write_bytes(b"")
    ckpt.save(tmp_path, some(7))
    assert equal(ckpt.load(path).ema, some(7).ema)


def test_an_unknown_step_is_answered_with_those_there_are(tmp_path):
    ckpt.save(tmp_path, some(5))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at step 6; there are \[5\]"):
        ckpt.path_of(tmp_path, 6)


def test_the_manifest_lists_every_file(tmp_path):
    path = ckpt.save(tmp_path, some(1))
    manifest = json.loads((path / "manifest.json").read_text())
    assert {file.name for file in path.iterdir()} == {*manifest, "manifest.json"}


def test_weights_of_another_network_are_refused_by_name_before_any_is_copied():
    field = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    before = {name: p.detach().clone() for name, p in field.named_parameters()}
    good = {name: torch.ones_like(p) for name, p in before.items()}
    for change, message in (
        ({"1.bias": None}, "1.bias is missing"),
        ({"2.bias": torch.zeros(1)}, "2.bias is not part of this network"),
        ({"1.weight": torch.zeros(3, 1)}, r"1.weight has shape \(3, 1\), expected \(1, 3\)"),
    ):
        bad = {name: tensor for name, tensor in (good | change).items() if tensor is not None}
        with pytest.raises(ValueError, match=f"here does not fit the network: {message}; choose"):
            ckpt.put(field, bad, "here")
    with pytest.raises(ValueError, match=r"0\.weight is missing.* and 3 more"):
        ckpt.check_weights({f"x{i}": torch.zeros(1) for i in range(4)}, field, "here")
    assert equal(dict(field.named_parameters()), before)
    ckpt.put(field, good, "here")
    assert equal(dict(field.named_parameters()), good)
