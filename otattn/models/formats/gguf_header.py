"""The header of a GGUF file: metadata and where the tensors lie, every count and place checked against the file."""

from __future__ import annotations

import math
import mmap
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from otattn.models.files import need

__all__ = ["Entry", "GGUFHeader"]

MAX_COUNT = 1 << 20
MAX_STRING = 1 << 24
MAX_DIMS = 4
# codes of value types: struct format of scalars; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Entry(NamedTuple):
    """A tensor: its shape, the code of its type, and its bytes ``[start, start + size)``."""

    shape: tuple[int, ...]
    code: int
    start: int
    size: int


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

    def count(self, what: str, most: int, *, each: int = 0) -> int:
        """A count of things of at least ``each`` bytes."""
        value = int(self.scalar("Q"))
        if value > most:
            raise ValueError(f"{self.name} must hold at most {most} {what}, received {value}; it is damaged.")
        if value * each > len(self.data) - self.at:
            raise ValueError(f"{self.name} must hold {value} {what}, but ends at {len(self.data)}; it is cut off.")
        return value

    def string(self) -> str:
        size = self.count("bytes in a string", MAX_STRING)
        start = self.skip(size)
        raw = self.data[start : start + size]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise ValueError(
                f"{self.name} must hold strings in UTF-8, received {raw[:24]!r} at {start}; it is damaged."
            ) from exc

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise ValueError(f"{self.name} must hold known metadata types, received code {kind}; it is damaged.")
        return self.scalar(_SCALARS[kind])


class GGUFHeader:
    """Metadata and entries of one file (version 2 or 3, little endian).

    Attributes
    ----------
    data : mmap
    metadata : dict
        Scalars and strings by key; lists are read by :meth:`items`.
    entries : dict of Entry
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.stat().st_size == 0:  # which cannot be mapped
            raise ValueError(f"{path} must be a .gguf file, received an empty one; copy it again.")
        with open(path, "rb") as stream:
            self.data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        read = _Reader(self.data, str(path))
        if self.data[read.skip(4) : 4] != b"GGUF":
            raise ValueError(f"{path} must be a .gguf file, received something else; name another file.")
        version = read.scalar("I")
        if version not in (2, 3):
            kind = "a file of a big-endian machine" if version in (2 << 24, 3 << 24) else str(version)
            raise ValueError(f"{path} must be in GGUF version 2 or 3, received {kind}; convert it anew.")
        # a tensor takes at least name, dimensions, one side, type and offset; a key its name, type and a byte
        tensors = read.count("tensors", MAX_COUNT, each=32)
        keys = read.count("metadata keys", MAX_COUNT, each=13)
        self.metadata: dict[str, Any] = {}
        self.lists: dict[str, tuple[int, int, int]] = {}
        for _ in range(keys):
            self._key(read)
        infos = [self._info(read) for _ in range(tensors)]
        self.entries = self._placed(infos, read.at)

    def _key(self, read: _Reader) -> None:
        key, kind = read.string(), read.scalar("I")
        if key in self.metadata or key in self.lists:
            raise ValueError(f"{self.path} must name each metadata key once, received {key!r} twice; it is damaged.")
        if kind != _ARRAY:
            self.metadata[key] = read.value(kind)
            return
        kind, size = read.scalar("I"), read.count("entries in a list", 64 * MAX_COUNT)
        self.lists[key] = (kind, size, read.at)
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

    def _placed(self, infos: list[tuple[str, tuple[int, ...], int, int]], end: int) -> dict[str, Entry]:
        """The tensors, each aligned, inside the file and apart from the others."""
        align = self.metadata.get("general.alignment", 32)
        listed = "general.alignment" in self.lists
        if listed or isinstance(align, bool) or not isinstance(align, int) or not 1 <= align <= 1 << 20:
            raise ValueError(
                f"general.alignment in {self.path} must be a small positive integer, received "
                f"{'a list' if listed else repr(align)}."
            )
        base = -(-end // align) * align
        out: dict[str, Entry] = {}
        for name, shape, code, offset in infos:
            if name in out:
                raise ValueError(f"{self.path} must name each tensor once, received {name!r} twice; it is damaged.")
            if offset % align:
                raise ValueError(
                    f"{name} in {self.path} must start at a multiple of {align}, received {offset}; it is damaged."
                )
            entry = out[name] = Entry(shape, code, base + offset, self._bytes(name, shape, code))
            if entry.start + entry.size > len(self.data):
                raise ValueError(
                    f"{name} must lie in {self.path}, but reaches beyond its end at {len(self.data)}; the file is cut off."
                )
        order = sorted(((name, e) for name, e in out.items() if e.size), key=lambda pair: pair[1].start)
        for (first, a), (second, b) in pairwise(order):
            if a.start + a.size > b.start:
                raise ValueError(f"{first} and {second} in {self.path} must not overlap, but do; it is damaged.")
        return out

    def _bytes(self, name: str, shape: tuple[int, ...], code: int) -> int:
        gguf = need("gguf")
        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(code)]
        except (ValueError, KeyError) as exc:
            raise ValueError(f"{name} in {self.path} must be of a known type, received code {code}.") from exc
        if shape[-1] % block:
            raise ValueError(f"rows of {name} in {self.path} must be multiples of {block}, received {shape}; damaged.")
        return math.prod(shape) // block * int(size)

    def items(self, key: str) -> list[Any]:
        """A list of the metadata, such as the tokens of the vocabulary."""
        if key not in self.lists:
            raise ValueError(f"{self.path} must hold the list {key!r}, received {sorted(self.lists)}; another file?")
        kind, size, at = self.lists[key]
        read = _Reader(self.data, f"{key} in {self.path}", at)
        return [read.value(kind) for _ in range(size)]
