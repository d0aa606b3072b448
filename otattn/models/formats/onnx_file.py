"""ONNX files: the weights of a graph, read with the ``onnx`` package; the graph itself is never run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.models.checkpoint import FileCheckpoint
from otattn.models.files import need
from otattn.models.formats.onnx_names import named_weights

__all__ = ["ONNXCheckpoint"]


class ONNXCheckpoint(FileCheckpoint):
    """The weights of an ``.onnx`` file under the names of the model that was exported, matrices as ``y = W x + b`` has them.

    Tensors that lie in files beside it are read when they are asked for. For a file in a folder ``onnx``, configuration and
    tokenizer may lie in the folder above.

    Attributes
    ----------
    epsilons : tuple of float
        Of the normalisations in the graph, different ones once.

    Raises
    ------
    FileNotFoundError
    ImportError
        The extra ``onnx`` is not installed.
    ValueError
        Damaged, of another format, quantised or fused operations, or a tensor whose name the graph does not tell.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path)
        if self.folder.name == "onnx" and not (self.folder / "config.json").is_file():
            self.folder = self.folder.parent
        self._onnx = need("onnx", extra="onnx")
        graph = self._graph()
        self._entries = named_weights(graph, self.origin)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, (proto, transposed) in self._entries.items():
            dims = tuple(int(side) for side in proto.dims)
            if any(side < 0 for side in dims):
                raise ValueError(f"{name} in {self.origin} must have a shape, received {dims}; the file is damaged.")
            self._shapes[name] = dims[::-1] if transposed else dims
        self.epsilons = tuple(sorted(_epsilons(graph)))

    def _graph(self) -> Any:
        damaged = need("google.protobuf.message", extra="onnx").DecodeError
        try:
            return self._onnx.load_model(str(self.path), load_external_data=False).graph
        except damaged as exc:
            raise ValueError(
                f"{self.origin} must be an ONNX file, but reading it failed ({exc}); it is damaged or of another format."
            ) from exc

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def _read(self, name: str, rows: NDArray[np.int64] | None) -> NDArray[Any]:
        proto, transposed = self._entries[name]
        problems = (ValueError, TypeError, OSError, self._onnx.checker.ValidationError)
        try:
            array = np.asarray(self._onnx.numpy_helper.to_array(proto, base_dir=str(self.path.parent)))
        except problems as exc:
            raise ValueError(
                f"{name} in {self.origin} must be a whole tensor, but reading it failed ({exc}); is the file with its data "
                "beside it?"
            ) from exc
        array = array.T if transposed else array
        return array if rows is None else array[rows]

    def _digest(self) -> str:
        digest = hashlib.sha256(super()._digest().encode())
        for file in self._data_files():
            with open(file, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    def _data_files(self) -> list[Path]:
        """Files beside this one that hold tensors of it."""
        entries = [pair for proto, _ in self._entries.values() for pair in proto.external_data]
        return [self.path.parent / name for name in sorted({e.value for e in entries if e.key == "location"})]


def _epsilons(graph: Any) -> set[float]:
    """Of LayerNormalization nodes; their standard is 1e-5."""
    out = set()
    for node in graph.node:
        if node.op_type == "LayerNormalization":
            told = [float(part.f) for part in node.attribute if part.name == "epsilon"]
            out.add(told[0] if told else 1e-5)
    return out
