r"""Sampling from a run: N images or points, in pieces that any number of processes share and can resume.

Every random number of image i comes from (seed, i) (`curlfree.samplers.PerSampleNoise`), and no sampler here
joins the samples of a batch unless asked to, so image i is the same whatever the batch size, the number of
processes and the number of images, up to the rounding of the network itself. The exceptions are the ODE with
one step size for its batch (``per_sample=False``, what the paper has) and `batch_norms`.

Guidance (Ho and Salimans 2022, arXiv:2207.12598): the guided score ``s_null + w (s_label - s_null)`` takes
two evaluations of the network, and both are counted.

A folder of samples holds the pieces, ``samples.npz``, ``grid.png`` and ``samples.json``. Images are stored as
uint8 (N, H, W, C), rounded to the nearest level; the authors' code truncates, which darkens by half a level.
"""

import hashlib
import io
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curlfree.build import build_sampler, classes, event_shape
from curlfree.config import SampleConfig
from curlfree.noise import PerSampleNoise
from curlfree.operators import Field
from curlfree.pieces import (
    ALONE,
    Tensors,
    compute_pieces,
    digest,
    fingerprint,
    read_pieces,
    write_bytes,
    write_json,
)
from curlfree.runs import Run
from curlfree.workers import Workers

GRID = 64


@dataclass(frozen=True, eq=False)
class Samples:
    """What was drawn.

    Args:
        x: images as uint8 (N, H, W, C), or points (N, D).
        evaluations: of the network that each sample took, (N,).
        labels: the class of each image, -1 for none, (N,).
        settings: everything that the samples depend on.
        folder: where they are.
    """

    x: Tensor
    evaluations: Tensor
    labels: Tensor
    settings: dict[str, Any]
    folder: Path


