r"""Checkpoints that survive a kill at any moment and are never half there.

A checkpoint is a folder ``checkpoint-00001000`` of a run:

    model.safetensors        the weights
    ema.safetensors          their moving average
    optimizer.safetensors    Adam's moments, as NAME.exp_avg and NAME.exp_avg_sq
    state.json               step, held-out loss, checksum of the training data
    manifest.json            SHA-256 and size of each of the files above

It is written under a temporary name, every file and then the folder are synced to disk, and only then is it
renamed: a folder with a checkpoint's name is complete. Reading verifies the manifest, so one that was
truncated or altered later is refused, and `newest` falls back to the one before. A run that goes on sets the
refused ones aside (`resume`), so that they never count among those to keep. No pickle anywhere.

Nothing else is needed for an exact resume: all random draws are functions of (seed, step) (`curlfree.seeds`).
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from curlfree.pieces import write_json

_NAME = re.compile(r"checkpoint-(\d{8,})")
ORIGIN = "init.json"
FILES = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")


@dataclass(frozen=True, kw_only=True)
class State:
    """The counters of a checkpoint.

    Args:
        step: how many optimiser steps were made.
        validation: the held-out loss of the averaged weights, None if it was not measured.
        data: what identifies the training data, its checksum for a packed file.
    """

    step: int
    validation: float | None = None
    data: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """All of a checkpoint, in memory.

    Args:
        state: the counters.
        model: the weights by name.
        ema: their moving average by name.
        optimizer: Adam's moments by name.
    """

    state: State
    model: Mapping[str, Tensor]
    ema: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


def save(run: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into the folder of a run, whole or not at all.

    Returns:
        Its folder.
    """
    path = run / f"checkpoint-{checkpoint.state.step:08d}"
    part = run / f".{path.name}.part"
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    groups = (checkpoint.model, checkpoint.ema, checkpoint.optimizer)
    for name, tensors in zip(FILES, groups, strict=True):
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, part / name)
    (part / "state.json").write_text(json.dumps(asdict(checkpoint.state)), encoding="utf-8")
    manifest = {
        name: {"sha256": _sha256(part / name), "bytes": (part / name).stat().st_size}
        for name in (*FILES, "state.json")
    }
    (part / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for file in part.iterdir():
        _sync(file)
    _sync(part)
    if path.exists():
        shutil.rmtree(path)
    part.rename(path)
    _sync(run)
    return path


def checkpoints(run: Path) -> list[Path]:
    """The folders of a run's checkpoints, from the oldest to the newest."""
    return sorted(path for path in run.glob("checkpoint-*") if _NAME.fullmatch(path.name))


def path_of(run: Path, step: int) -> Path:
    """The folder of the checkpoint at a step.

    Raises:
        FileNotFoundError: there is none; the message lists those there are.
    """
    found = {step_of(path): path for path in checkpoints(run)}
    if step not in found:
        raise FileNotFoundError(f"{run}: no checkpoint at step {step}; there are {sorted(found) or 'none'}")
    return found[step]


def step_of(path: Path) -> int:
    """The step of a checkpoint, from its folder's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path}: expected a folder named checkpoint-NNNNNNNN")
    return int(match[1])


def load_state(path: Path) -> State:
    """The counters of a checkpoint, after verifying their file.

    Raises:
        ValueError: they are damaged.
    """
    verify(path, ["state.json"])
    try:
        return State(**json.loads((path / "state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: state.json is damaged: {error}") from error


def verify(path: Path, names: Sequence[str] = (*FILES, "state.json")) -> None:
    """Compare the files of a checkpoint with its manifest.

    Args:
        path: the checkpoint's folder.
        names: which files.

    Raises:
        ValueError: a file is missing, truncated or altered.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        expected = {name: (manifest[name]["sha256"], manifest[name]["bytes"]) for name in names}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: the manifest is missing or damaged ({error}); use another checkpoint"
        ) from error
    for name, (digest, size) in expected.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise ValueError(
                f"{file}: expected {size} bytes, found {found}: truncated; use another checkpoint"
            )
        if _sha256(file) != digest:
            raise ValueError(f"{file}: its SHA-256 is not that in the manifest: altered")


def load(path: Path) -> Checkpoint:
    """Read a checkpoint after verifying it.

    Raises:
        ValueError: it is truncated or altered.
    """
    verify(path)
    model, ema, optimizer = (_tensors(path / name) for name in FILES)
    return Checkpoint(load_state(path), model, ema, optimizer)


def load_weights(path: Path, *, ema: bool) -> dict[str, Tensor]:
    """Only the weights of a checkpoint, after verifying it.

    Args:
        path: the checkpoint's folder.
        ema: the moving average instead of the weights themselves.

    Raises:
        ValueError: it is truncated or altered.
    """
    verify(path)
    return _tensors(path / FILES[1 if ema else 0])


