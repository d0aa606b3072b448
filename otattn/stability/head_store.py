"""Where finished heads of a measurement are kept: one file a head, so that an interrupted run goes on."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._files.npz import read_npz
from otattn.errors import StoreWarning
from otattn.models import Transformer
from otattn.stability.fingerprint import fingerprint
from otattn.stability.folder import folder_path, is_file, make_folder, one_error, write_whole
from otattn.stability.heads import FIELDS, head_shapes

__all__ = ["HeadStore"]

Array = NDArray[np.float64]
FORMAT = 2
MAY_BE_NAN = ("published", "ratios")
"""Heads that no published theorem covers, and pairs that were twice the same run."""
MAY_BE_INF = ("published", "own")
"""Upper bounds beyond float64."""


class HeadStore:
    """A folder with one file a finished head; without a folder nothing is kept.

    Every file carries a checksum over its arrays, its head and the measurement; one that is damaged, edited or of another
    head is named in a :class:`StoreWarning` and its head is measured again. Files appear whole, so no lock is needed:
    processes may share the folder.

    Parameters
    ----------
    path : path or None
    model : Transformer
    ids : list of ndarray (windows, n)
    sizes : list of int
    n_pairs : int
    options : Any
        What else the numbers depend on.
    key : str or None
        A name for the model, instead of its class, configuration and weights.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        model: Transformer,
        ids: list[NDArray[np.int64]],
        sizes: list[int],
        n_pairs: int,
        options: Any,
        key: str | None,
    ) -> None:
        self.folder: Path | None = None
        if path is None:
            return
        what = (type(model), model.config, model.checkpoint.fingerprint) if key is None else key
        self.key = fingerprint({"format": FORMAT, "model": what, "ids": ids, "options": (sizes, n_pairs, options)})
        self.shapes = head_shapes(len(ids[0]), len(sizes), n_pairs)
        self.folder = folder_path(path, "cache") / self.key[:32]

    def _file(self, layer: int, head: int) -> Path:
        assert self.folder is not None
        return self.folder / f"layer{layer:03d}-head{head:03d}.npz"

    def _checksum(self, layer: int, head: int, arrays: dict[str, Array]) -> str:
        return fingerprint(self.key, layer, head, [np.asarray(arrays[name]) for name in FIELDS])

    def get(self, layer: int, head: int) -> dict[str, Array] | None:
        """The arrays of a finished head, None when it is not finished or its file is not what was written."""
        if self.folder is None:
            return None
        file = self._file(layer, head)
        with one_error(f"{file} must be a file that can be read", "delete it to measure its head again"):
            if not is_file(file):
                return None
            try:
                found = read_npz(file, (*FIELDS, "checksum"))
                arrays = {name: found[name] for name in FIELDS}
                fault = self._fault(arrays) or (
                    ""
                    if str(found["checksum"]) == self._checksum(layer, head, arrays)
                    else "its checksum is another one"
                )
            except KeyError as exc:
                fault = f"{exc.args[0]} is missing"
            except ValueError as exc:
                fault = str(exc)
        if fault:
            warnings.warn(
                f"{file}: damaged, edited or of another head ({fault}); set aside, this head is measured again.",
                StoreWarning,
                stacklevel=3,
            )
            return None
        return arrays

    def _fault(self, arrays: dict[str, Array]) -> str:
        """What is wrong with the arrays of a file, empty if nothing."""
        for name, value in arrays.items():
            if value.dtype != np.float64 or value.shape != self.shapes[name]:
                return f"{name} is {value.dtype} {value.shape}, not float64 {self.shapes[name]}"
            bad = (np.isnan(value) & (name not in MAY_BE_NAN)) | (np.isinf(value) & (name not in MAY_BE_INF))
            if bad.any() or (value < 0.0).any():
                return f"{name} has entries that are negative or not finite"
        return ""

    def prepare(self) -> None:
        """Make the folder, before work is spent that it could not keep."""
        if self.folder is not None:
            make_folder(self.folder, "cache")

    def put(self, layer: int, head: int, arrays: dict[str, Array]) -> None:
        """Keep a finished head: the whole file appears at once."""
        if self.folder is None:
            return
        file, stream = self._file(layer, head), io.BytesIO()
        checksum = np.array(self._checksum(layer, head, arrays))
        np.savez(stream, allow_pickle=False, checksum=checksum, **arrays)  # type: ignore[arg-type,unused-ignore]
        with one_error(f"{file} must be writable", "free space or take another folder"):
            write_whole(file, stream.getvalue())
