"""Molecular force data in the format of revised MD17, for users of conservative force fields.

rMD17 (Christensen and von Lilienfeld 2020, arXiv:2007.09593; CC0) holds ten molecules with 100,000 frames
each, energies and forces at the PBE/def2-SVP level; its authors advise training on at most 1,000 of them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from curlfree.data.parts import load_npz


@dataclass(frozen=True)
class ForceData:
    """Frames of one molecule.

    Args:
        coordinates: angstrom, float64 (N, atoms, 3).
        forces: kcal/mol/angstrom, float64 (N, atoms, 3).
        energies: kcal/mol, float64 (N,).
        charges: atomic numbers, int64 (atoms,).
    """

    coordinates: Tensor
    forces: Tensor
    energies: Tensor
    charges: Tensor


def read_rmd17(path: str | Path) -> ForceData:
    """Read an rMD17 ``.npz`` file (entries coords, forces, energies, nuclear_charges).

    Args:
        path: for instance ``rmd17_ethanol.npz``.

    Returns:
        Its frames as tensors.

    Raises:
        ValueError: where the file is damaged, an entry is missing or misshapen, or a value is not finite.
    """
    entries = load_npz(path)
    wanted = ("coords", "forces", "energies", "nuclear_charges")
    missing = [name for name in wanted if name not in entries]
    if missing:
        raise ValueError(f"{path}: expected the entries {list(wanted)}, missing {missing}")
    coords, forces, energies, charges = (entries[name] for name in wanted)
    if coords.ndim != 3 or coords.shape[0] == 0 or coords.shape[2] != 3:
        raise ValueError(f"{path}: coords must have shape (frames, atoms, 3), found {coords.shape}")
    frames, atoms, _ = coords.shape
    shapes = {"forces": (frames, atoms, 3), "energies": (frames,), "nuclear_charges": (atoms,)}
    for name, shape in shapes.items():
        if entries[name].shape != shape:
            raise ValueError(f"{path}: {name} must have shape {shape}, found {entries[name].shape}")
    for name in wanted:
        if entries[name].dtype.kind not in "iuf" or not np.isfinite(entries[name]).all():
            raise ValueError(f"{path}: {name} must hold finite numbers, found {entries[name].dtype}")
    if charges.min() < 1 or (charges != charges.astype(np.int64)).any():
        raise ValueError(f"{path}: nuclear_charges must be atomic numbers, found {charges.tolist()}")
    return ForceData(
        coordinates=torch.tensor(coords, dtype=torch.float64),
        forces=torch.tensor(forces, dtype=torch.float64),
        energies=torch.tensor(energies, dtype=torch.float64),
        charges=torch.tensor(charges.astype(np.int64)),
    )