def check_weights(weights: Mapping[str, Tensor], field: nn.Module, where: object) -> None:
    """Refuse weights that are not those of a field.

    Args:
        weights: by name.
        field: whose parameters they should be; it may be on the meta device.
        where: what holds the weights, for the message.

    Raises:
        ValueError: weights are missing, extra or misshapen; the message has their names.
    """
    expected = {name: tuple(parameter.shape) for name, parameter in field.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not part of this network" for name in found if name not in expected]
    problems += [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"{where} does not fit the network: {'; '.join(problems[:5])}{more}; "
            "choose the network that the weights belong to"
        )


@torch.no_grad()
def put(field: nn.Module, weights: Mapping[str, Tensor], where: object) -> None:
    """Copy weights into a field.

    Raises:
        ValueError: as `check_weights`.
    """
    check_weights(weights, field, where)
    for name, parameter in field.named_parameters():
        parameter.copy_(weights[name])


def newest(run: Path, refused: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is intact, or None if there is none at all.

    Args:
        run: the folder of the run.
        refused: told why a newer one was passed over.

    Raises:
        ValueError: there are checkpoints, but every one is damaged.
    """
    found = checkpoints(run)
    for path in reversed(found):
        try:
            verify(path)
            return path
        except ValueError as error:
            refused(str(error))
    if found:
        raise _all_damaged(run)
    return None


def resume(run: Path, refused: Callable[[str], None]) -> Path | None:
    """The checkpoint from which a run goes on: as `newest`, but for the run's writer.

    Every checkpoint is verified, and the damaged ones are renamed to ``refused-N``. So those that are left
    are intact and lie on the path to the one returned, and `prune` never takes a damaged one for a good one.

    Args:
        run: the folder of the run.
        refused: told why one was set aside, and where it is.

    Raises:
        ValueError: there are checkpoints, but every one is damaged; none was renamed.
    """
    intact, damaged = [], {}
    for path in checkpoints(run):
        try:
            verify(path)
            intact.append(path)
        except ValueError as error:
            damaged[path] = error
    if damaged and not intact:
        raise _all_damaged(run)
    for path, why in damaged.items():
        aside = path.with_name(path.name.replace("checkpoint", "refused"))
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
        refused(f"{why}; it is now {aside.name}")
    return intact[-1] if intact else None


def origin(run: Path, source: Path, told: Callable[[str], None]) -> Path:
    """The checkpoint of another run that a run begins with: its newest at the first start, then always that.

    The first start writes its folder, step and the SHA-256 of its weights into `init.json`, so that a run
    which was killed before its first checkpoint does not begin again with weights that are newer.

    Args:
        run: the folder of the run that begins.
        source: the folder of the other run.
        told: why a newer checkpoint was passed over.

    Raises:
        FileNotFoundError: the other run has no checkpoint.
        ValueError: the checkpoint of the first start is not there any more, or holds other weights.
    """
    first = read_origin(run)
    if first is None:
        path = newest(source, told)
        if path is None:
            raise FileNotFoundError(f"init: expected a run with a checkpoint, found none in {source}")
        write_json(run / ORIGIN, {"run": str(source), "step": step_of(path), "sha256": _weights(path)})
        return path
    paths = [path for path in checkpoints(source) if step_of(path) == first["step"]]
    if not paths or _weights(paths[0]) != first["sha256"]:
        raise ValueError(
            f"init: {run} began with the checkpoint at step {first['step']} of {source}, which is gone or "
            f"holds other weights now; bring it back, or delete {run / ORIGIN} to begin with the newest"
        )
    return paths[0]


def read_origin(run: Path) -> dict[str, Any] | None:
    """Which checkpoint of which other run a run began with: "run", "step", "sha256"; None if with none.

    Raises:
        ValueError: the record is damaged.
    """
    path = run / ORIGIN
    if not path.exists():
        return None
    try:
        first = json.loads(path.read_text(encoding="utf-8"))
        return {name: first[name] for name in ("run", "step", "sha256")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged ({error}); delete it to begin with the newest weights") from error


def prune(run: Path, keep: int, told: Callable[[str], None]) -> None:
    """Delete all but the latest `keep` checkpoints and the one with the lowest held-out loss.

    Args:
        run: the folder of the run.
        keep: how many of the latest.
        told: about one whose held-out loss cannot be read; it is taken as not measured.
    """
    found = checkpoints(run)
    measured = {}
    for path in found:
        try:
            loss = load_state(path).validation
        except ValueError as error:
            told(f"{error}; its held-out loss is taken as not measured")
            continue
        if loss is not None and math.isfinite(loss):
            measured[path] = loss
    spared = set(found[-keep:])
    if measured:
        spared.add(min(measured, key=lambda path: (measured[path], path)))
    for path in set(found) - spared:
        doomed = run / f".{path.name}.part"  # out of the way in one move, so that none is ever half there
        path.rename(doomed)
        shutil.rmtree(doomed)


def clean(run: Path) -> None:
    """Delete what an interrupted write left behind."""
    for part in run.glob(".checkpoint-*.part"):
        shutil.rmtree(part)


def _all_damaged(run: Path) -> ValueError:
    return ValueError(f"{run}: every checkpoint is damaged; delete them, or start again in another folder")


def _weights(path: Path) -> dict[str, str | None]:
    files = (path / name for name in FILES[:2])
    return {file.name: _sha256(file) if file.is_file() else None for file in files}


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from error
    return tensors


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
