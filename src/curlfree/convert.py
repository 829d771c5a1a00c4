r"""Published NCSN++ checkpoints, read without running code from them, turned into runs.

The `.pth` files of score_sde (Song et al., 2021) and of the paper's authors are pickles
``{"optimizer", "model": {"module.all_modules.N.…", "module.sigmas"}, "ema": {"decay", "num_updates",
"shadow_params": [one tensor per trained parameter, in the order of the state dict]}, "step"}``. They are
opened with torch's restricted unpickler, which builds tensors and plain containers only; NumPy numbers, which
the optimiser's state contains, are allowed through a function that builds nothing but numbers.

What is written is the folder of a run that `sample`, `evaluate`, `audit` and ``train --init`` take like any
other: `config.json`, one checkpoint with the weights of the last step and their average, and `README.md`, the
model card. The optimiser's state stays behind: its moments have no names. The folder appears complete or not
at all.
"""

import hashlib
import pickle
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curlfree import checkpoint as ckpt
from curlfree.build import build_field, event_shape
from curlfree.config import FieldConfig, PackedData, RunConfig, save_config
from curlfree.nets import PRESETS as NETWORKS
from curlfree.pieces import write_bytes
from curlfree.presets import preset as run_preset
from curlfree.processes import VE

_PUBLISHED_BUFFER = "sigmas"  # noise levels of the discrete-time models, from the largest to the smallest

# how torch's restricted unpickler fails on a foreign or a damaged file
_UNREADABLE = (
    pickle.UnpicklingError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def convert(
    source: str | Path, out: str | Path, preset: str = "ncsnpp-deep", data: str | Path = "cifar10.pack"
) -> Path:
    """Convert a published checkpoint into a run.

    Args:
        source: the `.pth` file.
        out: the folder to write; it must not exist, or be empty.
        preset: which network the weights belong to, a key of `curlfree.nets.PRESETS`.
        data: the packed file with the images that it was trained on, for evaluations; it may come later.

    Returns:
        The folder.

    Raises:
        ValueError: an unknown preset, a file that is not such a checkpoint or holds more than data, weights
            that are missing, extra, misshapen or not finite (named).
        FileExistsError: `out` is not empty.
    """
    source, out = Path(source), Path(out)
    if preset not in NETWORKS:
        raise ValueError(f"unknown preset {preset!r}; choose one of {', '.join(NETWORKS)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder; remove it or choose another one")
    published = read_checkpoint(source)
    config = replace(
        run_preset("cifar10-u"),
        name=preset,
        data=PackedData(path=str(Path(data).resolve())),
        process=_process(published, source),
        field=FieldConfig(network=NETWORKS[preset]),
    )
    _write_folder(out, config, named_weights(published, config, source))
    return out


def read_checkpoint(source: Path) -> dict[str, Any]:
    """Read a `.pth` file with the restricted unpickler.

    Raises:
        ValueError: it asks for anything but tensors, numbers and plain containers, or cannot be read.
    """
    numbers: list[Any] = [
        np.dtype,
        np.dtypes.Float64DType,
        np.dtypes.Float32DType,
        np.dtypes.Int64DType,
        (_number, "numpy.core.multiarray.scalar"),
        (_number, "numpy._core.multiarray.scalar"),
    ]
    try:
        with torch.serialization.safe_globals(numbers):
            checkpoint = torch.load(source, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error))
        raise ValueError(
            f"{source} was refused: it is damaged, or holds code and not only weights "
            f"({reason.strip().split('. ')[0]}); get the checkpoint from its authors"
        ) from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{source} must hold a dictionary, found {type(checkpoint).__name__}")
    return checkpoint


def named_weights(published: dict[str, Any], config: RunConfig, source: Path) -> ckpt.Checkpoint:
    """The weights in a `.pth` file and their average, as those of a run's network.

    Args:
        published: what the file holds (`read_checkpoint`).
        config: of the run.
        source: the file, for its checksum and for messages.

    Raises:
        ValueError: weights are missing, extra, misshapen or not finite (named), or the number of steps is.
    """
    step = published.get("step")
    if type(step) is not int or step < 0:
        raise ValueError(f"{source} must hold the number of training steps under 'step', found {step!r}")
    with torch.device("meta"):
        skeleton = build_field(config)
    model = _state_dict(published, source)
    model.pop(_PUBLISHED_BUFFER, None)
    _check(model, skeleton, f"{source} (preset {config.name})")
    averaged = model | _averaged_weights(published, list(model), skeleton, source)
    _check(averaged, skeleton, f"{source} (averaged weights, preset {config.name})")
    state = ckpt.State(step=step, data=f"of {source.name}, sha256:{_sha256(source)}")
    raw, ema = ({name: value.float() for name, value in weights.items()} for weights in (model, averaged))
    return ckpt.Checkpoint(state, raw, ema, {})


