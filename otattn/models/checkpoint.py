"""Named tensors of a model file, read one at a time; files are data: nothing in them is ever executed."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.data.archive import MAX_BYTES, read_npz
from otattn.models._extra import need

__all__ = ["ArrayCheckpoint", "Checkpoint", "SafetensorsCheckpoint", "open_checkpoint", "read_json"]

MAX_HEADER = 64 * 2**20
_ITEM = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_WHOLE = {"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8}


class Checkpoint(ABC):
    """A set of named tensors.

    Attributes
    ----------
    origin : str
        Where they come from, for messages.
    """

    origin: str

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor, known without reading it."""

    @abstractmethod
    def _read(self, name: str, rows: NDArray[np.int64] | None) -> NDArray[Any]: ...

    @abstractmethod
    def _digest(self) -> str: ...

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    @property
    def fingerprint(self) -> str:
        """A hash of the content."""
        known: str | None = self.__dict__.get("_fingerprint")
        if known is None:
            known = self.__dict__["_fingerprint"] = self._digest()
        return known

    def tensor(self, name: str, *shape: int | None, rows: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """A tensor as float64.

        Parameters
        ----------
        name : str
        *shape : int or None
            The shape it must have; None leaves a side free.
        rows : ndarray of int, optional
            Only these rows of a matrix.

        Raises
        ------
        ValueError
            No such tensor, another shape, entries that are no finite numbers, more than 4 GiB.
        """
        have = self.shapes.get(name)
        if have is None:
            some = ", ".join(sorted(self.shapes)[:4])
            raise ValueError(
                f"{self.origin} must hold the tensor {name!r}, received {len(self.shapes)} others ({some}, ...); "
                "is it a checkpoint of this architecture?"
            )
        if shape and (len(shape) != len(have) or any(w not in (None, g) for w, g in zip(shape, have, strict=True))):
            raise ValueError(
                f"{name} in {self.origin} must have shape {shape}, received {have}; check the configuration."
            )
        if 8 * math.prod(have if rows is None else (len(rows), *have[1:])) > MAX_BYTES:
            raise ValueError(f"{name} in {self.origin} must take at most {MAX_BYTES} bytes, received shape {have}.")
        out = np.asarray(self._read(name, rows), dtype=np.float64)
        if not np.isfinite(out).all():
            raise ValueError(
                f"{name} in {self.origin} must be finite, received NaN or infinite entries; get another copy."
            )
        return out

    def prefix_of(self, suffix: str) -> str:
        """What stands before ``suffix`` in the one tensor name that ends with it."""
        found = [name[: -len(suffix)] for name in self.shapes if name.endswith(suffix)]
        found = [p for p in found if p == "" or p.endswith(".")]
        if len(found) != 1:
            raise ValueError(
                f"{self.origin} must hold one tensor whose name ends with {suffix!r}, received {len(found)} such names "
                f"among {len(self.shapes)}; is it a checkpoint of this architecture?"
            )
        return found[0]

    def count_layers(self, name_of: Callable[[int], str]) -> int:
        """How many consecutive indices i, from 0, have a tensor ``name_of(i)``."""
        count = 0
        while name_of(count) in self.shapes:
            count += 1
        if count == 0:
            raise ValueError(f"{self.origin} must hold at least one layer, received no tensor {name_of(0)!r}.")
        return count

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.shapes)} tensors, {self.origin})"


class ArrayCheckpoint(Checkpoint):
    """Arrays in memory, by name.

    Examples
    --------
    >>> weights = ArrayCheckpoint({"w": [[1.0, 2.0]]})
    >>> weights.tensor("w", 1, 2)
    array([[1., 2.]])
    """

    def __init__(self, arrays: Mapping[str, Any], *, origin: str = "the given arrays") -> None:
        self.origin = origin
        self._arrays = {}
        for name, value in arrays.items():
            array = np.asarray(value)
            if array.dtype.kind not in "biuf":
                raise ValueError(f"{name} must be an array of numbers, received dtype {array.dtype}; convert it first.")
            self._arrays[str(name)] = array
        self._shapes = {name: array.shape for name, array in self._arrays.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def _read(self, name: str, rows: NDArray[np.int64] | None) -> NDArray[Any]:
        return self._arrays[name] if rows is None else self._arrays[name][rows]

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self._arrays):
            array = self._arrays[name]
            digest.update(f"{name}{array.dtype.str}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


class FileCheckpoint(Checkpoint):
    """A checkpoint in one file."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = existing(path)
        self.origin = str(self.path)

    def _digest(self) -> str:
        with open(self.path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


class SafetensorsCheckpoint(FileCheckpoint):
    """The tensors of a ``.safetensors`` file (float64, float32, float16, bfloat16).

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
        library = need("safetensors")
        self._open = library.safe_open
        with open(self.path, "rb") as stream:
            start = stream.read(8)
            size = int.from_bytes(start, "little") if len(start) == 8 else MAX_HEADER + 1
            if size > min(MAX_HEADER, self.path.stat().st_size - 8):
                raise ValueError(
                    f"{self.path} must be a .safetensors file, received a header of {size} bytes in a file of "
                    f"{self.path.stat().st_size}; it is damaged or of another format."
                )
            raw = stream.read(size)
        self._start = 8 + size
        try:
            with self._open(str(self.path), framework="np") as file:
                names = list(file.keys())
            header = json.loads(raw)
            self._entries = {name: header[name] for name in names}
            self._shapes = {name: tuple(int(s) for s in e["shape"]) for name, e in self._entries.items()}
        except (library.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as exc:
            raise ValueError(
                f"{self.path} must be a .safetensors file, but reading its header failed ({exc}); it is damaged or of "
                "another format."
            ) from exc

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def _read(self, name: str, rows: NDArray[np.int64] | None) -> NDArray[Any]:
        entry, shape = self._entries[name], self._shapes[name]
        kind = entry["dtype"]
        if kind not in _ITEM and kind not in _WHOLE:
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


def open_checkpoint(source: Checkpoint | Mapping[str, Any] | str | PathLike[str]) -> Checkpoint:
    """The tensors of a ``.safetensors``, ``.gguf`` or ``.npz`` file (told apart by content), or of a mapping of arrays."""
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, Mapping):
        return ArrayCheckpoint(source)
    path = Path(source)
    if path.is_dir() and (path / "model.safetensors").exists():
        path = path / "model.safetensors"
    file = existing(path)
    with open(file, "rb") as stream:
        magic = stream.read(4)
    if magic == b"GGUF":
        from otattn.models.gguf_file import GGUFCheckpoint

        return GGUFCheckpoint(file)
    if magic[:2] == b"PK":
        return ArrayCheckpoint(read_npz(file), origin=str(file))
    return SafetensorsCheckpoint(file)


def existing(path: str | PathLike[str]) -> Path:
    """``path``, if it is a file."""
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"{file} must be an existing file, received a path where there is none; check it.")
    if not file.is_file():
        raise ValueError(f"{file} must be a file, received a directory or a device; name the file in it.")
    return file


def read_json(path: Path, *, max_bytes: int = MAX_HEADER) -> dict[str, Any]:
    """The object in a small JSON file."""
    size = existing(path).stat().st_size
    if size > max_bytes:
        raise ValueError(f"{path} must have at most {max_bytes} bytes, received {size}; is it a configuration file?")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{path} must be a JSON file, but reading it failed ({exc}); it is damaged.") from exc
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, received {type(value).__name__}; it is another file.")
    return value
