"""GGUF files, split ones too: tensors are dequantised by the ``gguf`` package.

That package's own reader walks through every string of the vocabulary in Python, which takes seconds; the header is read
here instead (bounded, lists skipped until they are asked for), and the package turns quantised blocks into numbers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.models.checkpoint import FileCheckpoint
from otattn.models.files import need
from otattn.models.formats.gguf_header import Entry, GGUFHeader

__all__ = ["GGUFCheckpoint"]

MAX_PARTS = 1000
_INTEGERS = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class GGUFCheckpoint(FileCheckpoint):
    """The tensors and the metadata of a ``.gguf`` file (version 2 or 3, little endian).

    A model that is split into several files is opened by the first of them, the others beside it.

    Attributes
    ----------
    metadata : dict
        Scalars and strings by key; lists are read by :meth:`items`.

    Raises
    ------
    FileNotFoundError
    ValueError
        Damaged, of another format, or one part of several.
    ImportError
        The extra ``models`` is not installed.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path)
        first = GGUFHeader(self.path)
        self.metadata: dict[str, Any] = first.metadata
        self._parts = [first, *(GGUFHeader(file) for file in self._others())]
        self._entries: dict[str, tuple[GGUFHeader, Entry]] = {}
        for number, part in enumerate(self._parts):
            if len(self._parts) > 1:
                self._belongs(part, number)
            for name, entry in part.entries.items():
                if name in self._entries:
                    raise ValueError(
                        f"{part.path} must hold other tensors than the parts before it, received {name!r}; damaged."
                    )
                self._entries[name] = (part, entry)
        total = self.metadata.get("split.tensors.count")
        if len(self._parts) > 1 and total is not None and total != len(self._entries):
            raise ValueError(
                f"split.tensors.count in {self.path} must be the number of tensors, {len(self._entries)} in "
                f"{len(self._parts)} files, received {total!r}; a part is missing or of another model."
            )
        self._shapes = {name: entry.shape for name, (_, entry) in self._entries.items()}

    def _others(self) -> list[Path]:
        """The parts of a split file after the first, which must be there."""
        count, number = self.metadata.get("split.count", 0), self.metadata.get("split.no", 0)
        if count in (0, 1):
            return []
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_PARTS:
            raise ValueError(f"split.count in {self.path} must be from 0 to {MAX_PARTS}, received {count!r}; damaged.")
        named = _PART.fullmatch(self.path.name)
        if number != 0 or named is None or int(named[2]) != 1 or int(named[3]) != count:
            raise ValueError(
                f"{self.path} is part {number!r} (from 0) of {count}; open the first part, whose name ends with "
                f"-00001-of-{count:05}.gguf, with all the others beside it."
            )
        files = [self.folder / f"{named[1]}-{i:05}-of-{count:05}.gguf" for i in range(2, count + 1)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{self.path} is one of {count} parts, but {', '.join(missing[:3])} are not beside it.")
        return files

    def _belongs(self, part: GGUFHeader, number: int) -> None:
        told = part.metadata.get("split.no"), part.metadata.get("split.count")
        if told != (number, len(self._parts)):
            raise ValueError(
                f"{part.path} must be part {number} of {len(self._parts)} (split.no, split.count), received {told}; it is of "
                "another model or renamed."
            )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def lists(self) -> Mapping[str, int]:
        """Number of entries of each list of the metadata."""
        return {key: size for key, (_, size, _) in self._parts[0].lists.items()}

    def items(self, key: str) -> list[Any]:
        """A list of the metadata, such as the tokens of the vocabulary."""
        return self._parts[0].items(key)

    def quantisation(self, name: str) -> str:
        """The type in which a tensor is stored, for instance "Q4_1"."""
        return str(need("gguf").GGMLQuantizationType(self._entries[name][1].code).name)

    def _read(self, name: str, rows: NDArray[np.int64] | None) -> NDArray[Any]:
        quants = need("gguf.quants")
        part, (shape, code, start, size) = self._entries[name]
        kind = need("gguf").GGMLQuantizationType(code)
        raw = np.frombuffer(part.data, dtype=np.uint8, count=size, offset=start)
        if size:
            raw = raw.reshape(-1, size * shape[-1] // int(np.prod(shape)))
        if rows is not None:
            raw, shape = raw[rows], (len(rows), *shape[1:])
        if kind.name in _INTEGERS:
            return raw.view(_INTEGERS[kind.name]).reshape(shape)
        try:
            with np.errstate(all="ignore"):  # damaged scales are refused as infinite entries
                return np.asarray(quants.dequantize(raw, kind)).reshape(shape)
        except NotImplementedError as exc:
            raise ValueError(f"{name} in {self.path} is of type {kind.name}, which gguf cannot dequantise.") from exc

    def _digest(self) -> str:
        if len(self._parts) == 1:
            return super()._digest()
        digest = hashlib.sha256()
        for part in self._parts:
            digest.update(hashlib.sha256(part.data).digest())
        return digest.hexdigest()
