r"""What the metrics of an evaluation share: its settings, the data, and pieces that are kept.

Each metric is computed in pieces, functions of their index and the settings alone (`curlfree.pieces`), kept
in ``RUN/evaluation``: an interrupted evaluation goes on where it stopped, processes share the pieces, and
the result is the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from curlfree.build import build_distribution, classes
from curlfree.config import PackedData, SampleConfig, ToyData
from curlfree.data.packed import open_packed
from curlfree.distributions import Distribution
from curlfree.metrics import Estimate, mean_estimate
from curlfree.pieces import Tensors, compute_pieces, fingerprint, read_pieces
from curlfree.runs import Run
from curlfree.sample import home
from curlfree.seeds import stream
from curlfree.workers import Workers

MetricName = Literal["loss", "score-error", "nll", "asymmetry", "nfe", "samples"]
Metric = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What to measure.

    Args:
        metrics: which; by default all that the run's data allow ("samples" for images only with `features`).
        n: held-out images or points of the loss, the score error and the likelihood.
        split: of a packed file, the held-out images; by default the run's own.
        levels: noise levels of the loss, the score error and the asymmetry.
        probes: Hutchinson probes of an image's likelihood; two or more separate their noise.
        rtol: relative tolerance of the likelihood's ODE.
        atol: its absolute tolerance.
        audit_n: images or points of the asymmetry.
        audit_probes: its probes per image and level.
        audit_compile: compile the network for it, an NCSN++ by regions; minutes that pay for large audits.
        tolerances: of the ODE whose evaluations are counted, both relative and absolute.
        nfe_n: samples for which they are counted.
        samples: the samples that are compared with the data.
        features: the network that sees images: "inception" (extra [inception]), the path of a TorchScript or
            .pt2 file, or ``module:function``.
        reference: of a packed file, the split that samples are compared with.
        reference_n: images or points of the data in this comparison; by default all images of the split, and
            as many points as samples.
        references: where the features of the data are kept; by default in the run.
        neighbours: the k of precision and recall.
        kid_block: images of each kind in one of KID's blocks, or a quarter of the images if they are few.
        seed: of everything random.
        batch: images or points at a time.
    """

    metrics: tuple[MetricName, ...] = ()
    n: int = 256
    split: str | None = None
    levels: int = 10
    probes: int = 2
    rtol: float = 1e-5
    atol: float = 1e-5
    audit_n: int = 64
    audit_probes: int = 1
    audit_compile: bool = False
    tolerances: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5)
    nfe_n: int = 16
    samples: SampleConfig = field(default_factory=SampleConfig)
    features: str | None = None
    reference: str = "train"
    reference_n: int | None = None
    references: Path | None = None
    neighbours: int = 3
    kid_block: int = 1000
    seed: int = 0
    batch: int = 64

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ValueError: a number is out of its range.
        """
        least = {"n": 2, "levels": 1, "probes": 1, "audit_n": 2, "audit_probes": 1, "nfe_n": 2, "batch": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name}: expected at least {bound}, found {getattr(self, name)}")
        if not self.tolerances or min(self.tolerances) <= 0:
            raise ValueError(f"tolerances: expected positive numbers, found {self.tolerances}")


@dataclass(frozen=True, eq=False)
class Data:
    """Clean data: rows of images as uint8 (B, C, H, W), or points (B, D).

    Args:
        name: what they are, and what identifies them.
        count: how many rows there are.
        rows: the data in some rows, and their labels (-1 for none).
        distribution: what points are drawn from; None for images.
    """

    name: str
    count: int
    rows: Callable[[Tensor], tuple[Tensor, Tensor]]
    distribution: Distribution | None = None


def open_data(run: Run, *, split: str | None, n: int, seed: int) -> Data:
    """Data of the kind that a run was trained on.

    Args:
        run: the run.
        split: of a packed file; None for the run's held-out images.
        n: how many points to draw from a distribution.
        seed: of these.

    Raises:
        ValueError: the packed file is missing, damaged or has no such split.
    """
    match run.config.data:
        case ToyData() as data:
            distribution = build_distribution(data)
            points = distribution.sample(n, stream(seed, "points", split or "held-out"), torch.float64)
            like = home(run.field)
            return Data(
                f"{n} fresh points of {data.name}",
                n,
                lambda rows: (points[rows].to(like), torch.full((len(rows),), -1)),
                distribution,
            )
        case PackedData() as data:
            packed = open_packed(data.path)
            split = split or data.validation
            images, labels = packed.split(split)

            def rows(chosen: Tensor) -> tuple[Tensor, Tensor]:
                pixels = torch.from_numpy(images[chosen.numpy()]).permute(0, 3, 1, 2).contiguous()
                return pixels.to(home(run.field).device), torch.from_numpy(labels[chosen.numpy()])

            return Data(f"{split} images, sha256:{packed.header.sha256}", len(images), rows)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One evaluation of one run: what the metrics below share.

    Args:
        run: the trained field.
        config: what to measure.
        data: held-out data.
        model: which weights they are (`curlfree.sample.identity`).
        team: this process' place.
        progress: show progress bars.
    """

    run: Run
    config: EvaluateConfig
    data: Data
    model: dict[str, Any]
    team: Workers
    progress: bool

    @property
    def n(self) -> int:
        """How many held-out images or points are used."""
        return min(self.config.n, self.data.count)

    @property
    def about(self) -> str:
        """The data, in words."""
        return f"{self.n} of {self.data.name}"

    @property
    def folder(self) -> Path:
        """Where the pieces are kept."""
        return self.run.folder / "evaluation"

    def chosen(self, start: int, stop: int) -> Tensor:
        """Which rows of the data are used: the first of a random order."""
        order = torch.randperm(self.data.count, generator=stream(self.config.seed, "rows"))
        return order[start : min(stop, self.data.count)]

    def clean(self, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """x0 in the units of the field, and the condition."""
        x, labels = self.data.rows(rows)
        x0 = x.to(home(self.run.field).dtype)
        return (x0 if self.data.distribution else x0 / 255), self.condition(labels)

    def condition(self, labels: Tensor) -> dict[str, Tensor]:
        """The field's keyword arguments for labels, of which -1 is none."""
        count = classes(self.run.config)
        if count is None:
            return {}
        return {"labels": torch.where(labels < 0, count, labels).to(home(self.run.field).device)}

    def batches(self, name: str, compute: Callable[[Tensor, int], Tensors], **settings: Any) -> list[Tensors]:
        """Pieces that are batches of the held-out data, computed from their rows and index."""
        size = self.config.batch
        starts = range(0, self.n, size)

        def piece(i: int) -> Tensors:
            return compute(self.chosen(starts[i], min(starts[i] + size, self.n)), i)

        rows = [min(size, self.n - start) for start in starts]
        about = {"data": self.data.name, "batch": size, "seed": self.config.seed, **settings}
        return self.pieces(name, piece, [{**about, "rows": r} for r in rows])

    def pieces(
        self,
        name: str,
        compute: Callable[[int], Tensors],
        settings: list[dict[str, Any]],
        who: dict[str, Any] | None = None,
    ) -> list[Tensors]:
        """All pieces of a metric, shared between processes and kept.

        Args:
            name: of the metric.
            compute: the i-th piece.
            settings: of each piece.
            who: what the pieces depend on beside; by default the run's weights.
        """
        base = {"metric": name, **(self.model if who is None else who)}
        about = [{**base, **s} for s in settings]
        common = {k: v for k, v in about[0].items() if all(a[k] == v for a in about)}
        common.pop("rows", None)
        folder = self.folder / f"{name}-{fingerprint(common)}"
        compute_pieces(
            folder, compute, about=about, team=self.team, description=name if self.progress else ""
        )
        return read_pieces(folder, about=about)


def entry(estimate: Estimate, n: int, how: str) -> Metric:
    """A metric as it is written; a standard error that does not exist is None."""
    return {"value": estimate.value, "se": finite(estimate.se), "n": n, "how": how}


def absent(n: int, why: str) -> Metric:
    """A metric that cannot be computed from so few samples; the others are."""
    return {"value": None, "se": None, "n": n, "how": f"not computed: {why}"}


def level_entry(sigma: float, estimate: Estimate, n: int) -> Metric:
    """The row of one noise level."""
    return {"sigma": sigma, "value": estimate.value, "se": finite(estimate.se), "n": n}


def by_level(each: Tensor, sigmas: Tensor, how: str) -> Metric:
    """A metric from its values for each sample and level, shape (N, levels)."""
    columns = zip(sigmas.tolist(), each.T, strict=True)
    levels = [level_entry(sigma, mean_estimate(column), len(column)) for sigma, column in columns]
    return {**entry(mean_estimate(each.mean(1)), len(each), how), "levels": levels}


def gaussian(like: Tensor, seed: int, *names: str | int) -> Tensor:
    """Noise like a tensor, from the stream with these names."""
    generator = stream(seed, *names, device=like.device)
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)


def finite(value: float) -> float | None:
    """A number that JSON can hold, or None."""
    return value if math.isfinite(value) else None
