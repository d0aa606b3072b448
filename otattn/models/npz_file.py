"""Arrays of an ``.npz`` file, each read when it is asked for; its headers are read first."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from os import PathLike
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from otattn.data.archive import read_npz
from otattn.models.checkpoint import FileCheckpoint
from otattn.models.files import foreign

__all__ = ["NpzCheckpoint"]

_LARGE = 64 * 2**20
_MOST_PACKED = 100
"""Weights hardly shrink when they are packed: large arrays that claim more than this many times their file are refused."""


class NpzCheckpoint(FileCheckpoint):
    """The arrays of an ``.npz`` file by name.

    Raises
    ------
    FileNotFoundError
    ValueError
        Damaged, of another format, with objects in it, or an archive that claims far more than it holds.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path)
        self._shapes: dict[str, tuple[int, ...]] = {}
        try:
            with zipfile.ZipFile(self.path) as archive:
                for member in archive.infolist():
                    name = member.filename.removesuffix(".npy")
                    if name == member.filename:
                        continue
                    if name in self._shapes:
                        raise ValueError(f"the array {name!r} stands in it twice")
                    with archive.open(member) as stream:
                        self._shapes[name] = self._shape(stream, name)
        except (Exception, MemoryError) as exc:  # zipfile and the parser of headers raise many kinds
            raise ValueError(
                f"{self.path} must be an .npz file of plain arrays, but reading it failed ({exc or type(exc).__name__}); "
                "it is damaged or of another kind, write it again."
            ) from exc
        if not self._shapes:
            what = foreign(self.path) or ("no arrays", "name another file")
            raise ValueError(f"{self.path} must be an .npz file of plain arrays, received {what[0]}; {what[1]}.")
        claimed = 8 * sum(math.prod(shape) for shape in self._shapes.values())
        size = self.path.stat().st_size
        if claimed > max(_LARGE, _MOST_PACKED * size):
            raise ValueError(
                f"{self.path} claims arrays of {claimed} bytes in a file of {size}; weights do not shrink so far: it is no "
                "checkpoint."
            )

    def _shape(self, stream: IO[bytes], name: str) -> tuple[int, ...]:
        version = npy.read_magic(stream)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"the array {name!r} has format {version}, not 1.0 or 2.0")
        shape, _, dtype = read(stream)
        if dtype.hasobject:
            raise ValueError(f"the array {name!r} holds pickled objects, which are never loaded")
        if dtype.kind not in "biuf" or min(shape, default=1) < 0:
            raise ValueError(f"the array {name!r} has dtype {dtype} and shape {shape}, which are no numbers")
        return tuple(int(side) for side in shape)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def _read(self, name: str, rows: NDArray[np.int64] | None) -> NDArray[Any]:
        array = read_npz(self.path, [name])[name]
        return array if rows is None else array[rows]
