r"""One training step: what it draws, its gradient, and its numbers.

The loss of a step is the mean over the global batch of (Eqs. 5, 12, A4, A5)

    1/2 ||sigma s(x, sigma) + z||^2  +  lambda w(sigma) Asym(x, sigma),      x = x0 + sigma z,

the second term on a part of it. Every random draw (data, flips, noise levels, noise, probes, the penalised
part) is made for the whole global batch from a stream named by (seed, step), and each worker keeps its rows.
So without dropout a run is the same whatever the number of workers and of accumulated parts, up to the order
of summation; dropout is a function of (seed, step, rank, part).

Gradients: each worker's loss is a sum over its rows divided by the *global* count, and the workers' gradients
are added up once per step (`exchange`). The penalised rows are stratified (`penalised_rows`), so that workers
have equal shares of them where the counts allow it.

A step's numbers are read by the host one step later (`Sent`), so that a GPU never waits for it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curlfree.build import classes, event_shape, score_matching
from curlfree.config import PackedData, RunConfig
from curlfree.data.loading import Batch, sent
from curlfree.estimators import rademacher
from curlfree.fast import Gradient, choose_form
from curlfree.objectives import sigma2, sigma4
from curlfree.operators import per_sample
from curlfree.penalty import Form, estimates
from curlfree.processes import Process
from curlfree.runlog import Level, RunLog, StepNumbers
from curlfree.seeds import shard, stream, stream_seed
from curlfree.workers import Workers

LEVELS = 8  # ranges of noise levels in the log
PROBES = 2  # of one estimate, at most
CHECKED = 8  # penalised samples, at most, on which the dual is compared with double backward
WEIGHTINGS = {"sigma2": sigma2, "sigma4": sigma4}


@dataclass(frozen=True)
class Draws:
    """One worker's share of everything that a step draws.

    Args:
        x0: clean data.
        sigma: noise levels.
        z: unit noise.
        labels: classes, or None for an unconditional network.
        rows: where the share lies in the global batch.
        penalised: the penalised rows of the *global* batch, in increasing order; none in a step without.
    """

    x0: Tensor
    sigma: Tensor
    z: Tensor
    labels: Tensor | None
    rows: slice
    penalised: Tensor


def draw(config: RunConfig, process: Process, batch: Batch, step: int, workers: Workers) -> Draws:
    """Draw a step's noise and its penalised rows; all workers draw the same and keep their own part."""
    size, device = config.train.batch_size, workers.device
    dtype = torch.float64 if config.train.precision == "float64" else torch.float32
    rows = shard(size, workers.rank, workers.world)

    def source(name: str) -> torch.Generator:
        return stream(config.seed, name, step, device=device)

    sigma = process.sample_sigma(size, source("sigma"))[rows].to(dtype)
    z = torch.randn((size, *event_shape(config)), generator=source("noise"), device=device)[rows].to(dtype)
    x0, labels = batch.x0.to(dtype), None
    if config.train.channels_last:
        x0, z = (t.contiguous(memory_format=torch.channels_last) for t in (x0, z))
    number = classes(config)
    if number is not None:
        hidden = torch.rand(size, generator=source("labels"), device=device)[rows] < unlabelled(config)
        labels = torch.where(hidden | (batch.labels < 0), number, batch.labels)
    penalised = torch.empty(0, dtype=torch.int64)
    if config.objective.lmbda > 0 and (step + 1) % config.objective.every == 0:
        penalised = penalised_rows(size, config.objective.share, stream(config.seed, "penalised", step))
    return Draws(x0, sigma, z, labels, rows, penalised)


def unlabelled(config: RunConfig) -> float:
    """The share of samples whose class is hidden from a conditional network."""
    return config.data.unlabelled if isinstance(config.data, PackedData) else 0.0


def penalised_rows(batch_size: int, fraction: float, generator: torch.Generator) -> Tensor:
    """The rows of the global batch that the penalty is evaluated on, in increasing order.

    The batch is cut into n equal strata, n = fraction * batch_size rounded, and one row is drawn from each.
    Every row is drawn with probability n / batch_size (a row on a border counts for both sides, and may come
    twice), so the mean over them is unbiased for the mean over the batch.
    """
    n = max(1, round(fraction * batch_size))
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    return ((torch.arange(n) + u) * (batch_size / n)).long().clamp(max=batch_size - 1)


@dataclass(frozen=True)
class Terms:
    """The detached terms of one worker's loss, per sample.

    Args:
        sigma: noise levels.
        score_matching: weighted losses.
        penalised_sigma: noise levels of the penalised samples.
        asym: estimates of their asymmetry.
        share: what part of the step's penalised samples each of them is, one over their global number.
    """

    sigma: Tensor
    score_matching: Tensor
    penalised_sigma: Tensor
    asym: Tensor
    share: float


