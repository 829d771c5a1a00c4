r"""Metrics: how far a field is from conservative, level by level, with honest error bars.

At each noise level the audit draws ``x = x0 + sigma z`` and reports

* ``asym``: the mean of Asym = 1/2 ||J - J^T||_F^2 (Eqs. A7, A10);
* ``nasym``: the pooled ratio ``sum Asym / (2 sum ||J||^2)``, the ratio of means. The paper averages ratios
  instead (Eqs. A8, A11, which also lack the 1/2 of Eq. A3): that is ``nasym_mean_of_ratios``, and it depends
  on the number of probes;
* ``nasym_denoiser``: the same for the denoiser's Jacobian ``J_D = I + sigma^2 J``, whose symmetric part is
  not drowned by -I/sigma^2 at large sigma; ||J_D||^2 is estimated from the same products;
* ``work_nats``: the rms work around great circles of noise (`curlfree.loop_work`), a number with a unit, and
  ``work_nats_half``, the same by half as many nodes: where they differ the field is too rough for the rule.

Standard errors are over images: an image's probes are averaged first, because they share its Jacobian. That
of a ratio R = sum a / sum b is the delta method's, ``sqrt(sum (a - R b)^2) / sum b``.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curlfree.checks import check_batch
from curlfree.estimators import Probe, check_estimator, circle_work, gaussian, rademacher, ratio
from curlfree.fieldcheck import check_field, evaluated
from curlfree.operators import Condition, Field, Operator, jacobian, per_sample, second_order
from curlfree.penalty import restrict
from curlfree.processes import Process

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rotation_density(field: Field, x: Tensor, sigma: Tensor | None = None) -> Tensor:
    """``ROT_ij s = ds_i/dx_j - ds_j/dx_i`` at each point (Eq. 8), shape (B, D, D), by D backward passes.

    Its value on a grid is the map that shows where a low-dimensional field turns.
    """
    J = jacobian(field, x, sigma)[1].dense()
    return J - J.mT


@dataclass(frozen=True)
class Estimate:
    """A mean or ratio with its standard error."""

    value: float
    se: float


def mean_estimate(a: Tensor) -> Estimate:
    """The mean over samples, and its standard error (NaN for one sample)."""
    return Estimate(float(a.mean()), float(a.std() / math.sqrt(len(a))))


def ratio_estimate(a: Tensor, b: Tensor) -> Estimate:
    """The pooled ratio ``sum a / sum b``, 0 if all b are, and its standard error by the delta method."""
    total = float(b.sum())
    if total == 0:
        return Estimate(0.0, 0.0)
    R = float(a.sum()) / total
    correction = math.sqrt(len(a) / (len(a) - 1)) if len(a) > 1 else math.nan
    return Estimate(R, float((a - R * b).square().sum().sqrt()) / total * correction)


def rms_estimate(a: Tensor) -> Estimate:
    """The root mean square, and its standard error by the delta method."""
    square = mean_estimate(a.square())
    rms = math.sqrt(square.value)
    return Estimate(rms, square.se / (2 * rms) if rms else 0.0)


@dataclass(frozen=True)
class Audit:
    """A table over noise levels: one dictionary for each, from the largest level to the smallest."""

    levels: list[dict[str, float | int]]

    def to_json(self, path: str | Path | None = None) -> str:
        """The table as JSON, ``{"levels": [...]}``; also written to `path` if one is given."""
        text = json.dumps({"levels": self.levels}, indent=2)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def column(self, name: str) -> list[float]:
        """One quantity at all levels."""
        return [float(level[name]) for level in self.levels]

    def plot(self) -> "Figure":
        """Asym, NAsym and the work in nats against sigma, with 95 % intervals; needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 3), layout="constrained")
        labels = {"asym": "Asym", "nasym": "NAsym", "work_nats": "loop work (nats)"}
        for axes, (name, label) in zip(figure.subplots(1, 3), labels.items(), strict=True):
            width = [1.96 * se for se in self.column(f"{name}_se")]
            axes.errorbar(self.column("sigma"), self.column(name), yerr=width, marker="o", ms=3, capsize=2)
            axes.set(xscale="log", yscale="log", xlabel="sigma", title=label)
        return figure


