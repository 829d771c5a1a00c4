r"""Training: one loop for two-dimensional sets and images, on one process or many.

A step is in `curlfree.step`: what it draws is a function of (seed, step) alone. So nothing but the weights,
their average and Adam's moments has to be kept to continue exactly, and a run that was killed and resumed
ends with the same bits as one that was not.

A run's folder has one writer, rank 0; the others read it when they resume, so on many machines it must be on
a file system that all see. A value that is not finite ends the run before anything is saved; SIGTERM and
SIGINT end it after a checkpoint, at a step that all workers agree on.
"""

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curlfree import checkpoint as ckpt
from curlfree.build import (
    TrainingData,
    build_data,
    build_field,
    build_process,
    compile_field,
    event_shape,
)
from curlfree.checkpoint import Checkpoint, State
from curlfree.config import FREE, RunConfig, differences, load_config, save_config
from curlfree.ema import Ema
from curlfree.estimators import loop_work
from curlfree.operators import inner, per_sample
from curlfree.pieces import digest
from curlfree.processes import Process
from curlfree.runlog import RunLog
from curlfree.samplers import heun
from curlfree.seeds import stream
from curlfree.step import LEVELS, Sent, StepGradient, draw, exchange
from curlfree.workers import Workers, join

MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam


def train(config: RunConfig, out: str | Path, *, device: str = "auto") -> int:
    """Train a field; on an existing run with the same configuration, continue it.

    Args:
        config: the run.
        out: its folder, on a file system that all workers see.
        device: "auto", "cpu" or "cuda".

    Returns:
        The step that was reached: all of them, or where SIGTERM or SIGINT stopped the run after saving it.

    Raises:
        FloatingPointError: the loss or its gradient is not finite.
        ValueError: the configuration does not fit the data, the workers or the run that is in the folder.
    """
    out, config = Path(out), resolved(config)
    with ExitStack() as stack:
        workers = stack.enter_context(join(device))
        with workers.together():
            check_shares(config, workers.world)
            data = build_data(config, workers.device, workers.rank, workers.world)
            if workers.leads:
                stack.enter_context(claim(out, config))
        process, field = build_process(config), build_field(config).to(workers.device).train()
        if config.train.channels_last:
            for parameter in field.parameters():
                if parameter.ndim == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        if config.train.compile:
            compile_field(config, field)
        if workers.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        first, ema, optimizer = restore(config, out, field, data, workers)
        gradient = StepGradient(config, field, workers)
        stop = stack.enter_context(stop_signals())
        with workers.together():
            log = None
            if workers.leads:
                start = ckpt.read_origin(out)
                log = stack.enter_context(RunLog(out, config, first, workers.name, start))
        parameters = [p for p in field.parameters() if p.requires_grad]

        pending: Sent | None = None
        step, last = first, config.train.steps
        for batch in data.batches.run(first, last):
            lr = config.optim.lr * min(1.0, (step + 1) / max(1, config.optim.warmup))
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad(set_to_none=False)
            terms = gradient(draw(config, process, batch, step, workers), step)
            exchange(field, workers)
            norm = nn.utils.clip_grad_norm_(parameters, config.optim.clip)
            optimizer.step()
            step += 1
            ema.update(field, step)

            sent = Sent(config, process, step, lr, terms, norm, bool(stop), workers)
            stopped = pending.receive(log) if pending else False
            pending = sent
            if stopped or step == last or step % config.train.checkpoint_every == 0:
                stopped = pending.receive(log) or stopped
                pending = None
                if workers.leads:
                    assert log is not None
                    with eager(config):
                        keep(config, out, step, process, field, ema, optimizer, data, log)
            if stopped:
                break
        return step


def resolved(config: RunConfig) -> RunConfig:
    """With the first stage's folder as an absolute path, so that it is known in every working folder."""
    return config if config.init is None else replace(config, init=str(Path(config.init).resolve()))