class StepGradient:
    """Puts the gradient of a step's loss into the parameters of a field.

    Score matching and the penalty have a backward each, so that the memory of one is free for the other. With
    ``train.compile`` and an NCSN++ a GPU replays each as a CUDA graph. A compiled field's penalty is compared
    with double backward once, before it is first used (`curlfree.fast.choose_form`).

    Args:
        config: of the run.
        field: in training; with `train.compile` compiled (`curlfree.build.compile_field`).
        workers: this one among all.
    """

    def __init__(self, config: RunConfig, field: nn.Module, workers: Workers) -> None:
        self.config, self.field, self.workers = config, field, workers
        self.loss = score_matching(config, field)
        masked: list[Any] = [part for part in field.modules() if hasattr(part, "draw_masks")]
        self.draw_masks = masked[0].draw_masks if masked else None
        self.dropout = torch.Generator(workers.device)
        self.form: Form = config.objective.form
        self.checked = not config.train.compile
        options: dict[str, Any] = {
            "generators": (self.dropout,),
            "autocast": torch.bfloat16 if config.train.precision == "bfloat16" else None,
        }
        parameters, compiled = list(field.parameters()), config.train.compile
        recorded = compiled and self.draw_masks is not None
        self.matching = Gradient(self._matching, parameters, record=recorded, **options)
        recorded = compiled and hasattr(field, "tangents")
        self.dual = Gradient(self._penalty, parameters, record=recorded, **options)
        self.double = Gradient(self._penalty, parameters, record=False)  # its products must not be rounded

    def __call__(self, draws: Draws, step: int) -> Terms:
        """Add this worker's part of the gradient, one part of its rows after another."""
        config, objective = self.config, self.config.objective
        parts, share = config.train.accumulate, draws.x0.shape[0] // config.train.accumulate
        losses, levels, asyms = [], [draws.sigma[:0]], [draws.sigma[:0]]
        for part in range(parts):
            mine = slice(part * share, (part + 1) * share)
            x0, sigma, z = draws.x0[mine], draws.sigma[mine], draws.z[mine]
            labels = () if draws.labels is None else (draws.labels[mine],)
            self._seed("dropout", step, part)
            sm = self.matching(x0, sigma, z, *labels, weight=1 / config.train.batch_size)
            if x0.device.type == "cpu":
                check_finite(step + 1, sigma, sm, None)
            losses.append(sm)
            start = draws.rows.start + part * share
            local = (draws.penalised >= start) & (draws.penalised < start + share)
            if bool(local.any()):
                chosen = sent(draws.penalised[local] - start, x0.device)
                x, level = (x0 + per_sample(sigma, x0) * z)[chosen], sigma[chosen]
                probes = draw_probes(config, step, len(draws.penalised), x)
                probes = probes[:, sent(local.nonzero()[:, 0], x.device)]
                arguments = (x, level, probes, *(row[chosen] for row in labels))
                self._choose(x, level, *arguments[3:])
                weight = objective.lmbda * objective.every * WEIGHTINGS[objective.weighting](level)
                self._seed("dropout of the penalty", step, part)
                penalty = self.dual if self.form == "dual" else self.double
                asyms.append(penalty(*arguments, weight=weight / len(draws.penalised)))
                levels.append(level)
        share_of_qc = 1 / len(draws.penalised) if len(draws.penalised) else 0.0
        return Terms(draws.sigma, torch.cat(losses), torch.cat(levels), torch.cat(asyms), share_of_qc)

    def _matching(self, x0: Tensor, sigma: Tensor, z: Tensor, *labels: Tensor) -> Tensor:
        return self.loss(x0, sigma, z, self._condition(x0, *labels))

    def _penalty(self, x: Tensor, sigma: Tensor, probes: Tensor, *labels: Tensor) -> Tensor:
        objective, drawn = self.config.objective, iter(probes)
        return estimates(
            self.field,
            x,
            sigma,
            estimator=objective.estimator,
            form=self.form,
            probes=objective.probes,
            probe=lambda *_: next(drawn),
            condition=self._condition(x, *labels),
        )

    def _condition(self, x: Tensor, *labels: Tensor) -> dict[str, Any]:
        """The field's keyword arguments: classes, and dropout masks that can be drawn in a CUDA graph."""
        condition: dict[str, Any] = {}
        if labels:
            (condition["labels"],) = labels
        if self.draw_masks is not None:
            condition["masks"] = self.draw_masks(len(x), self.dropout)
        return condition

    def _seed(self, name: str, step: int, part: int) -> None:
        self.dropout.manual_seed(stream_seed(self.config.seed, name, step, self.workers.rank, part))

    def _choose(self, x: Tensor, sigma: Tensor, *labels: Tensor) -> None:
        """Once, where the field is compiled: leave the dual if it does not give the right gradient."""
        if not self.checked and self.form == "dual":
            few = slice(0, CHECKED)
            condition = self._condition(x[few], *(row[few] for row in labels))
            self.form = choose_form(
                self.field, x[few], sigma[few], condition=condition, autocast=self.dual.autocast
            )
        self.checked = True


