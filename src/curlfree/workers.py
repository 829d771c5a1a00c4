"""The processes of a training run: one, or those that torchrun started on one machine or many."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


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

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of the workers' tensors, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, number: int) -> int:
        """Rank 0's number."""
        if self.world == 1:
            return number
        shared = torch.tensor(number, device=self.device)
        dist.broadcast(shared, 0)
        return int(shared)


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
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Workers(dist.get_rank(), world, place)
    finally:
        dist.destroy_process_group()