def audit(
    field: Field,
    x0: Tensor,
    process: Process,
    *,
    levels: int | Tensor | Sequence[float] = 20,
    probes: int = 1,
    images: int | None = None,
    nodes: int = 8,
    batch: int = 256,
    estimator: str = "skew",
    probe: Probe = rademacher,
    generator: torch.Generator | None = None,
    condition: Condition | None = None,
) -> Audit:
    """Measure a field's asymmetry at many noise levels.

    Args:
        field: the vector field; modules are put in evaluation mode, and back.
        x0: clean data, of shape (N, *event).
        process: the schedule, which gives the levels.
        levels: how many levels, equally spaced in time, or the levels themselves.
        probes: estimates per image and level.
        images: how many of x0 are used, all by default.
        nodes: points on each circle of the work, an even number of at least 6.
        batch: images evaluated at once.
        estimator: a key of `curlfree.estimators.ESTIMATORS`.
        probe: the distribution of the probes.
        generator: the source of noise and probes; by default PyTorch's own.
        condition: keyword arguments for the field; tensors with N rows go with the images.

    Returns:
        The table; ``.to_json()``, ``.plot()``.

    Raises:
        TypeError: as `jacobian`.
        ValueError: as `jacobian` and `check_field`; fewer than two images; an odd number of nodes.
    """
    check_batch(x0, None)
    if check_estimator(estimator, probes).linearise is not jacobian:
        raise ValueError(
            f"audit linearises the field by autodiff, once per level: {estimator!r} does not; use 'pair'"
        )
    if nodes < 6 or nodes % 2:
        raise ValueError(f"nodes must be an even number of at least 6, got {nodes}")
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    rows = x0.shape[0]
    x0 = x0 if images is None else x0[: max(images, 0)]
    if x0.shape[0] < 2:
        raise ValueError(f"a standard error needs at least two images, got {x0.shape[0]}")
    sigmas = (
        process.levels(max(levels, 0))
        if isinstance(levels, int)
        else torch.as_tensor(levels, dtype=torch.float64).flatten().sort(descending=True).values
    )
    if len(sigmas) == 0:
        raise ValueError("audit needs at least one noise level, got none")
    with evaluated(field):
        few = torch.arange(2, device=x0.device)
        for sigma in (sigmas.max(), sigmas.min()):
            with second_order():  # eagerly: two samples are not worth compiling for
                check_field(field, x0[:2], sigma.to(x0).expand(2), condition=restrict(condition, few, rows))
        table = []
        for sigma in sigmas:
            parts = []
            for start in range(0, len(x0), batch):
                chosen = torch.arange(start, min(start + batch, len(x0)), device=x0.device)
                parts.append(
                    _measure(
                        field,
                        x0[chosen],
                        sigma.to(x0).expand(len(chosen)),
                        probes=probes,
                        nodes=nodes,
                        estimator=estimator,
                        probe=probe,
                        generator=generator,
                        condition=restrict(condition, chosen, rows),
                    )
                )
            table.append(_level(float(sigma), {k: torch.cat([p[k] for p in parts]) for k in parts[0]}))
    return Audit(table)


@torch.no_grad()
def _measure(
    field: Field,
    x0: Tensor,
    sigma: Tensor,
    *,
    probes: int,
    nodes: int,
    estimator: str,
    probe: Probe,
    generator: torch.Generator | None,
    condition: Condition | None,
) -> dict[str, Tensor]:
    """Each image's estimates at one level, in float64 on the CPU."""
    level = per_sample(sigma, x0)
    _, J = jacobian(field, x0 + level * gaussian(x0, generator), sigma, condition=condition)
    chosen = check_estimator(estimator, probes)
    if not chosen.random:
        J, probes = Operator.from_matrix(J.dense(), tuple(x0.shape[1:])), 1
    identity = Operator(lambda v: v, lambda u: u, J.like)
    draws: dict[str, list[Tensor]] = {"asym": [], "norm2": [], "nasym": [], "denoiser_norm2": []}
    for _ in range(probes):
        known = _remembering(J)
        vs = probe(J.like, generator), probe(J.like, generator)
        a, n = chosen.moments(known, iter(vs).__next__)
        _, n_D = chosen.moments(identity + sigma.square() * known, iter(vs).__next__)
        for name, value in zip(draws, (a, n, ratio(a, n), n_D), strict=True):
            draws[name].append(value)
    z1, z2 = gaussian(x0, generator), gaussian(x0, generator)
    work = circle_work(field, x0, sigma, z1, z2, nodes=nodes, condition=condition)
    measured = {name: torch.stack(values).mean(0) for name, values in draws.items()}
    measured |= {"work": work.sum(0), "work_half": 2 * work[::2].sum(0)}
    return {name: value.double().cpu() for name, value in measured.items()}


def _remembering(J: Operator) -> Operator:
    """J with its products kept: the denoiser's estimate takes none that the field's has had."""

    def keep(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        kept: list[tuple[Tensor, Tensor]] = []

        def remembered(v: Tensor) -> Tensor:
            for known, value in kept:
                if known is v:
                    return value
            kept.append((v, product(v)))
            return kept[-1][1]

        return remembered

    return Operator(keep(J.mv), keep(J.rmv), J.like)


def _level(sigma: float, m: dict[str, Tensor]) -> dict[str, float | int]:
    """The row of one level."""
    work = rms_estimate(m["work"])
    row: dict[str, Any] = {"sigma": sigma}
    for name, e in {
        "asym": mean_estimate(m["asym"]),
        "nasym": ratio_estimate(0.5 * m["asym"], m["norm2"]),
        "nasym_mean_of_ratios": mean_estimate(m["nasym"]),
        "nasym_denoiser": ratio_estimate(0.5 * sigma**4 * m["asym"], m["denoiser_norm2"]),
        "work_nats": work,
    }.items():
        row[name], row[f"{name}_se"] = e.value, e.se
    row["work_nats_half"] = rms_estimate(m["work_half"]).value
    row["n"] = len(m["asym"])
    return row
