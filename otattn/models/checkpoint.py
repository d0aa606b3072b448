"""Named tensors of a model, read one at a time; where they come from is a subclass each."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._files.npz import MAX_BYTES, outline_npz, read_npz
from otattn.models.files import existing

__all__ = ["ArrayCheckpoint", "Checkpoint", "FileCheckpoint", "NpzCheckpoint"]


class Checkpoint(ABC):
    """A set of named tensors.

    Attributes
    ----------
    origin : str
        Where they come from, for messages.
    folder : Path or None
        Where their files are: configuration and tokenizer are looked for there.
    """

    origin: str
    folder: Path | None = None

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
        """A weight as float64.

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
            No such tensor, another shape, integers (quantised weights, whose scales lie elsewhere), entries that are no
            finite numbers, more than 4 GiB.
        """
        raw = self._checked(name, shape, rows)
        if raw.dtype.kind != "f" and raw.dtype.name != "bfloat16":
            raise ValueError(
                f"{name} in {self.origin} must hold floating-point numbers, received {raw.dtype}: integers are quantised "
                "weights, whose scales are not applied here; dequantise the model first."
            )
        with np.errstate(over="ignore", invalid="ignore"):
            out = np.asarray(raw, dtype=np.float64)
        if not np.isfinite(out).all():
            raise ValueError(
                f"{name} in {self.origin} must be finite, received NaN or infinite entries; get another copy."
            )
        return out

    def buffer(self, name: str) -> NDArray[np.float64]:
        """A tensor that is no weight (positions, masks, frequencies), integers included."""
        return np.asarray(self._checked(name, (), None), dtype=np.float64)

    def _checked(self, name: str, shape: tuple[int | None, ...], rows: NDArray[np.int64] | None) -> NDArray[Any]:
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
        return self._read(name, rows)

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
            self._arrays[str(name)] = check.real_array(value, f"the tensor {name!r}")
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

    folder: Path

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = existing(path)
        self.origin, self.folder = str(self.path), self.path.parent

    def _digest(self) -> str:
        with open(self.path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


class NpzCheckpoint(FileCheckpoint):
    """The arrays of an ``.npz`` file by name.

    Raises
    ------
    FileNotFoundError
    ValueError
        Damaged, of another format, without arrays, with objects in it, or an archive that claims far more than it holds.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path)
        outline = outline_npz(self.path)
        if not outline:
            raise ValueError(f"{self.path} must hold arrays, received an archive without any; name another file.")
        strange = [name for name, array in outline.items() if array.dtype.kind not in "biuf"]
        if strange:
            raise ValueError(
                f"{strange[0]!r} in {self.path} must be an array of real numbers, received dtype "
                f"{outline[strange[0]].dtype}; convert it to float32 before saving it."
            )
        self._shapes = {name: tuple(array.shape) for name, array in outline.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def _read(self, name: str, rows: NDArray[np.int64] | None) -> NDArray[Any]:
        array = read_npz(self.path, [name])[name]
        return array if rows is None else array[rows]
