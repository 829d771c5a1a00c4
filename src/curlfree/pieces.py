r"""Work in pieces: shared between processes, each piece stored once, complete, and reused.

A long computation is cut into pieces, each a function of its index alone. Process r of w does the pieces r,
r + w, ...; each is written to its own file as soon as it is done, so that an interrupted computation goes on
where it stopped, with any number of processes, and ends with the same numbers. The folder is named by the
settings that the numbers depend on (`fingerprint`): others never mix with them.

A file holds tensors (safetensors) with their SHA-256 and those settings, and appears under its name only when
it is complete. A piece that is truncated or altered is computed again.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from curlfree.workers import Workers

Tensors = dict[str, Tensor]
_AGAIN = "delete it to have it made again"
_ENTRY = "curlfree"  # SHA-256, then the settings as JSON


ALONE = Workers(0, 1, torch.device("cpu"))


def fingerprint(settings: object) -> str:
    """Sixteen hexadecimal digits that stand for settings (anything that JSON can hold)."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def digest(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """The SHA-256 of tensors: their names, types, shapes and values, and of a text about them."""
    found = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, and to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file whole or not at all.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors with their checksum and what they are."""
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(dict(about), sort_keys=True)
    # One entry, because safetensors does not keep the order of several: equal contents make equal files.
    write_bytes(path, save(flat, metadata={_ENTRY: digest(flat, text) + text}))


def load_tensors(path: Path, about: Mapping[str, Any] | None = None) -> Tensors:
    """Read tensors and compare their checksum.

    Args:
        path: the file.
        about: what they must be; None accepts anything.

    Raises:
        ValueError: the file is missing, truncated, altered or about something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file") from error
    except SafetensorError as error:
        raise ValueError(
            f"{path}: truncated or altered ({error}); delete it to have it made again"
        ) from error
    entry = metadata.get(_ENTRY, "")
    expected, text = entry[:64], entry[64:]
    if expected != digest(tensors, text):
        raise ValueError(
            f"{path}: expected SHA-256 {expected or 'in the header'}, found {digest(tensors, text)}: "
            f"truncated or altered; {_AGAIN}"
        )
    if about is not None and text != json.dumps(dict(about), sort_keys=True):
        raise ValueError(f"{path}: expected a file about {dict(about)}, found {text}")
    return tensors


def compute_pieces(
    folder: Path,
    compute: Callable[[int], Tensors],
    *,
    about: Sequence[Mapping[str, Any]],
    team: Workers = ALONE,
    description: str = "",
) -> None:
    """Do this process' share of the missing pieces; returns when all processes are done.

    Args:
        folder: where the pieces are kept.
        compute: the tensors of the i-th piece, a function of i alone.
        about: for each piece the settings that it depends on.
        team: this process' place.
        description: of the work, for the progress bar; none if empty.
    """
    # A group of its own: the others may wait for longer than NCCL does.
    grouped = team.world > 1 and dist.is_initialized()
    group = dist.new_group(backend="gloo", timeout=timedelta(days=2)) if grouped else None
    mine = range(team.rank, len(about), team.world)
    missing = [i for i in mine if not _done(_path(folder, i), {**about[i], "piece": i})]
    for i in _shown(missing, description if team.rank == 0 else ""):
        save_tensors(_path(folder, i), compute(i), {**about[i], "piece": i})
    if group is not None:
        dist.barrier(group)
        dist.destroy_process_group(group)


def read_pieces(folder: Path, *, about: Sequence[Mapping[str, Any]]) -> list[Tensors]:
    """All pieces, in order.

    Raises:
        ValueError: one is missing or damaged.
    """
    return [load_tensors(_path(folder, i), {**settings, "piece": i}) for i, settings in enumerate(about)]


def _path(folder: Path, i: int) -> Path:
    return folder / f"{i:06d}.safetensors"


def _done(path: Path, about: Mapping[str, Any]) -> bool:
    try:
        load_tensors(path, about)
    except ValueError:
        return False
    return True


def _shown(indices: list[int], description: str) -> Iterator[int]:
    if description and indices:
        from rich.console import Console
        from rich.progress import track

        yield from track(indices, description, console=Console(stderr=True))
    else:
        yield from indices
