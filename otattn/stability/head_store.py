"""Where finished heads of a measurement are kept: one file a head, so that an interrupted run goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.data.archive import read_npz
from otattn.errors import StoreError
from otattn.models import Transformer
from otattn.stability.fingerprint import fingerprint
from otattn.stability.heads import FIELDS

__all__ = ["HeadStore"]

Array = NDArray[np.float64]
FORMAT = 1


class HeadStore:
    """A folder with one file a finished head; without a folder nothing is kept."""

    def __init__(self, path: str | os.PathLike[str] | None, model: Transformer, ids: Any, options: Any) -> None:
        self.folder: Path | None = None
        if path is None:
            return
        key = fingerprint(FORMAT, model.checkpoint.fingerprint, repr(model.config), ids, options)
        self.folder = Path(path) / key[:32]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StoreError(f"cache must be a folder that can be written, received {path} ({exc}).") from exc

    def _file(self, layer: int, head: int) -> Path:
        assert self.folder is not None
        return self.folder / f"layer{layer:03d}-head{head:03d}.npz"

    def get(self, layer: int, head: int) -> dict[str, Array] | None:
        """The arrays of a finished head, None when it is not finished."""
        if self.folder is None or not (file := self._file(layer, head)).exists():
            return None
        try:
            arrays = read_npz(file, FIELDS)
            return {name: np.asarray(arrays[name], dtype=np.float64) for name in FIELDS}
        except (ValueError, KeyError) as exc:
            raise StoreError(
                f"{file} must be a finished head, but is damaged ({exc}); delete it to measure anew."
            ) from exc

    def put(self, layer: int, head: int, arrays: dict[str, Array]) -> None:
        """Keep a finished head: the whole file appears at once."""
        if self.folder is None:
            return
        file = self._file(layer, head)
        draft = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            with open(draft, "wb") as stream:
                np.savez(stream, allow_pickle=False, **arrays)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(draft, file)
        except OSError as exc:
            raise StoreError(
                f"{file} must be writable, but writing it failed ({exc}); free space or take another folder."
            ) from exc
