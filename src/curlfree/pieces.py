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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

Tensors = dict[str, Tensor]
_AGAIN = "delete it to have it made again"


class Workers(NamedTuple):
    """This process' place among those that share the work.

    Args:
        rank: which one it is.
        world: how many there are.
    """

    rank: int = 0
    world: int = 1

    def barrier(self) -> None:
        """Wait until all processes of the group, if there is one, have come here."""
        if dist.is_available() and dist.is_initialized():
            dist.barrier()


ALONE = Workers()


@contextmanager
def workers() -> Iterator[Workers]:
    """The processes that torchrun started, or this one alone; joins their group if nobody has yet."""
    if dist.is_available() and dist.is_initialized():
        yield Workers(dist.get_rank(), dist.get_world_size())
    elif int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Workers()
    else:
        dist.init_process_group("gloo", timeout=timedelta(days=2))
        try:
            yield Workers(dist.get_rank(), dist.get_world_size())
        finally:
            dist.destroy_process_group()


def fingerprint(settings: object) -> str:
    """Sixteen hexadecimal digits that stand for settings (anything that JSON can hold)."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


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
    write_bytes(path, save(flat, metadata={"about": text, "sha256": _digest(flat, text)}))


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
    text = metadata.get("about", "")
    if metadata.get("sha256") != _digest(tensors, text):
        raise ValueError(
            f"{path}: expected SHA-256 {metadata.get('sha256')}, found {_digest(tensors, text)}: "
            f"truncated or altered; {_AGAIN}"
        )
    if about is not None and text != json.dumps(dict(about), sort_keys=True):
        raise ValueError(f"{path}: expected a file about {dict(about)}, found {text}")
    return tensors


def compute_pieces(
    folder: Path,
    count: int,
    compute: Callable[[int], Tensors],
    *,
    about: Mapping[str, Any],
    team: Workers = ALONE,
    description: str = "",
) -> None:
    """Do this process' share of the missing pieces; returns when all processes are done.

    Args:
        folder: where the pieces are kept.
        count: how many there are.
        compute: the tensors of the i-th piece, a function of i alone.
        about: the settings that the pieces depend on.
        team: this process' place.
        description: of the work, for the progress bar; none if empty.
    """
    mine = range(team.rank, count, team.world)
    missing = [i for i in mine if _piece(folder, i, about) is None]
    for i in _shown(missing, description if team.rank == 0 else ""):
        save_tensors(_path(folder, i), compute(i), {**about, "piece": i})
    team.barrier()


def read_pieces(folder: Path, count: int, *, about: Mapping[str, Any]) -> list[Tensors]:
    """All pieces, in order.

    Raises:
        ValueError: one is missing or damaged.
    """
    return [load_tensors(_path(folder, i), {**about, "piece": i}) for i in range(count)]


def _path(folder: Path, i: int) -> Path:
    return folder / f"{i:06d}.safetensors"


def _piece(folder: Path, i: int, about: Mapping[str, Any]) -> Tensors | None:
    try:
        return load_tensors(_path(folder, i), {**about, "piece": i})
    except ValueError:
        return None


def _shown(indices: list[int], description: str) -> Iterator[int]:
    if description and indices:
        from rich.console import Console
        from rich.progress import track

        yield from track(indices, description, console=Console(stderr=True))
    else:
        yield from indices


def _digest(tensors: Mapping[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
