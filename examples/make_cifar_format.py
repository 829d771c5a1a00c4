"""Make a small data set in the official file format of CIFAR-10, for tests and for trying things out.

    python examples/make_cifar_format.py DIR --per-batch 100

writes DIR/cifar-10-batches-py with five training batches, a test batch and batches.meta: pickled dictionaries
(protocol 2, bytes keys) as in the original. The images are not CIFAR's: each class is a coloured shape on a
shaded background. Read them with `curlfree prepare` and its option --unverified.
"""

import argparse
import colorsys
import pickle
from pathlib import Path

import numpy as np

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def draw(label: int, rng: np.random.Generator) -> np.ndarray:
    """One image, uint8 (3, 32, 32): a disc (even classes) or a box (odd ones) in the class's colour."""
    rows, columns = np.mgrid[0:32, 0:32].astype(np.float64)
    slope = rng.uniform(-1, 1, 2)
    background = 0.5 + (slope[0] * (rows - 15.5) + slope[1] * (columns - 15.5)) / 80
    y, x = rng.uniform(10, 22, 2)
    radius = rng.uniform(5, 9)
    distance = np.stack([abs(rows - y), abs(columns - x)])
    inside = (np.hypot(*distance) if label % 2 == 0 else distance.max(0)) < radius
    colour = np.array(colorsys.hsv_to_rgb(label / 10, 0.8, 0.9))
    image = np.where(inside, colour[:, None, None], background)
    return (255 * np.clip(image + 0.02 * rng.standard_normal(image.shape), 0, 1)).round().astype(np.uint8)


def write_cifar10(folder: Path, per_batch: int, seed: int = 0) -> Path:
    """Write the seven files and return their folder, cifar-10-batches-py."""
    rng = np.random.default_rng(seed)
    target = Path(folder) / "cifar-10-batches-py"
    target.mkdir(parents=True, exist_ok=True)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for name in names:
        labels = rng.permutation(np.arange(per_batch) % 10).tolist()
        batch = {
            b"batch_label": name.replace("_", " ").encode(),
            b"labels": labels,
            b"data": np.stack([draw(label, rng).ravel() for label in labels]),
            b"filenames": [f"{CLASSES[label]}_{i:06d}.png".encode() for i, label in enumerate(labels)],
        }
        (target / name).write_bytes(pickle.dumps(batch, protocol=2))
    meta = {
        b"num_cases_per_batch": per_batch,
        b"label_names": [c.encode() for c in CLASSES],
        b"num_vis": 3072,
    }
    (target / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to make the folder cifar-10-batches-py")
    parser.add_argument("--per-batch", type=int, default=100, help="images in each of the six batches")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(write_cifar10(options.folder, options.per_batch, options.seed))
