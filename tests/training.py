"""Runs of a few steps, and their gradients, alone or as one of several processes (run as a script)."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from curlfree.build import build_data, build_field, build_process, compile_field
from curlfree.config import (
    FieldConfig,
    ObjectiveConfig,
    OptimConfig,
    PackedData,
    RunConfig,
    ToyData,
    TrainConfig,
)
from curlfree.data.packed import prepare
from curlfree.data.sources import ArrayFile
from curlfree.nets.mlp import FilmMLPConfig
from curlfree.nets.ncsnpp import NCSNppConfig
from curlfree.processes import VE
from curlfree.step import StepGradient, draw, exchange
from curlfree.workers import Workers, join

TOY = RunConfig(
    name="test",
    seed=3,
    data=ToyData(),
    process=VE(0.1, 20.0),
    field=FieldConfig(network=FilmMLPConfig(width=12, blocks=1)),
    objective=ObjectiveConfig(),
    optim=OptimConfig(lr=1e-2, warmup=3),
    train=TrainConfig(
        steps=8,
        batch_size=12,
        log_every=2,
        checkpoint_every=4,
        validation_samples=6,
        tensorboard=False,
    ),
)
QC = ObjectiveConfig(lmbda=0.3, fraction=0.5)


def pack(folder: Path, seed: int = 0) -> Path:
    """A packed file of 20 random images of 8x8 pixels for training and 6 held out, in 3 classes."""
    rng = np.random.default_rng(seed)
    arrays = {
        "x_train": rng.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8),
        "y_train": rng.integers(0, 3, 20),
        "x_test": rng.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8),
        "y_test": rng.integers(0, 3, 6),
    }
    np.savez(folder / "images.npz", **arrays)
    out = folder / "images.pack"
    prepare(ArrayFile(folder / "images.npz").open(), out, overwrite=True)
    return out


def images(path: Path, *, dropout: float = 0.0, classes: int | None = None) -> RunConfig:
    """A run with a small NCSN++ on that file."""
    network = NCSNppConfig(
        size=8, width=4, multipliers=(1, 2), blocks=1, attention=(4,), dropout=dropout, classes=classes
    )
    return replace(
        TOY,
        data=PackedData(path=str(path), flip=True),
        process=VE(0.01, 50.0),
        field=FieldConfig(network=network),
        objective=replace(QC, lmbda=1e-3),
        train=replace(TOY.train, steps=4, checkpoint_every=2, batch_size=4, validation_samples=2),
    )


def with_train(config: RunConfig, **changes: object) -> RunConfig:
    return replace(config, train=replace(config.train, **changes))


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def places(world: int = 2) -> list[dict[str, str]]:
    """The environments in which processes are workers of one run."""
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [common | {"RANK": str(rank)} for rank in range(world)]


class Forked(multiprocessing.get_context("fork").Process):
    """A function in a forked process, which spares importing torch again."""

    def __init__(
        self, target: Callable[..., object], *args: object, place: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(target=target, args=args)
        self.place = place or {}
        self.start()

    def run(self) -> None:
        os.environ.update(self.place)
        super().run()

    def poll(self) -> int | None:
        return self.exitcode


def gradients(config: RunConfig, workers: Workers, step: int = 5) -> dict[str, Tensor]:
    """The gradient of one step at the initial weights."""
    data = build_data(config, workers.device, workers.rank, workers.world)
    field = build_field(config).train()
    if config.train.compile:
        compile_field(config, field, backend="eager")  # the compiler proper: tests/test_fast.py
    (batch,) = data.batches.run(step, step + 1)
    StepGradient(config, field, workers)(draw(config, build_process(config), batch, step, workers), step)
    if torch.distributed.is_initialized():
        exchange(field, workers)
    return {name: p.grad for name, p in field.named_parameters() if p.grad is not None}


def shared_cases(path: Path) -> dict[str, RunConfig]:
    """What two processes are compared with one on."""
    single, double = (with_train(images(path), precision=name) for name in ("float32", "float64"))
    toy = with_train(replace(TOY, objective=replace(QC, form="double")), precision="float64")
    return {
        "qc float32": single,
        "u float32": replace(single, objective=ObjectiveConfig()),
        "qc float64": double,
        "u float64": replace(double, objective=ObjectiveConfig()),
        "qc with one penalised sample, float64": replace(double, objective=replace(QC, fraction=0.25)),
        "qc accumulated, float64": with_train(toy, accumulate=3),
        "c float64": replace(toy, objective=ObjectiveConfig(), field=replace(TOY.field, form="energy")),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join("cpu") as place:
        for name, case in shared_cases(Path(sys.argv[1])).items():
            found = gradients(case, place)
            if place.leads:
                save_file(found, os.path.join(sys.argv[2], f"{name}.safetensors"))
