"""What the benchmarks measure on: images from files, networks from weights."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from curlfree.data.loading import to_unit
from curlfree.data.packed import open_packed
from curlfree.nets.ncsnpp import PRESETS, NCSNpp, NCSNppConfig

SHARD = 15 * 2**20


def read_images(path: str, split: str, size: int) -> np.ndarray:
    """Images, uint8 (N, H, W, C), from a packed set, an array file, or a picture that is a grid of images."""
    match Path(path).suffix:
        case ".npz":
            return np.load(path)[split]
        case ".npy":
            return np.load(path)
        case ".webp" | ".png":
            from PIL import Image

            Image.MAX_IMAGE_PIXELS = None
            with Image.open(path) as picture:
                grid = np.asarray(picture.convert("RGB"))
            rows, columns = grid.shape[0] // size, grid.shape[1] // size
            tiles = grid.reshape(rows, size, columns, size, 3).swapaxes(1, 2)
            return tiles.reshape(-1, size, size, 3)
        case _:
            return open_packed(path).split(split)[0]


def load_images(
    paths: Sequence[str], config: NCSNppConfig, split: str, n: int | None = None, device: str = "cpu"
) -> Tensor:
    """Images as a network takes them, (N, C, H, W) in [0, 1], the first n; uniform noise without a path."""
    shape = (config.size, config.size, config.channels)
    if not paths:
        noise = torch.randint(0, 256, (n or 512, *shape), generator=torch.Generator().manual_seed(0))
        return to_unit(noise.to(torch.uint8)).to(device)
    images = np.concatenate([read_images(path, split, config.size) for path in paths])[:n]
    if images.shape[1:] != shape:
        raise SystemExit(f"expected images of shape {shape}, found {images.shape[1:]}")
    return to_unit(torch.from_numpy(np.array(images)).to(device))


def save_state(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write tensors as files of less than `SHARD` bytes each, where no single one is larger."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        size += tensor.nbytes
        if size > SHARD and shards[-1]:
            shards.append({})
            size = tensor.nbytes
        shards[-1][name] = tensor.detach().cpu().clone().contiguous()
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for i, shard in enumerate(shards):
        save_file(shard, part / f"{i:03d}.safetensors")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def load_state(path: Path, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of all of a folder's."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {name: t for file in files for name, t in load_file(file, device=str(device)).items()}


def weights_of(state: Mapping[str, Tensor], which: str) -> dict[str, Tensor]:
    """A network's weights: "net" or "average" of a state of finetune.py, or the state if it is plain."""
    chosen = {n.removeprefix(f"{which}."): t for n, t in state.items() if n.startswith(f"{which}.")}
    return chosen or dict(state)


def load_network(preset: str, weights: Path | None, device: torch.device) -> NCSNpp:
    """A network of a preset: with given weights (averaged ones of a state), or the initial ones (seed 0)."""
    net = NCSNpp(PRESETS[preset], seed=0).to(device)
    if weights is not None:
        net.load_state_dict(weights_of(load_state(weights, device), "average"))
    return net