class Guided(nn.Module):
    """The guided score ``s_null + w (s_label - s_null)``, by one call with both halves in the batch.

    Args:
        field: a conditional field, ``field(x, sigma, labels=...)``.
        null: the label that stands for none.
        weight: w.
    """

    def __init__(self, field: Field, null: int, weight: float) -> None:
        super().__init__()
        self.field, self.null, self.weight = field, null, weight

    def forward(self, x: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        """The guided score."""
        both = torch.cat([labels, torch.full_like(labels, self.null)])
        s_label, s_null = self.field(torch.cat([x, x]), torch.cat([sigma, sigma]), labels=both).chunk(2)
        return s_null + self.weight * (s_label - s_null)


def to_uint8(x: Tensor) -> Tensor:
    """Images in [0, 1] as the nearest of 256 levels."""
    return x.clamp(0, 1).mul(255).round().to(torch.uint8)


def home(field: nn.Module) -> Tensor:
    """An empty tensor of a field's type, on its device."""
    tensors = chain(field.parameters(), field.buffers())
    return next((t for t in tensors if t.is_floating_point()), torch.empty(0)).new_empty(0)


def identity(run: Run) -> dict[str, Any]:
    """Which weights a number was computed with."""
    return {
        "step": run.step,
        "weights": run.weights,
        "sha256": digest(run.field.state_dict(), type(run.field).__name__),
        "process": f"{run.process}",
        "device": home(run.field).device.type,
    }


def sample(
    run: Run,
    config: SampleConfig,
    *,
    folder: Path | None = None,
    team: Workers = ALONE,
    progress: bool = False,
) -> Samples:
    """Draw samples from a run, or find those that were drawn before.

    Args:
        run: the trained field.
        config: what to draw.
        folder: where to keep it; by default a folder within the run, named by the sampler and settings.
        team: this process' place among those that share the work (and the file system).
        progress: show a progress bar.

    Returns:
        All samples, in every process.

    Raises:
        ValueError: a label or guidance for a field without classes, or a label out of range.
        ArithmeticError: the field's value was not finite, or the ODE's step too small.
    """
    count = classes(run.config)
    _check_labels(config, count)
    settings = {**asdict(config), **identity(run)}
    del settings["n"]
    folder = folder or run.folder / "samples" / f"{config.sampler}-{fingerprint(settings)}"
    starts = range(0, config.n, config.batch)

    def piece(i: int) -> Tensors:
        return draw(run, config, range(starts[i], min(starts[i] + config.batch, config.n)))

    # The last piece may be short: raising n makes it again, and keeps the others.
    pieces = [{**settings, "rows": min(config.batch, config.n - start)} for start in starts]
    compute_pieces(
        folder / "pieces", piece, about=pieces, team=team, description="sampling" if progress else ""
    )
    found = read_pieces(folder / "pieces", about=pieces)
    x, evaluations, labels = (torch.cat([p[k] for p in found]) for k in ("x", "evaluations", "labels"))
    samples = Samples(x, evaluations, labels, settings, folder)
    if team.rank == 0:
        _write(samples, run, config)
    return samples


def draw(run: Run, config: SampleConfig, indices: range) -> Tensors:
    """The samples with these numbers: "x", "evaluations" (of the network, each) and "labels".

    Args:
        run: the trained field.
        config: how to draw.
        indices: numbers of the samples; all their random numbers depend on these and the seed alone.
    """
    like, shape, count = home(run.field), event_shape(run.config), classes(run.config)
    noise = PerSampleNoise(config.seed, indices)
    prior = run.process.data_mean + run.process.prior_std * noise(
        like.new_empty((len(indices), *shape)).double()
    )
    field: Field = run.field
    calls, condition, labels = 1, None, torch.full((len(indices),), -1)
    if count is not None:
        labels = torch.tensor([i % count if config.label is None else config.label for i in indices])
        condition = {"labels": labels.to(like.device)}
        if config.guidance != 1:
            field, calls = Guided(run.field, count, config.guidance), 2
    with torch.no_grad():
        solve = build_sampler(config, noise)
        solution = solve(field, prior.to(like.dtype), run.process, condition=condition)
    x = solution.x.cpu()
    if len(shape) == 3:
        x = to_uint8(x).permute(0, 2, 3, 1).contiguous()
    return {"x": x, "evaluations": calls * solution.evaluations.cpu(), "labels": labels}


def _check_labels(config: SampleConfig, count: int | None) -> None:
    if count is None and (config.label is not None or config.guidance != 1):
        raise ValueError("label, guidance: the run's network has no classes; train one with `classes` set")
    if count is not None and config.label is not None and not 0 <= config.label < count:
        raise ValueError(f"label: expected a class from 0 to {count - 1}, found {config.label}")


def _write(samples: Samples, run: Run, config: SampleConfig) -> None:
    packed = io.BytesIO()
    np.savez(
        packed, x=samples.x.numpy(), labels=samples.labels.numpy(), evaluations=samples.evaluations.numpy()
    )
    write_bytes(samples.folder / "samples.npz", packed.getvalue())
    picture = _grid(samples.x[:GRID].numpy()) if samples.x.ndim == 4 else _scatter(samples.x.numpy())
    write_bytes(samples.folder / "grid.png", picture)
    about = {
        "run": run.folder.name,
        "n": config.n,
        **samples.settings,
        "seeds": f"sample i: (seed {config.seed}, i), i = 0 to {config.n - 1}",
        "nfe": {
            "mean": float(samples.evaluations.double().mean()),
            "min": int(samples.evaluations.min()),
            "max": int(samples.evaluations.max()),
        },
        "samples_sha256": hashlib.sha256(packed.getvalue()).hexdigest(),
    }
    write_json(samples.folder / "samples.json", about)


def _grid(images: np.ndarray) -> bytes:
    """A PNG with the images in a square."""
    from PIL import Image

    n, height, width, channels = images.shape
    side = int(np.ceil(np.sqrt(n)))
    canvas = np.zeros((side, side, height, width, channels), np.uint8)
    canvas.reshape(side * side, height, width, channels)[:n] = images
    picture = canvas.transpose(0, 2, 1, 3, 4).reshape(side * height, side * width, channels)
    file = io.BytesIO()
    Image.fromarray(picture[..., 0] if channels == 1 else picture).save(file, "PNG")
    return file.getvalue()


def _scatter(points: np.ndarray) -> bytes:
    """A PNG of the first two coordinates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.subplots()
    axes.scatter(points[:, 0], points[:, 1], s=1)
    axes.set(aspect="equal", xlabel="$x_1$", ylabel="$x_2$", title=f"{len(points)} samples")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()
