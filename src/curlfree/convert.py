r"""Published NCSN++ checkpoints, read without running code from them, written as safetensors.

The `.pth` files of score_sde (Song et al., 2021) and of the paper's authors are pickles
``{"optimizer", "model": {"module.all_modules.N.…", "module.sigmas"}, "ema": {"decay", "num_updates",
"shadow_params": [one tensor per trained parameter, in the order of the state dict]}, "step"}``. They are
opened with torch's restricted unpickler, which builds tensors and plain containers only; NumPy numbers, which
the optimiser's state contains, are allowed through a function that builds nothing but numbers.

A converted network is a folder: `model.safetensors`, `config.json` (the network's shape and where its weights
came from) and `README.md` (the model card). It appears under its name complete or not at all.
"""

import hashlib
import json
import os
import pickle
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from curlfree.nets import PRESETS, NCSNpp, NCSNppConfig

_FORMAT = "curlfree-ncsnpp-1"
_PUBLISHED_BUFFER = "sigmas"  # noise levels of the discrete-time models; the continuous network ignores it

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


def convert(source: str | Path, out: str | Path, preset: str = "ncsnpp-deep", weights: str = "ema") -> Path:
    """Convert a published checkpoint.

    Args:
        source: the `.pth` file.
        out: the folder to write; it must not exist, or be empty.
        preset: which network the weights belong to, a key of `curlfree.nets.PRESETS`.
        weights: "ema" for the averaged weights (the paper's samples and FID), "raw" for those of the last
            step (the paper's likelihoods and asymmetries).

    Returns:
        The folder.

    Raises:
        ValueError: an unknown preset or kind of weights, a file that is not such a checkpoint or holds more
            than data, or weights that are missing, extra, misshapen or not finite (named).
        FileExistsError: `out` is not empty.
    """
    source, out = Path(source), Path(out)
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; choose one of {', '.join(PRESETS)}")
    if weights not in ("ema", "raw"):
        raise ValueError(f"weights must be 'ema' or 'raw', got {weights!r}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder; remove it or choose another one")
    checkpoint = read_checkpoint(source)
    state = _raw_weights(checkpoint, source)
    check_weights(state, PRESETS[preset], f"{source} (preset {preset})")
    if weights == "ema":
        state |= _averaged_weights(checkpoint, state, preset, source)
        check_weights(state, PRESETS[preset], f"{source} (averaged weights, preset {preset})")
    description = {
        "format": _FORMAT,
        "config": asdict(PRESETS[preset]),
        "source": source.name,
        "source_sha256": _sha256(source),
        "weights": weights,
        "step": checkpoint.get("step"),
    }
    _write_folder(out, {name: value.float().contiguous() for name, value in state.items()}, description)
    return out


def load_ncsnpp(folder: str | Path) -> NCSNpp:
    """Load a converted network, on the CPU, in evaluation mode.

    Args:
        folder: what `convert` wrote.

    Raises:
        ValueError: the folder is incomplete or damaged.
    """
    folder = Path(folder)
    try:
        description = json.loads((folder / "config.json").read_text())
        fields = description["config"] if description["format"] == _FORMAT else None
        state = load_file(folder / "model.safetensors")
    except (OSError, KeyError, TypeError, json.JSONDecodeError, SafetensorError) as error:
        raise ValueError(
            f"{folder} is not a network written by `curlfree convert` ({error}); convert it again"
        ) from error
    if fields is None:
        raise ValueError(f"{folder} has format {description['format']!r}, this version reads {_FORMAT!r}")
    lists = {name: tuple(fields[name]) for name in ("multipliers", "attention")}
    config = NCSNppConfig(**(fields | lists))
    check_weights(state, config, str(folder))
    net = NCSNpp(config)
    net.load_state_dict(state)
    return net.eval()


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


