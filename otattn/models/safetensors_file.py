"""Files of the ``safetensors`` format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.models._extra import need
from otattn.models.checkpoint import FileCheckpoint
from otattn.models.files import MAX_JSON, foreign, objects_once

__all__ = ["SafetensorsCheckpoint"]

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
