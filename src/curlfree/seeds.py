r"""Named random streams: every draw is a function of (seed, step, global sample index).

`stream(seed, *names)` hashes the seed and any names (words and numbers, usually the step and what is drawn)
with SHA-256 and seeds a fresh generator with the first 64 bits. No stream is ever advanced from one step to
the next, so the position of a run is its step number alone: nothing has to be stored for an exact resume.

For draws that belong to samples, each worker draws for the *whole* global batch and keeps its own rows::

    mine = shard(batch_size, rank, world)
    z = torch.randn((batch_size, 3, 32, 32), generator=stream(seed, step, "noise", device=device))[mine]

The drawing costs a thousandth of a training step and makes a run the same whatever the number of workers.

Limits. Numbers differ between devices (a CPU draws with the Mersenne Twister, CUDA with Philox). A CPU
generator keeps the low 32 of the 64 bits: among n streams about n^2 / 2^33 pairs coincide, so that a run of
a million steps with four draws each repeats some two thousand of them somewhere, at unrelated steps and for
unrelated data. For the streams of one step the chance is 1e-9.
"""

import hashlib
import operator

import torch


def stream_seed(seed: int, *names: str | int) -> int:
    """The 64-bit seed of the stream with these names."""
    words: list[str | int] = [operator.index(seed)]
    words += [name if isinstance(name, str) else operator.index(name) for name in names]
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "little")


def stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for the draws called `names` under `seed`.

    Args:
        seed: the seed of the run.
        names: what is drawn: words and whole numbers; the order and the type matter.
        device: where the generator draws.

    Returns:
        A generator in a state that depends on the arguments alone.

    Raises:
        TypeError: for a name that is neither a word nor a whole number.
    """
    return torch.Generator(device).manual_seed(stream_seed(seed, *names))


def shard(batch_size: int, rank: int = 0, world: int = 1) -> slice:
    """The rows of the global batch that belong to worker `rank` of `world`.

    Raises:
        ValueError: where the workers' shares would differ (their mean gradients could not just be averaged).
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, world), got rank={rank} with world={world}")
    if batch_size < 1 or batch_size % world:
        raise ValueError(
            f"the global batch size must be a positive multiple of the number of workers, "
            f"got batch_size={batch_size} with world={world}"
        )
    share = batch_size // world
    return slice(rank * share, (rank + 1) * share)
