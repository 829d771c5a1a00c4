"""Data: readers of image sets, the packed file, batches, and molecular force data.

A reader (`Cifar10`, `Svhn`, `ImageFolder`, ...) describes a data set and opens it as a `Source`; `prepare`
packs any source into one file; `open_packed` maps that file; `Batches` makes training batches of it.
Everything beyond torch and numpy (Pillow, SciPy, datasets, rich) is imported only where it is needed.
"""

from curlfree.data.loading import Batch, Batches, to_unit
from curlfree.data.packed import Packed, open_packed, prepare
from curlfree.data.rmd17 import ForceData, read_rmd17
from curlfree.data.sources import (
    AnySource,
    ArrayFile,
    Cifar10,
    Cifar100,
    HuggingFace,
    ImageFolder,
    ImageNet32Batches,
    ImageNet32Pngs,
    Svhn,
)

__all__ = [
    "AnySource",
    "ArrayFile",
    "Batch",
    "Batches",
    "Cifar10",
    "Cifar100",
    "ForceData",
    "HuggingFace",
    "ImageFolder",
    "ImageNet32Batches",
    "ImageNet32Pngs",
    "Packed",
    "Svhn",
    "open_packed",
    "prepare",
    "read_rmd17",
    "to_unit",
]
