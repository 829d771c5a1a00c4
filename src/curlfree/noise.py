"""Standard normal noise for samplers, from one generator or sample by sample.

`PerSampleNoise` is a counter-based generator: its numbers are a hash of (seed, sample, draw, coordinate), so
a sample does not depend on the size or order of the batch that it is drawn in, and a run can be split and
continued anywhere. The hash is the finaliser of SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable
pseudorandom number generators"), a few integer operations that give the same bits on every device; normal
numbers are the quantiles of its uniform ones.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Noise = Callable[[Tensor], Tensor]
"""Standard normal numbers, fresh in every call, of the shape, type and device of the argument."""


class BatchNoise:
    """Noise for a whole batch from one generator.

    Args:
        generator: the source.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __call__(self, like: Tensor) -> Tensor:
        """Standard normal numbers of the shape, type and device of `like`."""
        z = torch.randn(
            like.shape, generator=self.generator, device=self.generator.device, dtype=torch.float64
        )
        return z.to(like)


class PerSampleNoise:
    """Noise that depends on the seed, the sample's number, the draw's number and the coordinate, only.

    Args:
        seed: the seed of the run.
        samples: the numbers of the samples of this batch within the run, ``range(start, stop)``.
    """

    def __init__(self, seed: int, samples: Sequence[int]) -> None:
        keys = torch.tensor([seed % 2**63, *samples], dtype=torch.int64)
        self._keys = _mix(_mix(keys[:1]) + keys[1:])
        self._draws = 0

    def __call__(self, like: Tensor) -> Tensor:
        """Standard normal numbers of the shape, type and device of `like`.

        Raises:
            ValueError: the batch has another size than `samples`.
        """
        if len(like) != len(self._keys):
            raise ValueError(
                f"PerSampleNoise was made for {len(self._keys)} samples, the batch has {len(like)}"
            )
        keys = _mix(self._keys.to(like.device) + torch.tensor(self._draws) * _GAMMA)
        self._draws += 1
        counter = torch.arange(1, like[0].numel() + 1, device=like.device)
        bits = _mix(keys[:, None] + counter * _GAMMA)
        uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52
        return torch.special.ndtri(uniform).view(like.shape).to(like)


_GAMMA = 0x9E3779B97F4A7C15 - 2**64


def _shift(n: Tensor, by: int) -> Tensor:
    """The logical shift to the right of 64-bit numbers."""
    return (n >> by) & ((1 << (64 - by)) - 1)


def _mix(n: Tensor) -> Tensor:
    """The finaliser of SplitMix64, a bijection of the 64-bit numbers."""
    n = (n ^ _shift(n, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    n = (n ^ _shift(n, 27)) * (0x94D049BB133111EB - 2**64)
    return n ^ _shift(n, 31)