def draw_probes(config: RunConfig, step: int, count: int, like: Tensor) -> Tensor:
    """As many probes as the estimates of a step may need, for all penalised rows of the global batch."""
    generator = stream(config.seed, "probe", step, device=like.device)
    shape = (PROBES * config.objective.probes, count, *like.shape[1:])
    return rademacher(like.new_empty(()).expand(shape), generator)


def exchange(field: nn.Module, workers: Workers) -> None:
    """Add up the workers' gradients, in one exchange."""
    if workers.world > 1:
        gradients = [p.grad for p in field.parameters() if p.grad is not None]
        flat = workers.add(torch.cat([g.flatten() for g in gradients]))
        parts = flat.split([g.numel() for g in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))


def check_finite(step: int, sigma: Tensor, score_matching: Tensor, other: str | None) -> None:
    """End the run if a loss is not finite.

    Args:
        step: how many steps were made, this one included.
        sigma: the samples' noise levels.
        score_matching: their losses.
        other: what else is not finite, in words, or None.

    Raises:
        FloatingPointError: with the step, the noise levels and the terms.
    """
    bad = ~torch.isfinite(score_matching)
    if other is None and not bool(bad.any()):
        return
    at = ", ".join(f"{level:.4g}" for level in sigma[bad][:4].tolist())
    where = f" for {int(bad.sum())} of {len(bad)} samples, at sigma {at}" if at else ""
    terms = f"score matching {float(score_matching.mean()):.4g}{where}" + (f"; {other}" if other else "")
    raise FloatingPointError(
        f"step {step}: the loss or its gradient is not finite: {terms}. Nothing was saved since the last "
        "checkpoint; continue from it with a smaller optim.lr, or train.precision=float32"
    )


class Sent:
    """A step's numbers on their way from the device and from the other workers to the host.

    Args:
        config: of the run.
        process: its noise levels.
        step: how many steps were made.
        lr: the learning rate.
        terms: this worker's part of the loss.
        norm: of the gradient, which all workers share.
        stop: whether this worker was told to stop.
        workers: this one among all.
    """

    def __init__(
        self,
        config: RunConfig,
        process: Process,
        step: int,
        lr: float,
        terms: Terms,
        norm: Tensor,
        stop: bool,
        workers: Workers,
    ) -> None:
        self.config, self.step, self.lr, self.terms = config, step, lr, terms
        low, high = (torch.tensor(end).log() for end in process.sigma_range)
        edges = torch.linspace(float(low), float(high), LEVELS + 1)
        self.sigmas = ((edges[:-1] + edges[1:]) / 2).exp().tolist()
        weighting = WEIGHTINGS[config.objective.weighting]
        nats2 = (2 * torch.pi * terms.penalised_sigma.square()).square() * terms.asym / 2
        sums = torch.zeros(4, LEVELS, device=norm.device, dtype=torch.float32)
        for start, sigma, values in (
            (0, terms.sigma, terms.score_matching),
            (2, terms.penalised_sigma, nats2),
        ):
            place = (sigma.log() - low) * (LEVELS / (high - low))
            place = place.nan_to_num().long().clamp(0, LEVELS - 1)
            sums[start].index_add_(0, place, torch.ones_like(place, dtype=torch.float32))
            sums[start + 1].index_add_(0, place, values.float())
        qc = (weighting(terms.penalised_sigma) * terms.asym).sum() * terms.share
        sm = terms.score_matching.sum() / config.train.batch_size
        own = torch.stack([sm.float(), qc.float(), torch.full_like(sm, float(stop), dtype=torch.float32)])
        numbers = torch.cat([workers.add(torch.cat([own, sums.flatten()])), norm.detach().float()[None]])
        self.numbers = numbers.to("cpu", non_blocking=True)
        self.ready = torch.cuda.Event() if norm.device.type == "cuda" else None
        if self.ready is not None:
            self.ready.record()

    def receive(self, log: RunLog | None) -> bool:
        """Wait for the numbers and hand them to the log.

        Returns:
            Whether a worker was told to stop.

        Raises:
            FloatingPointError: one of them is not finite.
        """
        if self.ready is not None:
            self.ready.synchronize()
        sm, qc, stop, *sums, norm = self.numbers.tolist()
        if not bool(torch.isfinite(self.numbers).all()):
            other = f"penalty {qc:.4g}, gradient norm {norm:.4g}"
            check_finite(self.step, self.terms.sigma, self.terms.score_matching, other)
        if log is not None:
            columns = zip(*(sums[i * LEVELS : (i + 1) * LEVELS] for i in range(4)), strict=True)
            objective = self.config.objective
            numbers = StepNumbers(
                step=self.step,
                loss=sm + objective.lmbda * objective.every * qc,
                score_matching=sm,
                qc=qc if self.terms.share else None,
                grad_norm=norm,
                lr=self.lr,
                levels=[
                    Level(sigma=sigma, samples=a, score_matching=b, penalised=c, nats2=d)
                    for sigma, (a, b, c, d) in zip(self.sigmas, columns, strict=True)
                ],
            )
            log.step(numbers)
        return stop > 0
