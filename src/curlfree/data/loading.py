r"""Batches as functions of the step.

The sample stream runs through the data set in a fresh seeded order every epoch, without gaps: the global
batch of step n holds the stream's positions n B to (n + 1) B - 1, and position p is row ``p mod N`` of the
order of epoch ``p div N``. Worker r of w takes the r-th of w equal slices. Flips are drawn per step for the
whole global batch. Nothing is remembered between steps, so a run resumes at any step, and with any number of
workers sees the same batches.

A data set that fits is kept whole on the device as uint8 and batches are gathered there; a larger one is
gathered from the memory map by a thread that stays a few batches ahead and copies through pinned memory.
Both ways end in the same operations on the same bytes, hence in bit-identical batches.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import count, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from curlfree.seeds import shard, stream

_AHEAD = 3
_FRACTION_OF_DEVICE = 0.25
_CPU_LIMIT = 2**31


class Batch(NamedTuple):
    """One worker's share of a global batch.

    Args:
        x0: clean images, float32 in [0, 1], (B, C, H, W).
        labels: int64 (B,), -1 for none.
        rows: which rows of the data set they are, int64 (B,).
    """

    x0: Tensor
    labels: Tensor
    rows: Tensor


def to_unit(images: Tensor) -> Tensor:
    """Images as float32 in [0, 1], (B, C, H, W), from uint8 (B, H, W, C)."""
    planes = images.permute(0, 3, 1, 2)
    return planes.to(torch.float32, memory_format=torch.contiguous_format).div_(255)


def fits(size: int, device: torch.device) -> bool:
    """Whether a data set of `size` bytes is kept on the device: a quarter of a GPU, 2 GiB in main memory."""
    if device.type == "cuda":
        return size <= _FRACTION_OF_DEVICE * torch.cuda.get_device_properties(device).total_memory
    return size <= _CPU_LIMIT


class Batches:
    """The training batches of a data set.

    Args:
        images: uint8 (N, H, W, C), for instance the memory map of a packed file.
        labels: whole numbers (N,).
        batch_size: of the global batch, over all workers.
        seed: decides orders and flips.
        flip: mirror each image with probability one half (wrong for digits).
        device: where the batches are wanted.
        rank: this worker.
        world: the number of workers.
        resident: keep all images on the device; None: if they fit.

    Raises:
        ValueError: for images or labels of the wrong kind or a batch that the workers cannot share.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        batch_size: int,
        seed: int,
        flip: bool = False,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
        resident: bool | None = None,
    ) -> None:
        if images.dtype != np.uint8 or images.ndim != 4 or len(images) == 0:
            raise ValueError(f"images must be uint8 (N, H, W, C), N > 0, got {images.dtype} {images.shape}")
        if labels.shape != (len(images),):
            raise ValueError(f"labels must have shape ({len(images)},), got {labels.shape}")
        self.images, self.batch_size, self.seed, self.flip = images, batch_size, seed, flip
        self.device = torch.device(device)
        self.mine = shard(batch_size, rank, world)
        self.resident = fits(images.nbytes, self.device) if resident is None else resident
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.whole = torch.tensor(images, device=self.device) if self.resident else None
        self._order = lru_cache(maxsize=2)(partial(_order, seed, len(images)))

    def rows(self, step: int) -> Tensor:
        """The rows of the data set in the global batch of a step, int64 (batch_size,)."""
        positions = torch.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs, places = positions // len(self.images), positions % len(self.images)
        return torch.cat([self._order(int(e))[places[epochs == e]] for e in epochs.unique()])

    def flips(self, step: int) -> Tensor:
        """Which images of the global batch of a step are mirrored, bool (batch_size,)."""
        if not self.flip:
            return torch.zeros(self.batch_size, dtype=torch.bool)
        return torch.rand(self.batch_size, generator=stream(self.seed, "flip", step)) < 0.5

    def at(self, step: int) -> Batch:
        """This worker's share of the global batch of a step."""
        return self._finish(*self._gather(step))

    def run(self, first: int, stop: int | None = None) -> Iterator[Batch]:
        """The batches of the steps first, first + 1, ... up to stop (exclusive), gathered ahead of time."""
        steps = iter(count(first) if stop is None else range(first, stop))
        if self.resident:
            yield from map(self.at, steps)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="curlfree-batches") as pool:
            ahead = deque(pool.submit(self._gather, step) for step in islice(steps, _AHEAD))
            while ahead:
                gathered = ahead.popleft().result()
                ahead.extend(pool.submit(self._gather, step) for step in islice(steps, 1))
                yield self._finish(*gathered)

    def _gather(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Images as uint8 (on the device if resident, else in pinned memory), their rows and their flips."""
        rows, flips = self.rows(step)[self.mine], self.flips(step)[self.mine]
        if self.whole is not None:
            return self.whole[sent(rows, self.device)], rows, flips
        images = torch.from_numpy(self.images[rows.numpy()])
        return images.pin_memory() if self.device.type == "cuda" else images, rows, flips

    def _finish(self, images: Tensor, rows: Tensor, flips: Tensor) -> Batch:
        images = images.to(self.device, non_blocking=True)
        if self.flip:
            mirrored = sent(flips, self.device)[:, None, None, None]
            images = torch.where(mirrored, images.flip(2), images)
        return Batch(to_unit(images), sent(self.labels[rows], self.device), rows)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor from the host on the device, without waiting for what that is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _order(seed: int, n: int, epoch: int) -> Tensor:
    """The order of the n images in an epoch."""
    return torch.randperm(n, generator=stream(seed, "order", epoch))
