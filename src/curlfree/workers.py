"""The processes of a training run: one, or those that torchrun started on one machine or many."""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(minutes=10)  # with workers that do not appear


class RefusedElsewhere(ValueError):
    """Another worker cannot go on, for the reason in the message; its own error tells the user."""


@dataclass(frozen=True)
class Workers:
    """This process among those that train together.

    Args:
        rank: which one it is; rank 0 writes all files.
        world: how many there are.
        device: where this one computes.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    @property
    def name(self) -> str | None:
        """The name of the accelerator, None for the processor."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of the workers' tensors, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, number: int, rank: int = 0) -> int:
        """One worker's number, rank 0's unless another is named."""
        if self.world == 1:
            return number
        shared = torch.tensor(number, device=self.device)
        dist.broadcast(shared, rank)
        return int(shared)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Where one worker fails inside, all end, so that none waits for one that has gone.

        What is done inside must not wait for other workers.

        Raises:
            RefusedElsewhere: another worker failed, in its words; that one raises its own error.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.world == 1:
                raise
            own = error
        if self.world == 1:
            return
        failed = torch.zeros(self.world, device=self.device)
        failed[self.rank] = own is not None
        first = int(self.add(failed).argmax())
        if not failed[first]:
            return
        words = str(own).encode()
        length = self.agree(len(words), first)
        message = torch.tensor(list(words.ljust(length)[:length]), dtype=torch.uint8, device=self.device)
        dist.broadcast(message, first)
        if own is not None and self.rank == first:
            raise own
        raise RefusedElsewhere(bytes(message.tolist()).decode())


@contextmanager
def join(device: str = "auto") -> Iterator[Workers]:
    """Take this process' place: alone, or in the group that torchrun's environment describes.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA where there is one.

    Raises:
        ValueError: CUDA was asked for and there is none.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: expected auto, cpu or cuda, found {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected a CUDA device for 'cuda', found none; use 'cpu'")
    cuda = torch.cuda.is_available() and device != "cpu"
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Workers(0, 1, place)
        return
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=fresh_store(rank, world), rank=rank, world_size=world
    )
    try:
        yield Workers(rank, world, place)
    finally:
        dist.destroy_process_group()


def fresh_store(rank: int, world: int) -> dist.Store:
    """The store through which the workers find each other, free of what an earlier attempt left in it.

    When torchrun restarts workers it gives them the store of the attempt before, whose entries (addresses,
    NCCL's unique id) lead to processes that are dead; `TORCHELASTIC_RESTART_COUNT` could tell attempts apart,
    but machines count differently (https://github.com/pytorch/pytorch/issues/135712). So the workers agree on
    a random prefix: each says hello with a number that nobody used before, rank 0 answers to that number with
    the prefix, until all have confirmed it. What the dead left is answered, too, and never confirmed.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        address, port, world, is_master=rank == 0 and not shared, timeout=PATIENCE, wait_for_workers=False
    )
    mine = uuid.uuid4().hex
    if rank > 0:
        store.set(f"hello {rank}", mine)
        prefix = store.get(f"answer {mine}").decode()
        store.set(f"{prefix} {rank}", "here")
        return dist.PrefixStore(prefix, store)
    missing = set(range(1, world))
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"hello {other}"]):
                store.set(f"answer {store.get(f'hello {other}').decode()}", mine)
            if store.check([f"{mine} {other}"]):
                missing.remove(other)
        if time.monotonic() > deadline:
            raise TimeoutError(f"workers {sorted(missing)} of {world} did not appear; start all of them")
        time.sleep(0.01)
    return dist.PrefixStore(mine, store)