def check_shares(config: RunConfig, world: int) -> None:
    """Refuse a batch that cannot be cut into equal parts for all workers and all accumulated passes.

    Raises:
        ValueError: the batch size is not a multiple of both.
    """
    parts = world * config.train.accumulate
    if config.train.batch_size % parts:
        raise ValueError(
            f"train.batch_size: expected a multiple of {world} workers x {config.train.accumulate} "
            f"accumulated parts, found {config.train.batch_size}"
        )


def eager(config: RunConfig) -> AbstractContextManager[None]:
    """Inside, compiled parts run as they are: a few batches of other shapes are not worth compiling for."""
    return torch.compiler.set_stance("force_eager") if config.train.compile else nullcontext()


@contextmanager
def claim(out: Path, config: RunConfig) -> Iterator[None]:
    """Make the folder of a run, or check that it holds the same one, and keep other processes out of it.

    Raises:
        ValueError: another run is there, or another process is training it.
    """
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{out}: another process is training this run; stop it first") from error
        path = out / "config.json"
        if path.exists():
            found = differences(resolved(load_config(path)), config)
            changed = [difference for difference in found if difference.split(":")[0] not in FREE]
            if changed:
                raise ValueError(
                    f"{out}: holds a run with another configuration ({'; '.join(changed)}); continue it with "
                    f"`curlfree train {path} --out {out}` or choose another --out"
                )
        elif ckpt.checkpoints(out):
            raise ValueError(f"{out}: has checkpoints but no config.json; choose another --out")
        save_config(config, path)
        ckpt.clean(out)
        yield


