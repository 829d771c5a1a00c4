"""What a training run tells: `log.jsonl`, TensorBoard, Weights & Biases, and the progress on the terminal.

Only rank 0 has a log. A line of `log.jsonl` holds the means over the steps since the line before; "levels"
lists the same by noise level, with the penalised samples' rms asymmetry in nats, ``2 pi sigma^2 ||K||_F``
(the work around a circle of noise, see `curlfree.loop_work`), null where the mean of a square is negative, as
some estimators' may be. Each start adds a line with its "provenance": software, commit, hardware, and the
other run's weights that the run began with. When a run is resumed the log is cut back to the step of the
checkpoint, so that every step is in it once.
"""

import json
import math
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from curlfree.config import RunConfig, encode
from curlfree.pieces import write_bytes
from curlfree.provenance import provenance

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Level:
    """Sums over the samples of a range of noise levels.

    Args:
        sigma: the middle of the range.
        samples: how many.
        score_matching: the sum of their weighted losses.
        penalised: how many of them the penalty was evaluated on.
        nats2: the sum of their squared asymmetries in nats.
    """

    sigma: float
    samples: float
    score_matching: float
    penalised: float
    nats2: float


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """What happened in one step, over all workers.

    Args:
        step: how many steps were made.
        loss: the total.
        score_matching: its first term, weighted by sigma^2.
        qc: the weighted penalty without lambda; None in a step without one.
        grad_norm: before clipping.
        lr: the learning rate.
        levels: by noise level.
    """

    step: int
    loss: float
    score_matching: float
    qc: float | None
    grad_norm: float
    lr: float
    levels: list[Level]


class RunLog:
    """The log of a run, opened with ``with``.

    Args:
        out: the run's folder.
        config: of the run.
        step: at which the run starts or goes on.
        device: name of the accelerator, None for the processor.
        init: which checkpoint the run began with (`curlfree.checkpoint.read_origin`), None for none.
    """

    def __init__(
        self, out: Path, config: RunConfig, step: int, device: str | None = None, init: Row | None = None
    ) -> None:
        self.out, self.config, self.first, self.device, self.init = out, config, step, device, init
        self.steps: list[StepNumbers] = []
        self._stack = ExitStack()

    def __enter__(self) -> "RunLog":
        path = self.out / "log.jsonl"
        cut_back(path, self.first)
        self._file: TextIO = self._stack.enter_context(open(path, "a", encoding="utf-8"))
        self._board = _tensorboard(self.out, self.first) if self.config.train.tensorboard else None
        self._wandb = _wandb(self.out, self.config) if self.config.train.wandb else None
        if self._board is not None:
            self._stack.callback(self._board.close)
        if self._wandb is not None:
            self._stack.callback(self._wandb.finish)
        show = _bar if sys.stderr.isatty() else _lines
        self._show = show(self._stack, self.first, self.config.train.steps)
        self._since = time.monotonic()
        if self.first < self.config.train.steps:
            init = {} if self.init is None else {"init": self.init}
            self.write({"step": self.first, "provenance": provenance(device=self.device) | init})
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def step(self, numbers: StepNumbers) -> None:
        """Take in one step; every `log_every` steps a line is written."""
        self.steps.append(numbers)
        written = numbers.step % self.config.train.log_every == 0
        if written:
            self.write(_mean(self.steps) | {"steps_per_second": self._rate()})
            self.steps = []
        self._show(numbers, written)

    def write(self, row: Row) -> None:
        """Write a line with whatever was measured at its "step"."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        scalars = {name: value for name, value in row.items() if isinstance(value, (int, float))}
        for level in row.get("levels", []):
            for name, value in level.items():
                if name != "sigma" and value is not None:
                    scalars[f"{name} by level/sigma {level['sigma']:.3g}"] = value
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, row["step"])
        if self._wandb is not None:
            self._wandb.log(scalars, step=row["step"])

    def images(self, images: Tensor, step: int) -> None:
        """Show samples (N, C, H, W) in [0, 1] in TensorBoard and in Weights & Biases."""
        if self._board is not None:
            self._board.add_images("samples", images.clamp(0, 1), step)
        if self._wandb is not None:
            from wandb import Image

            pixels = (255 * images.clamp(0, 1)).round().to("cpu", torch.uint8).permute(0, 2, 3, 1)
            self._wandb.log({"samples": [Image(each.squeeze(-1).numpy()) for each in pixels]}, step=step)

    def _rate(self) -> float:
        now = time.monotonic()
        rate = len(self.steps) / max(now - self._since, 1e-9)
        self._since = now
        return rate


def cut_back(path: Path, step: int) -> None:
    """Remove the lines of a log that come after a step, and a last line that was cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n") or json.loads(line)["step"] > step:
            break
        kept.append(line)
    part = path.with_name(f".{path.name}.part")
    part.write_text("".join(kept), encoding="utf-8")
    part.replace(path)


