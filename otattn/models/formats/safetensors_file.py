"""Files of the ``safetensors`` format, one or several with an index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.models.checkpoint import Checkpoint, FileCheckpoint
from otattn.models.files import MAX_JSON, existing, foreign, need, objects_once, read_json

__all__ = ["SafetensorsCheckpoint", "ShardedCheckpoint"]

_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})


class SafetensorsCheckpoint(FileCheckpoint):
    """The tensors of a ``.safetensors`` file (weights in float64, float32, float16, bfloat16).

    The ``safetensors`` package checks the header (sizes, overlaps, coverage of the file) before anything is read.

    Raises
    ------
    FileNotFoundError
    ImportError
        The extra ``models`` is not installed.
    ValueError
        The file is damaged or of another format.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path)
        raw = self._header()
        library = need("safetensors")
        self._open = library.safe_open
        try:
            header = json.loads(raw, object_pairs_hook=objects_once)
            with self._open(str(self.path), framework="np") as file:
                names = list(file.keys())
            self._entries = {name: header[name] for name in names}
            self._shapes = {name: tuple(int(s) for s in e["shape"]) for name, e in self._entries.items()}
        except (library.SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise ValueError(
                f"{self.path} must be a .safetensors file, but reading its header failed ({exc}); it is damaged or of "
                "another format."
            ) from exc

    def _header(self) -> bytes:
        """The bytes of the header; a file that has none is named by what it is."""
        room = self.path.stat().st_size - 8
        with open(self.path, "rb") as stream:
            start = stream.read(9)
            size = int.from_bytes(start[:8], "little")
            if start[8:] == b"{" and size <= min(MAX_JSON, room):
                self._start = 8 + size
                return start[8:] + stream.read(size - 1)
        what = foreign(self.path)
        if what is not None:
            raise ValueError(f"{self.path} must be a .safetensors file, received {what[0]}; {what[1]}.")
        raise ValueError(
            f"{self.path} must be a .safetensors file, received a header of {size} bytes in a file of {room + 8}; it is "
            "damaged, cut off or of another format."
        )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def _read(self, name: str, rows: NDArray[np.int64] | None) -> NDArray[Any]:
        entry, shape = self._entries[name], self._shapes[name]
        kind = entry["dtype"]
        if kind not in _PLAIN:
            raise ValueError(
                f"{name} in {self.path} must hold plain numbers, received dtype {kind}; convert it to F32."
            )
        if kind == "BF16":  # numpy has no such type: the upper half of a float32
            begin, end = entry["data_offsets"]
            raw = np.fromfile(self.path, dtype="<u2", count=(end - begin) // 2, offset=self._start + begin)
            array = (raw.astype(np.uint32) << 16).view(np.float32).reshape(shape)
        else:
            with self._open(str(self.path), framework="np") as file:
                array = file.get_tensor(name)
        return array if rows is None else array[rows]


class ShardedCheckpoint(Checkpoint):
    """The tensors of several ``.safetensors`` files that an index (``model.safetensors.index.json``) lists.

    Raises
    ------
    FileNotFoundError
        A shard is missing.
    ValueError
        The index is damaged, or does not fit its shards.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = existing(path)
        self.origin, self.folder = str(self.path), self.path.parent
        listed = read_json(self.path).get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
            raise ValueError(f"{self.path} must hold weight_map, the file of each tensor; it is no index, or damaged.")
        self._files: dict[str, SafetensorsCheckpoint] = {}
        for file in sorted(set(listed.values())):
            if Path(file).name != file or file in ("", ".."):
                raise ValueError(f"{self.path} must name files beside it, received {file!r}; it is damaged.")
            self._files[file] = SafetensorsCheckpoint(self.folder / file)
        self._where = {name: self._files[file] for name, file in listed.items()}
        held = [(name, part) for part in self._files.values() for name in part.shapes]
        strange = [name for name, part in held if self._where.get(name) is not part]
        missing = [name for name, part in self._where.items() if name not in part]
        if strange or missing:
            name = (strange + missing)[0]
            raise ValueError(
                f"{self.path} and its {len(self._files)} files must tell the same tensors, but differ in {name!r} and "
                f"{len(strange) + len(missing) - 1} others; copy all files again."
            )
        self._shapes = {name: part.shapes[name] for name, part in self._where.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def _read(self, name: str, rows: NDArray[np.int64] | None) -> NDArray[Any]:
        return self._where[name]._read(name, rows)

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for _, part in sorted(self._files.items()):
            digest.update(bytes.fromhex(part.fingerprint))
        return digest.hexdigest()
