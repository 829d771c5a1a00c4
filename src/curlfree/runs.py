"""Finished or running training runs: a folder, opened as a field that can be sampled and measured.

A run's folder holds `config.json` (resolved), `log.jsonl`, the checkpoints and what was measured later.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from curlfree import checkpoint as ckpt
from curlfree.build import build_field, build_process
from curlfree.config import RunConfig, load_config
from curlfree.processes import Process

Weights = Literal["ema", "raw"]


@dataclass(frozen=True)
class Run:
    """A trained field and what it was trained with.

    Args:
        folder: of the run.
        config: of the run.
        process: its noise levels.
        field: the trained field, in evaluation mode, without gradients to its weights.
        step: of the checkpoint that the weights come from.
        weights: "ema" or "raw".
    """

    folder: Path
    config: RunConfig
    process: Process
    field: nn.Module
    step: int
    weights: Weights


def load_run(
    folder: str | Path,
    *,
    weights: Weights = "ema",
    step: int | None = None,
    device: torch.device | str = "cpu",
) -> Run:
    """Open a run.

    Args:
        folder: of the run.
        weights: the moving average of the weights, or the raw weights.
        step: of the checkpoint; None takes the newest intact one, with a warning about damaged ones.
        device: where the field is wanted.

    Returns:
        The run with its field.

    Raises:
        FileNotFoundError: there is no run in the folder, or no checkpoint (at that step).
        ValueError: the configuration or the checkpoint is damaged, or the weights do not fit the network.
    """
    folder = Path(folder)
    if weights not in ("ema", "raw"):
        raise ValueError(f"weights: expected 'ema' or 'raw', found {weights!r}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no run here (no config.json); make one with `curlfree train`")
    config = load_config(folder / "config.json")
    path = ckpt.newest(folder, warnings.warn) if step is None else ckpt.path_of(folder, step)
    if path is None:
        raise FileNotFoundError(f"{folder}: no checkpoint yet; continue the run with `curlfree train`")
    tensors = ckpt.load_weights(path, ema=weights == "ema")
    field = build_field(config)
    ckpt.put(field, tensors, path)
    field = field.to(device).eval().requires_grad_(False)
    return Run(folder, config, build_process(config), field, ckpt.step_of(path), weights)