def _mean(steps: list[StepNumbers]) -> Row:
    """The means over steps; the rms over penalised samples for the asymmetry."""
    qc = [item.qc for item in steps if item.qc is not None]
    levels = []
    for parts in zip(*(item.levels for item in steps), strict=True):
        samples, penalised = (sum(getattr(p, name) for p in parts) for name in ("samples", "penalised"))
        sm = sum(p.score_matching for p in parts)
        nats2 = sum(p.nats2 for p in parts) / penalised if penalised else None
        levels.append(
            {
                "sigma": parts[0].sigma,
                "score_matching": sm / samples if samples else None,
                "asymmetry_nats": None if nats2 is None or nats2 < 0 else math.sqrt(nats2),
            }
        )
    return {
        "step": steps[-1].step,
        "loss": sum(item.loss for item in steps) / len(steps),
        "score_matching": sum(item.score_matching for item in steps) / len(steps),
        "qc": sum(qc) / len(qc) if qc else None,
        "grad_norm": sum(item.grad_norm for item in steps) / len(steps),
        "lr": steps[-1].lr,
        "levels": levels,
    }


def _tensorboard(out: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)


def _wandb(out: Path, config: RunConfig) -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ValueError("train.wandb: expected the package wandb; pip install 'curlfree[wandb]'") from error
    name = out / "wandb.id"  # of the run there, so that each start goes on with the same one
    if not name.exists():
        write_bytes(name, uuid.uuid4().hex.encode())
    return wandb.init(
        project="curlfree",
        id=name.read_text(encoding="utf-8"),
        name=out.name,
        dir=out,
        config=encode(config),
        resume="allow",
        allow_val_change=True,  # the number of steps, for instance
    )


Show = Callable[[StepNumbers, bool], None]


def _text(numbers: StepNumbers) -> str:
    qc = "" if numbers.qc is None else f"  asymmetry {numbers.qc:.4g}"
    return f"loss {numbers.loss:.4g}{qc}"


def _bar(stack: ExitStack, first: int, total: int) -> Show:
    """A progress bar with rate and time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    progress = stack.enter_context(
        Progress(
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
        )
    )
    task = progress.add_task("", total=total, completed=first, rate="")
    started = time.monotonic()

    def show(numbers: StepNumbers, _: bool) -> None:
        rate = (numbers.step - first) / (time.monotonic() - started)
        progress.update(task, completed=numbers.step, description=_text(numbers), rate=f"{rate:.3g} steps/s")

    return show


def _lines(stack: ExitStack, first: int, total: int) -> Show:
    """A plain line whenever the log gets one, with rate and time left."""
    started = time.monotonic()

    def show(numbers: StepNumbers, written: bool) -> None:
        if written:
            rate = (numbers.step - first) / max(time.monotonic() - started, 1e-9)
            left = (total - numbers.step) / rate
            print(
                f"step {numbers.step}/{total}  {_text(numbers)}  {rate:.3g} steps/s  {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    return show
