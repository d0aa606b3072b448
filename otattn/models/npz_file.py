"""Arrays of an ``.npz`` file, each read when it is asked for; only its headers are read before."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._files.npz import outline_npz, read_npz
from otattn.models.checkpoint import FileCheckpoint

__all__ = ["NpzCheckpoint"]


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
