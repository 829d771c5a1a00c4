r"""Reading the pickled batches of CIFAR and ImageNet-32x32 without trusting them.

A pickle is a program that may call anything it can name. This reader lets it name five things only, and
none of them is the real one: stand-ins rebuild numeric arrays from their raw bytes with `numpy.frombuffer`,
so that neither numpy's own unpickling code nor any other imported code runs. Lists, tuples, dictionaries,
numbers and strings are the pickle machine's own.
"""

import io
import pickle
import re
from typing import Any, ClassVar

import numpy as np

_MALFORMED = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    TypeError,
    ValueError,
)


class _Dtype:
    """Stands in for `numpy.dtype`: numbers and truth values only."""

    __slots__ = ("dtype",)

    def __init__(self, code: str | bytes, *_: object) -> None:
        if not re.fullmatch("[<>|=]?[biuf][1248]", _text(code)):
            raise pickle.UnpicklingError(f"an array of type {code!r} is not allowed")
        self.dtype = np.dtype(_text(code))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = _text(state[1])
        if order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"unknown byte order {order!r}")
        self.dtype = np.dtype(order + self.dtype.str[1:])


class _Array:
    """Stands in for the array that `numpy`'s `_reconstruct` would make and its state would fill."""

    __slots__ = ("array",)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        if type(dtype) is not _Dtype or type(raw) not in (bytes, str):
            raise pickle.UnpicklingError("an array must be raw bytes of a numeric type")
        data = raw if type(raw) is bytes else raw.encode("latin1")
        self.array = np.frombuffer(data, dtype.dtype).reshape(shape, order="F" if fortran else "C")


class _Reconstruct:
    """Stands in for `numpy._core.multiarray._reconstruct`; its arguments are placeholders there too."""

    def __new__(cls, *_: object) -> Any:
        return _Array()

    @staticmethod
    def __setstate__(state: object) -> None:
        raise pickle.UnpicklingError("this object takes no state")


class _Encode:
    """Stands in for `_codecs.encode`, by which Python 3 writes bytes in protocol 2."""

    def __new__(cls, text: str, encoding: str) -> Any:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"encoding {encoding!r} is not allowed")
        return text.encode("latin1")

    @staticmethod
    def __setstate__(state: object) -> None:
        raise pickle.UnpicklingError("this object takes no state")


class _RestrictedUnpickler(pickle.Unpickler):
    allowed: ClassVar[dict[tuple[str, str], type]] = {
        ("numpy.core.multiarray", "_reconstruct"): _Reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _Reconstruct,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _Encode,
    }

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image batch needs")
        return self.allowed[module, name]


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if type(value) is bytes else str(value)


def load_batch(raw: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickled batch of images, its keys as str and its arrays as numpy arrays.

    Args:
        raw: the file's content.
        where: its name, for messages.

    Returns:
        The top-level entries; strings that Python 2 wrote come back as bytes.

    Raises:
        ValueError: where the file is damaged, is no dictionary or asks for anything but arrays.
    """
    try:
        batch = _RestrictedUnpickler(io.BytesIO(raw), encoding="bytes").load()
        if type(batch) is not dict:
            raise pickle.UnpicklingError(f"expected a dictionary, found {type(batch).__name__}")
        return {_text(key): value.array if type(value) is _Array else value for key, value in batch.items()}
    except _MALFORMED as error:
        raise ValueError(f"{where}: not a pickled batch of images, refused: {error}") from error


def batch_entry(batch: dict[str, Any], key: str, where: str) -> Any:
    """The named entry of a batch.

    Raises:
        ValueError: where it is missing.
    """
    if key not in batch:
        raise ValueError(f"{where}: expected an entry {key!r}, found {sorted(batch)}")
    return batch[key]
