"""All readers. Each is a description of where a data set lies; its `open` checks that and gives a `Source`.

A command-line parser turns `AnySource` into one subcommand for each reader, with that reader's options only.
"""

from curlfree.data.cifar import Cifar10, Cifar100
from curlfree.data.imagenet32 import ImageNet32Batches, ImageNet32Pngs
from curlfree.data.images import ArrayFile, HuggingFace, ImageFolder
from curlfree.data.svhn import Svhn

AnySource = (
    Cifar10 | Cifar100 | Svhn | ImageNet32Batches | ImageNet32Pngs | HuggingFace | ImageFolder | ArrayFile
)

__all__ = [
    "AnySource",
    "ArrayFile",
    "Cifar10",
    "Cifar100",
    "HuggingFace",
    "ImageFolder",
    "ImageNet32Batches",
    "ImageNet32Pngs",
    "Svhn",
]