def check_weights(state: dict[str, Tensor], config: NCSNppConfig, origin: str) -> None:
    """Refuse weights that are not those of the network with this configuration.

    Raises:
        ValueError: missing, extra, misshapen or non-finite weights, by name.
    """
    expected = {name: tuple(value.shape) for name, value in _skeleton(config).state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not part of this network" for name in found if name not in expected]
    problems += [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if not problems:
        problems = [f"{n} is not finite" for n, value in state.items() if not bool(value.isfinite().all())]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{origin} does not fit: {'; '.join(problems[:5])}{more}")


def _number(dtype: np.dtype, data: bytes) -> float | int:
    """What NumPy's pickled numbers become: Python numbers, and nothing else."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in "fiu":
        raise pickle.UnpicklingError(f"a NumPy number of type {dtype} is not allowed")
    return np.frombuffer(data, dtype, count=1)[0].item()


def _skeleton(config: NCSNppConfig) -> NCSNpp:
    """The network's names and shapes, without memory for its weights."""
    with torch.device("meta"):
        net = NCSNpp(config)
    return net


def _raw_weights(checkpoint: dict[str, Any], source: Path) -> dict[str, Tensor]:
    model = checkpoint.get("model")
    if not isinstance(model, dict) or not all(isinstance(value, Tensor) for value in model.values()):
        raise ValueError(
            f"{source} has no state dict under 'model' (found {', '.join(map(str, checkpoint))}); "
            "a score_sde checkpoint is expected"
        )
    state = {name.removeprefix("module."): value for name, value in model.items()}
    state.pop(_PUBLISHED_BUFFER, None)
    return state


def _averaged_weights(
    checkpoint: dict[str, Any], state: dict[str, Tensor], preset: str, source: Path
) -> dict[str, Tensor]:
    """The averaged weights by name: their list has no names, only the order of the state dict."""
    ema = checkpoint.get("ema")
    shadow = ema.get("shadow_params") if isinstance(ema, dict) else None
    if not isinstance(shadow, list) or not all(isinstance(value, Tensor) for value in shadow):
        raise ValueError(f"{source} has no averaged weights (ema/shadow_params); use weights='raw'")
    frozen = {name for name, p in _skeleton(PRESETS[preset]).named_parameters() if not p.requires_grad}
    names = [name for name in state if name not in frozen]
    if len(names) != len(shadow):
        raise ValueError(
            f"{source} has {len(shadow)} averaged weights for {len(names)} trained parameters; "
            "the file is not a complete checkpoint"
        )
    return dict(zip(names, shadow, strict=True))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_folder(out: Path, state: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write beside `out`, flush to the disk, and rename: the folder is complete or absent."""
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        save_file(state, work / "model.safetensors", metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(description, indent=2) + "\n")
        count = sum(value.numel() for value in state.values())
        (work / "README.md").write_text(_model_card(description, count))
        for path in work.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        work.chmod(0o755)
        work.replace(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _model_card(description: dict[str, Any], count: int) -> str:
    config = description["config"]
    image = f"{config['channels']}, {config['size']}, {config['size']}"
    return f"""---
library_name: curlfree
tags: [score-based-model, ncsnpp, unconditional-image-generation]
---

# NCSN++ converted from `{description["source"]}`

An unconditional noise-conditional score network, variance exploding, in continuous time: it estimates
grad log p(x) of images x = x0 + sigma z with x0 in [0, 1], of shape ({image}).

| | |
| --- | --- |
| parameters | {count:,} |
| weights | {description["weights"]} |
| training step | {description["step"]} |
| sha256 of the source | `{description["source_sha256"]}` |

```python
from curlfree.convert import load_ncsnpp

net = load_ncsnpp("this folder")
score = net(x, sigma)  # x of shape (B, {image}), sigma of shape (B,)
```

The weights, their licence, their training data and their limits are those of the source: state them where
you publish this folder. The network: Song et al., "Score-Based Generative Modeling through Stochastic
Differential Equations", ICLR 2021 (arXiv 2011.13456). The penalty of quasi-conservative models: Chao et al.,
"On Investigating the Conservative Property of Score-Based Generative Models", ICML 2023 (arXiv 2209.12753).
"""