def _number(dtype: np.dtype, data: bytes) -> float | int:
    """What NumPy's pickled numbers become: Python numbers, and nothing else."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in "fiu":
        raise pickle.UnpicklingError(f"a NumPy number of type {dtype} is not allowed")
    return np.frombuffer(data, dtype, count=1)[0].item()


def _check(weights: dict[str, Tensor], skeleton: nn.Module, where: str) -> None:
    """Refuse weights that are not those of the network, or not finite."""
    ckpt.check_weights(weights, skeleton, where)
    bad = [name for name, value in weights.items() if not bool(value.isfinite().all())]
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(f"{where}: {', '.join(bad[:5])}{more} not finite; get the file again")


def _state_dict(checkpoint: dict[str, Any], source: Path) -> dict[str, Tensor]:
    model = checkpoint.get("model")
    if not isinstance(model, dict) or not all(isinstance(value, Tensor) for value in model.values()):
        raise ValueError(
            f"{source} has no state dict under 'model' (found {', '.join(map(str, checkpoint))}); "
            "a score_sde checkpoint is expected"
        )
    return {name.removeprefix("module."): value for name, value in model.items()}


def _process(published: dict[str, Any], source: Path) -> VE:
    """The noise levels that the file names, or those of the published configurations."""
    sigmas = _state_dict(published, source).get(_PUBLISHED_BUFFER)
    if sigmas is None:
        return VE()
    try:
        return VE(*(float(f"{float(sigma):.6g}") for sigma in (sigmas.min(), sigmas.max())))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{source}: 'sigmas' must hold noise levels: {error}") from error


def _averaged_weights(
    checkpoint: dict[str, Any], names: list[str], skeleton: nn.Module, source: Path
) -> dict[str, Tensor]:
    """The averaged weights by name: their list has no names, only the order of the state dict."""
    ema = checkpoint.get("ema")
    shadow = ema.get("shadow_params") if isinstance(ema, dict) else None
    if not isinstance(shadow, list) or not all(isinstance(value, Tensor) for value in shadow):
        raise ValueError(f"{source} has no averaged weights (ema/shadow_params); get a complete checkpoint")
    frozen = {name for name, p in skeleton.named_parameters() if not p.requires_grad}
    names = [name for name in names if name not in frozen]
    if len(names) != len(shadow):
        raise ValueError(
            f"{source} has {len(shadow)} averaged weights for {len(names)} trained parameters; "
            "the file is not a complete checkpoint"
        )
    return dict(zip(names, shadow, strict=True))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_folder(out: Path, config: RunConfig, checkpoint: ckpt.Checkpoint) -> None:
    """Write beside `out`, flush to the disk, and rename: the folder is complete or absent."""
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        ckpt.save(work, checkpoint)
        save_config(config, work / "config.json")
        write_bytes(work / "README.md", _card(config, checkpoint).encode())
        work.chmod(0o755)
        work.replace(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _card(config: RunConfig, checkpoint: ckpt.Checkpoint) -> str:
    """The model card."""
    state = checkpoint.state
    image = ", ".join(map(str, event_shape(config)))
    count = sum(value.numel() for value in checkpoint.model.values())
    sigma_min, sigma_max = config.process.sigma_range
    return f"""---
library_name: curlfree
tags: [score-based-model, ncsnpp, unconditional-image-generation]
---

# NCSN++, weights {state.data.split(",")[0]}

An unconditional noise-conditional score network, variance exploding, in continuous time: it estimates
grad log p(x) of images x = x0 + sigma z with x0 in [0, 1], of shape ({image}), for sigma from
{sigma_min:g} to {sigma_max:g}.

| | |
| --- | --- |
| parameters | {count:,} |
| network | {config.name} |
| training step | {state.step} |
| source | {state.data} |

```python
from curlfree.runs import load_run

net = load_run("this folder").field  # the averaged weights; weights="raw" for those of the last step
score = net(x, sigma)  # x of shape (B, {image}), sigma of shape (B,)
```

`curlfree sample`, `evaluate`, `audit` and `train --init` take this folder as a run. Its `config.json` names
the network, the noise levels and where the images for evaluations lie; how it was trained is not known here.

The weights, their licence, their training data and their limits are those of the source: state them where
you publish this folder. The network: Song et al., "Score-Based Generative Modeling through Stochastic
Differential Equations", ICLR 2021 (arXiv 2011.13456). The penalty of quasi-conservative models: Chao et al.,
"On Investigating the Conservative Property of Score-Based Generative Models", ICML 2023 (arXiv 2209.12753).
"""
