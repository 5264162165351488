"""Pickles that hold dicts, lists, numbers, text and NumPy arrays, read without executing anything.

A pickle is a program: it may name any function and have it called. Here a name leads to one of four stand-ins, which
only take down what they are given, or to an error; no function of NumPy or of any other package is ever called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedfa.data.sources.reading import Broken


class _Dtype:
    """Takes the place of numpy.dtype(text, …)."""

    def __init__(self, text: Any = "", *_: Any) -> None:
        self.text = text.decode("latin1") if isinstance(text, bytes) else text

    def __setstate__(self, state: Any) -> None:
        """Byte order, fields and flags: of single bytes, there is nothing to know."""


class _Array:
    """Takes the place of an array that is being put together."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Ndarray:
    """Takes the place of the class numpy.ndarray, which is an argument only."""


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Bytes, which Python 3 writes as text to be encoded in old protocols."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError("asks for codecs.encode of something else than bytes")
    return text.encode("latin1")


STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Ndarray,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle._Unpickler):
    """Python's own unpickler in Python: the one in C makes room for as many entries as a pickle says it will have."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        """State is for objects that were made here, not for functions and classes."""
        if not isinstance(vars(self)["stack"][-2], _Array | _Dtype):
            raise pickle.UnpicklingError("gives a state to something that has none")
        build: Callable[[Any], None] = pickle._Unpickler.dispatch[pickle.BUILD[0]]
        build(self)

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise pickle.UnpicklingError(f"asks for {module}.{name}, which data have no need of")
        return STAND_INS[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("refers to an object outside of itself")


@dataclass(frozen=True)
class Plain:
    """A pickled dict."""

    content: dict[str, Any]

    def array(self, key: str) -> NDArray[np.uint8]:
        """The array of bytes at `key`."""
        found = self.content.get(key)
        if not isinstance(found, _Array) or not isinstance(found.state, tuple) or len(found.state) != 5:
            raise Broken(f"has no array {key!r}")
        _, shape, dtype, by_column, data = found.state
        if not isinstance(dtype, _Dtype) or dtype.text not in ("u1", "uint8", "|u1"):
            raise Broken(f"{key!r} is not an array of bytes")
        sizes = shape if isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape) else ()
        if not isinstance(data, bytes) or not sizes or len(data) != int(np.prod(sizes, dtype=object)):
            raise Broken(f"{key!r} does not hold as many bytes as it says")
        return np.frombuffer(data, np.uint8).reshape(sizes, order="F" if by_column else "C")

    def whole_numbers(self, key: str) -> NDArray[np.int64]:
        """The list of integers at `key`."""
        found = self.content.get(key)
        if not isinstance(found, list) or not all(type(n) is int and abs(n) < 2**31 for n in found):
            raise Broken(f"has no list of whole numbers {key!r}")
        return np.array(found, dtype=np.int64)


def load_plain(data: bytes) -> Plain:
    """The dict in a pickle; :class:`Broken`, in a line, where it is anything but data."""
    try:
        found = _Reader(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle raises whatever it comes upon
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Broken(f"not a pickle of plain data: {reason}") from error
    if type(found) is not dict:
        raise Broken("not a pickle of plain data: it holds no dict")
    return Plain({_text(key): value for key, value in found.items()})


def _text(key: Any) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)
