"""GGUF files: the header, and tensors dequantised by the ``gguf`` package.

That package's own reader walks through every string of the vocabulary in Python, which takes seconds; the header is read
here instead (bounded, lists skipped until they are asked for), and the package turns quantised blocks into numbers.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.models._extra import need
from otattn.models.checkpoint import FileCheckpoint

__all__ = ["GGUFCheckpoint"]

MAX_COUNT = 1 << 20
MAX_STRING = 1 << 24
MAX_DIMS = 4
# codes of value types: struct format of scalars; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Reader:
    """A position in the file; every step is checked against its end."""

    def __init__(self, data: mmap.mmap, name: str, position: int = 0) -> None:
        self.data, self.name, self.at = data, name, position

    def skip(self, size: int) -> int:
        start = self.at
        if size < 0 or start + size > len(self.data):
            raise ValueError(
                f"{self.name} must hold {size} bytes at {start}, but ends at {len(self.data)}; it is cut off."
            )
        self.at += size
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.skip(struct.calcsize("<" + code)))[0]

    def count(self, what: str, most: int) -> int:
        value = int(self.scalar("Q"))
        if value > most:
            raise ValueError(f"{self.name} must hold at most {most} {what}, received {value}; it is damaged.")
        return value

    def string(self) -> str:
        size = self.count("bytes in a string", MAX_STRING)
        start = self.skip(size)
        return self.data[start : start + size].decode("utf-8", errors="replace")


class GGUFCheckpoint(FileCheckpoint):
    """The tensors and the metadata of a ``.gguf`` file (version 2 or 3, little endian).

    Attributes
    ----------
    metadata : dict
        Scalars and strings by key; lists are read by :meth:`items`.

    Raises
    ------
    FileNotFoundError
    ValueError
        Damaged or of another format.
    ImportError
        On the first tensor, when the extra ``models`` is not installed.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path)
        if self.path.stat().st_size == 0:  # which cannot be mapped
            raise ValueError(f"{path} must be a .gguf file, received an empty one; copy it again.")
        with open(self.path, "rb") as stream:
            self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        read = _Reader(self._data, self.origin)
        if self._data[read.skip(4) : 4] != b"GGUF":
            raise ValueError(f"{path} must be a .gguf file, received something else; name another file.")
        version = read.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{path} must be in GGUF version 2 or 3, received {version}; convert it anew.")
        tensors, keys = read.count("tensors", MAX_COUNT), read.count("metadata keys", MAX_COUNT)
        self.metadata: dict[str, Any] = {}
        self._lists: dict[str, tuple[int, int, int]] = {}
        for _ in range(keys):
            key, kind = read.string(), read.scalar("I")
            if key in self.metadata or key in self._lists:
                raise ValueError(f"{path} must name each metadata key once, received {key!r} twice; it is damaged.")
            if kind == _ARRAY:
                self._skip_list(key, read)
            else:
                self.metadata[key] = self._value(kind, read)
        infos = [self._info(read) for _ in range(tensors)]
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= 1 << 20:
            raise ValueError(f"general.alignment in {path} must be a small positive integer, received {align!r}.")
        base = -(-read.at // align) * align
        self._entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for name, shape, kind, offset in infos:
            if name in self._entries:
                raise ValueError(f"{path} must name each tensor once, received {name!r} twice; it is damaged.")
            self._entries[name] = (shape, kind, base + offset)
        self._shapes = {name: entry[0] for name, entry in self._entries.items()}

    def _value(self, kind: int, read: _Reader) -> Any:
        if kind == _STRING:
            return read.string()
        if kind not in _SCALARS:
            raise ValueError(f"{self.path} must hold known metadata types, received code {kind}; it is damaged.")
        return read.scalar(_SCALARS[kind])

    def _skip_list(self, key: str, read: _Reader) -> None:
        kind, size = read.scalar("I"), read.count("entries in a list", 64 * MAX_COUNT)
        self._lists[key] = (kind, size, read.at)
        if kind == _STRING:
            for _ in range(size):
                read.skip(read.count("bytes in a string", MAX_STRING))
        elif kind in _SCALARS:
            read.skip(size * struct.calcsize("<" + _SCALARS[kind]))
        else:
            raise ValueError(f"{self.path} must hold lists of scalars or strings, received code {kind} for {key!r}.")

    def _info(self, read: _Reader) -> tuple[str, tuple[int, ...], int, int]:
        name = read.string()
        dims = int(read.scalar("I"))
        if not 1 <= dims <= MAX_DIMS:
            raise ValueError(
                f"{name!r} in {self.path} must have 1 to {MAX_DIMS} dimensions, received {dims}; it is damaged."
            )
        shape = tuple(read.count("entries in a row", 1 << 40) for _ in range(dims))[::-1]
        return name, shape, int(read.scalar("I")), int(read.scalar("Q"))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def items(self, key: str) -> list[Any]:
        """A list of the metadata, such as the tokens of the vocabulary."""
        if key not in self._lists:
            raise ValueError(f"{self.path} must hold the list {key!r}, received {sorted(self._lists)}; another file?")
        kind, size, at = self._lists[key]
        read = _Reader(self._data, self.origin, at)
        return [self._value(kind, read) for _ in range(size)]

    def quantisation(self, name: str) -> str:
        """The type in which a tensor is stored, for instance "Q4_1"."""
        return str(need("gguf").GGMLQuantizationType(self._entries[name][1]).name)

    def _read(self, name: str, rows: NDArray[np.int64] | None) -> NDArray[Any]:
        gguf, quants = need("gguf"), need("gguf.quants")
        shape, code, start = self._entries[name]
        try:
            kind = gguf.GGMLQuantizationType(code)
            block, size = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as exc:
            raise ValueError(f"{name} in {self.path} must be of a known type, received code {code}.") from exc
        if shape[-1] % block:
            raise ValueError(f"rows of {name} in {self.path} must be multiples of {block}, received {shape}; damaged.")
        width = shape[-1] // block * size
        count = math.prod(shape[:-1])
        if start + count * width > len(self._data):
            raise ValueError(f"{name} must lie in {self.path}, but reaches beyond its end; the file is cut off.")
        raw = np.frombuffer(self._data, dtype=np.uint8, count=count * width, offset=start).reshape(count, width)
        if rows is not None:
            raw, shape = raw[rows], (len(rows), *shape[1:])
        try:
            return np.asarray(quants.dequantize(raw, kind)).reshape(shape)
        except NotImplementedError as exc:
            raise ValueError(f"{name} in {self.path} is of type {kind.name}, which gguf cannot dequantise.") from exc
