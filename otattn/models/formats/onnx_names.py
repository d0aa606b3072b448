"""Names of the weights in an ONNX graph: exporters fold the transposition into a matrix and forget its name."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["Stored", "named_weights"]

_PACKED = ("Quantize", "Dequantize", "MatMulInteger", "QLinear", "ConvInteger")
"""Parts of operations on integers with scales."""
_LEAST = {"MatMul": 2, "Gemm": 2, "Identity": 1}
"""Inputs that an operation must have."""
_NO_FLOATS = frozenset({2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 21, 22})
"""Codes of integers, truth values and strings (TensorProto.DataType)."""


class Stored(NamedTuple):
    """A tensor of the file, and whether the weight is its transpose."""

    proto: Any
    transposed: bool


def named_weights(graph: Any, origin: str) -> dict[str, Stored]:
    """The weights by the names that they had in the model, linear maps in the convention ``y = W x + b``.

    What multiplies from the right (MatMul, Gemm) is stored as ``W^T`` and has lost its name. It is that of the bias which is
    added to the product, when only this product takes that bias; else the path of the node ("/encoder/layer.0/output/dense/MatMul"
    is the product of ``encoder.layer.0.output.dense``). Tensors that the exporter keeps once because they are equal are given back
    under all their names: those of Identity nodes, and the paths of their consumers.

    Integers, and single numbers, that carry no name of a weight are constants of the computation.

    Raises
    ------
    ValueError
        An operation that is not of plain ONNX, or on packed integers; a weight whose name the graph does not tell.
    """
    return _Graph(graph, origin).weights()


def _is_name(name: str) -> bool:
    """Whether it is a name of a weight, not one that an exporter has made up."""
    return "." in name and "::" not in name and not name.startswith("/")


def _path(node: Any) -> str | None:
    """The module that a node belongs to, where its name tells."""
    parts = node.name.split("/")
    return ".".join(parts[1:-1]) if len(parts) > 2 and not parts[0] else None


class _Graph:
    def __init__(self, graph: Any, origin: str) -> None:
        self.origin, self.nodes = origin, list(graph.node)
        if not self.nodes:
            raise ValueError(f"{origin} must be an ONNX file, received one without a graph; it is damaged.")
        texts = [tensor.name for tensor in graph.initializer]
        texts += [
            text for node in self.nodes for text in (node.op_type, node.domain, node.name, *node.input, *node.output)
        ]
        strange = [text for text in texts if not isinstance(text, str)]  # bytes that are no UTF-8
        if strange:
            raise ValueError(f"{origin} must hold names in UTF-8, received {strange[0]!r}; it is damaged.")
        for node in self.nodes:
            if len(node.input) < _LEAST.get(node.op_type, 0) or not node.output:
                raise ValueError(
                    f"{origin} must hold whole operations, but {node.op_type} {node.name!r} is not; damaged."
                )
            if node.domain not in ("", "ai.onnx") or any(part in node.op_type for part in _PACKED):
                raise ValueError(
                    f"{origin} must hold plain operations on floating-point numbers, received {node.op_type!r} (domain "
                    f"{node.domain or 'ai.onnx'!r}, node {node.name!r}); take the file that is neither optimised nor quantised."
                )
        if len(graph.sparse_initializer):
            raise ValueError(f"{origin} must hold dense tensors, received sparse ones; export it without them.")
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
        for node in self.nodes:
            if node.op_type == "Constant":
                self.tensors.update((node.output[0], part.t) for part in node.attribute if part.name == "value")
        for node in self.nodes:  # a name more for the same tensor
            if node.op_type == "Identity" and node.input[0] in self.tensors:
                self.tensors[node.output[0]] = self.tensors[node.input[0]]
        self.users: dict[str, list[Any]] = defaultdict(list)
        for node in self.nodes:
            for name in node.input:
                self.users[name].append(node)

    def weights(self) -> dict[str, Stored]:
        out: dict[str, Stored] = {}
        seen = set()
        for node, name in self._products():
            full = name if _is_name(name) else f"{self._module(node, name)}.weight"
            if full in out and out[full].proto is not self.tensors[name]:
                raise ValueError(
                    f"{full} in {self.origin} must be one matrix, received two ({name!r} is the second); the graph is not that of "
                    "one model."
                )
            out[full] = Stored(self.tensors[name], not self._turned(node))
            seen.add(name)
            others = [user.op_type for user in self.users[name] if user.op_type not in ("MatMul", "Gemm")]
            if others:
                raise ValueError(
                    f"{full} in {self.origin} must only multiply from the right, received an operation {others[0]} on it, too; "
                    "export the model without its head."
                )
        for name, tensor in [*self.tensors.items(), *self._shared()]:
            if name in seen or name in out:
                continue
            if _is_name(name):
                out[name] = Stored(tensor, False)
            elif self._counts(tensor) and name in self.users:
                user = self.users[name][0]
                raise ValueError(
                    f"the tensor {name!r} of shape {tuple(tensor.dims)} in {self.origin} must have a name that the graph tells, but "
                    f"has none (an input of {user.op_type} {user.name!r}); export the model anew, for texts of any length."
                )
        return out

    def _counts(self, tensor: Any) -> bool:
        """Whether it could hold weights: more than one number, floating-point."""
        return math.prod(tensor.dims) > 1 and tensor.data_type not in _NO_FLOATS

    def _products(self) -> Iterator[tuple[Any, str]]:
        """Products with a matrix of the file on their right, and its name there."""
        for node in self.nodes:
            if node.op_type not in ("MatMul", "Gemm"):
                continue
            matrix = self.tensors.get(node.input[1])
            if matrix is not None and len(matrix.dims) == 2:
                yield node, node.input[1]

    def _turned(self, node: Any) -> bool:
        """Whether a Gemm turns its matrix itself."""
        return any(part.name == "transB" and part.i == 1 for part in node.attribute)

    def _module(self, node: Any, name: str) -> str:
        """The module whose matrix a product takes."""
        for bias in self._added(node):
            if _is_name(bias) and bias.endswith(".bias") and len(self.users[bias]) == 1:
                return bias.removesuffix(".bias")
        path = _path(node)
        if path is None:
            raise ValueError(
                f"the matrix {name!r} in {self.origin} must have a bias of its own or a node with a path, received the node "
                f"{node.name!r} with neither: its name is not told; export the model anew."
            )
        return path

    def _added(self, node: Any) -> list[str]:
        """What is added to a product and to nothing else."""
        if node.op_type == "Gemm":
            return list(node.input[2:])
        users = self.users[node.output[0]]
        adds = users[0].input if len(users) == 1 and users[0].op_type == "Add" else ()
        return [name for name in adds if name in self.tensors]

    def _shared(self) -> Iterator[tuple[str, Any]]:
        """Vectors with several users that the paths of these name."""
        for node in self.nodes:
            path, inputs = _path(node), list(node.input)
            if path is None:
                continue
            if node.op_type == "LayerNormalization":
                named = list(zip(inputs[1:], ("weight", "bias"), strict=False))
            else:
                kind = {"Add": "bias", "Mul": "weight"}.get(node.op_type)
                named = [] if kind is None else [(name, kind) for name in inputs]
            for name, kind in named:
                if name in self.tensors and _is_name(name) and len(self.users[name]) > 1:
                    yield f"{path}.{kind}", self.tensors[name]
