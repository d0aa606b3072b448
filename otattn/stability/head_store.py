"""Where finished heads of a measurement are kept: one file a head, so that an interrupted run goes on."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._files.npz import read_npz
from otattn._linalg import Array
from otattn.models import Transformer
from otattn.stability.fingerprint import fingerprint
from otattn.stability.folder import StoreFolder, is_file
from otattn.stability.heads import FIELDS, head_shapes

__all__ = ["HeadStore"]

FORMAT = 3
MAY_BE_NAN = ("published", "ratios")
"""Heads that no published theorem covers, and pairs that were twice the same run."""
MAY_BE_INF = ("published", "own")
"""Upper bounds beyond float64."""


class HeadStore(StoreFolder):
    """A folder with one file a finished head, in a subfolder that a hash of the measurement names.

    Files appear whole, so no lock is needed: processes may share the folder.

    Parameters
    ----------
    path : path
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
        path: str | os.PathLike[str],
        model: Transformer,
        ids: list[NDArray[np.int64]],
        sizes: list[int],
        n_pairs: int,
        options: Any,
        key: str | None,
    ) -> None:
        what = (type(model), model.config, model.checkpoint.fingerprint) if key is None else key
        whole = fingerprint({"format": FORMAT, "model": what, "ids": ids, "options": (sizes, n_pairs, options)})
        super().__init__(path, whole, name="cache")
        self.path /= whole[:32]
        self.shapes = head_shapes(len(ids[0]), len(sizes), n_pairs)

    def _checksum(self, name: str, arrays: dict[str, Array]) -> str:
        return self.checksum(b"".join((name.encode(), *(np.asarray(arrays[field]).tobytes() for field in FIELDS))))

    def get(self, layer: int, head: int) -> dict[str, Array] | None:
        """The arrays of a finished head, None when it is not finished or its file is not what was written."""
        name = _file(layer, head)
        with self._refusals(self.path / name, "be a file that can be read"):
            if not is_file(self.path / name):
                return None
            try:
                found = read_npz(self.path / name, (*FIELDS, "checksum"))
                arrays = {field: found[field] for field in FIELDS}
                fault = self._fault(arrays)
                if not fault and str(found["checksum"]) != self._checksum(name, arrays):
                    fault = "its checksum is another one"
            except KeyError as exc:
                fault = f"{exc.args[0]} is missing"
            except ValueError as exc:
                fault = str(exc)
        if fault:
            self.set_aside(f"{name}: damaged, edited or of another head ({fault})", "this head is measured")
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

    def put(self, layer: int, head: int, arrays: dict[str, Array]) -> None:
        """Keep a finished head: the whole file appears at once."""
        name, stream = _file(layer, head), io.BytesIO()
        checksum = np.array(self._checksum(name, arrays))
        np.savez(stream, allow_pickle=False, checksum=checksum, **arrays)  # type: ignore[arg-type,unused-ignore]
        self.write(name, stream.getvalue(), shared=True)


def _file(layer: int, head: int) -> str:
    return f"layer{layer:03d}-head{head:03d}.npz"
