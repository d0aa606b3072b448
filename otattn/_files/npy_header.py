"""The header of an ``.npy`` file, read by its grammar: nothing in it is evaluated, and no memory is taken for it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Header", "Refused", "read_header"]

MAGIC = b"\x93NUMPY"
MAX_HEADER = 10_000
"""Most bytes of a header that is read; numpy's own limit."""
MAX_NDIM = 32

_SPACE = " \t\n"
_ENTRY = re.compile(
    r"[ \t]*(?:'descr'[ \t]*:[ \t]*(?P<descr>'[^'\\]{1,24}'|\[)|'fortran_order'[ \t]*:[ \t]*(?P<order>True|False)"
    r"|'shape'[ \t]*:[ \t]*\((?P<shape>[0-9, \tL]*)\))[ \t]*(?:,|(?=\})|(?<=\[))"
)
_TYPE = re.compile(r"[<>=|]?([biufcmMOSUV])\d{0,9}(\[\w+\])?|[<>=|]?\?")


class Refused(ValueError):
    """A refusal that already says everything; passed on as it is."""


@dataclass(frozen=True)
class Header:
    """Shape, order and type of a stored array."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]

    @property
    def count(self) -> int:
        """Number of entries, an exact integer."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.count * self.dtype.itemsize

    @property
    def working_bytes(self) -> int:
        """Bytes that the array takes here: every number becomes float64."""
        return self.count * max(self.dtype.itemsize, 8)

    def outline(self) -> NDArray[Any]:
        """An array of this shape and type without its data, all entries one zero."""
        return np.broadcast_to(np.zeros((), dtype=self.dtype), self.shape)


def read_header(stream: IO[bytes], name: str) -> Header:
    """The header at the start of ``stream``, which is left at the data.

    Raises
    ------
    Refused
        No header of format 1.0 or 2.0 with the type and the shape of one plain array.
    """
    start = stream.read(8)
    if start[:6] != MAGIC or len(start) < 8:
        raise Refused(
            f"{name} must be an array in npy format, received {start[:6]!r} at its start; save it with numpy."
        )
    version = start[6], start[7]
    if version not in ((1, 0), (2, 0)):
        raise Refused(f"{name} must be in npy format 1.0 or 2.0, received {version}; save it with a current numpy.")
    width = 2 if version == (1, 0) else 4
    size = int.from_bytes(stream.read(width), "little")
    if size > MAX_HEADER:
        raise Refused(f"{name} must have a header of at most {MAX_HEADER} bytes, received {size}; the file is damaged.")
    text = stream.read(size).decode("latin-1")
    if len(text) != size:
        raise Refused(f"{name} must have a header of {size} bytes, received {len(text)}; the file is cut off.")
    return _parsed(text, name)


def _parsed(text: str, name: str) -> Header:
    """``{'descr': '<f8', 'fortran_order': False, 'shape': (3, 4), }``, its keys in any order."""
    body = text.strip(_SPACE).replace('"', "'")
    found: dict[str, str] = {}
    at, entries = 1, 0
    while body.startswith("{") and (entry := _ENTRY.match(body, at)) is not None:
        found |= {key: value for key, value in entry.groupdict().items() if value is not None}
        at, entries = entry.end(), entries + 1
        if entry["descr"] == "[":
            raise Refused(f"{name} must be an array of numbers, received records with named fields; save each alone.")
    if set(found) != {"descr", "order", "shape"} or entries != 3 or body[at:].strip(_SPACE) != "}":
        raise Refused(
            f"{name} must have a header with descr, fortran_order and shape, received {_shown(body)}; it is damaged."
        )
    return Header(_shape(found["shape"], name), found["order"] == "True", _dtype(found["descr"][1:-1], name))


def _shape(text: str, name: str) -> tuple[int, ...]:
    sizes = [part.strip(_SPACE).removesuffix("L") for part in text.split(",")]
    if sizes[-1] == "":
        sizes.pop()
    if len(sizes) > MAX_NDIM or any(not (part.isascii() and part.isdigit()) or len(part) > 19 for part in sizes):
        raise Refused(f"{name} must have a shape of at most {MAX_NDIM} whole numbers, received ({_shown(text)}).")
    return tuple(int(part) for part in sizes)


def _dtype(text: str, name: str) -> np.dtype[Any]:
    known = _TYPE.fullmatch(text)
    if known is not None and known[1] == "O":
        raise Refused(f"{name} must be an array of numbers, received pickled objects, which are never loaded.")
    try:
        dtype = np.dtype(text) if known is not None else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.itemsize == 0:
        raise Refused(f"{name} must be an array of numbers, received dtype {_shown(text)}; save it as float64.")
    return dtype


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