def restore(
    config: RunConfig, out: Path, field: nn.Module, data: TrainingData, workers: Workers
) -> tuple[int, Ema, torch.optim.Adam]:
    """Bring field, average and optimiser to the newest intact checkpoint, or to the beginning.

    Returns:
        The step, the moving average and the optimiser.

    Raises:
        ValueError: the run was trained on other data, or every checkpoint is damaged.
    """
    parameters = [p for p in field.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(
        parameters,
        config.optim.lr,
        config.optim.betas,
        config.optim.eps,
        fused=workers.device.type == "cuda",
    )
    path = source = None
    with workers.together():
        if workers.leads:
            path = ckpt.resume(out, warn)
            if path is None and config.init is not None:
                source = ckpt.origin(out, Path(config.init), warn)
    step, first = (workers.agree(ckpt.step_of(found) if found else -1) for found in (path, source))
    with workers.together():
        if step >= 0:
            saved = ckpt.load(ckpt.path_of(out, step))
            if saved.state.data != data.identity:
                raise ValueError(f"{out}: was trained on other data; choose another --out")
            ckpt.put(field, saved.model, out)
            optimizer.load_state_dict(adam_state(field, optimizer, saved.optimizer, step))
            average: Mapping[str, Tensor] | None = saved.ema
        elif config.init is not None:
            source = ckpt.path_of(Path(config.init), first)
            ckpt.put(field, ckpt.load_weights(source, ema=False), source)
            average = ckpt.load_weights(source, ema=True)
        else:
            average = None
        ema = Ema(field, config.optim.ema)
        if average is not None:
            ema.load(average)
    check_same_weights(field, workers)
    return max(step, 0), ema, optimizer


def check_same_weights(field: nn.Module, workers: Workers) -> None:
    """Refuse workers whose weights are not the same: they would stay apart, as only gradients are exchanged.

    Raises:
        ValueError: those of this or of another worker are not rank 0's.
    """
    if workers.world == 1:
        return
    own = int(digest(dict(field.named_parameters()))[:15], 16)
    common = workers.agree(own)
    with workers.together():
        if own != common:
            raise ValueError(
                f"worker {workers.rank} begins with other weights than worker 0; expected the same "
                "checkpoints, the same --init and the same packages on all machines"
            )


def adam_state(
    field: nn.Module, optimizer: torch.optim.Adam, moments: Mapping[str, Tensor], step: int
) -> dict[str, Any]:
    """Adam's state from its moments by name; all parameters have made the same number of steps."""
    state = {
        i: {"step": torch.tensor(float(step))}
        | {kind: torch.empty_like(p).copy_(moments[f"{name}.{kind}"]) for kind in MOMENTS}
        for i, (name, p) in enumerate((n, p) for n, p in field.named_parameters() if p.requires_grad)
    }
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def keep(
    config: RunConfig,
    out: Path,
    step: int,
    process: Process,
    field: nn.Module,
    ema: Ema,
    optimizer: torch.optim.Adam,
    data: TrainingData,
    log: RunLog,
) -> None:
    """Measure the averaged weights, save a checkpoint, delete old ones."""
    averaged = Averaged(field, ema)
    validation = None
    field.eval()
    if len(data.held_out):
        row = validate(config, process, averaged, data.held_out.to(next(field.parameters())))
        validation = row["held_out_score_matching"]
        log.write({"step": step} | row)
    if config.train.images and len(event_shape(config)) == 3:
        log.images(preview(config, process, averaged, next(field.parameters())), step)
    field.train()
    moments = {
        f"{name}.{kind}": optimizer.state[parameter][kind]
        for name, parameter in field.named_parameters()
        if parameter.requires_grad
        for kind in MOMENTS
    }
    state = State(step=step, validation=validation, data=data.identity)
    ckpt.save(out, Checkpoint(state, dict(field.named_parameters()), ema.weights, moments))
    ckpt.prune(out, config.train.keep, warn)


class Averaged:
    """A field with the averaged weights in place of its own.

    Args:
        field: the field.
        ema: the average of its weights.
    """

    def __init__(self, field: nn.Module, ema: Ema) -> None:
        self.field, self.ema = field, ema

    def __call__(self, x: Tensor, sigma: Tensor | None, /, **condition: Any) -> Tensor:
        """The field's value."""
        value: Tensor = torch.func.functional_call(self.field, self.ema.weights, (x, sigma), condition)
        return value


@torch.no_grad()
def validate(config: RunConfig, process: Process, field: Averaged, x0: Tensor) -> dict[str, Any]:
    """The held-out score-matching loss, with noise that is the same in every call, and the work by level.

    Levels are equally spaced in time. The work is the rms of `curlfree.loop_work` over up to 32 samples.
    """
    n, device = len(x0), x0.device
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    sigma = process.sigma(process.t_min + (process.t_max - process.t_min) * u).to(x0)
    z = torch.randn(x0.shape, generator=stream(config.seed, "validation", device=device), device=device).to(
        x0
    )
    losses = []
    for start in range(0, n, config.train.batch_size):
        mine = slice(start, start + config.train.batch_size)
        level = per_sample(sigma[mine], x0)
        residual = level * field(x0[mine] + level * z[mine], sigma[mine]) + z[mine]
        losses.append(0.5 * inner(residual, residual))
    loss = float(torch.cat(losses).mean())
    generator = stream(config.seed, "loops", device=device)
    levels = []
    for sigma_k in process.levels(LEVELS).tolist():
        few = x0[:32]
        work = loop_work(field, few, few.new_full((len(few),), sigma_k), generator=generator)
        levels.append({"sigma": sigma_k, "work_nats": float(work.square().mean().sqrt())})
    return {"held_out_score_matching": loss, "levels": levels}


def preview(config: RunConfig, process: Process, field: Averaged, like: Tensor) -> Tensor:
    """A few samples, from the same noise in every call."""
    shape = (config.train.images, *event_shape(config))
    x = process.prior_sample(shape, stream(config.seed, "preview", device=like.device)).to(like.dtype)
    return heun(field, x, process).x


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT in a list, so that the loop can save and end.

    A repeated SIGTERM changes nothing: the agent of torchrun passes on the one that a cluster has sent to
    every process already. A second SIGINT ends at once, except under torchrun, which passes that on, too.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, _: Any) -> None:
        received.append(number)
        if number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(number, before[signal.SIGINT])

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def warn(message: str) -> None:
    """Tell about something that does not end the run."""
    print(f"curlfree: {message}", file=sys.stderr, flush=True)
