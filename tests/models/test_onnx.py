"""ONNX files as exporters write them: matrices transposed and without names, equal tensors kept once; what is refused.

The graphs are whole ones: the package's own evaluator finds the states that transformers found before they are read here.
"""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gguf_families import Arrays, reference

from otattn.models import load_model, open_checkpoint

onnx = pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
helper, numpy_helper = onnx.helper, onnx.numpy_helper

IDS = np.array([[3, 5, 2, 9, 4, 7, 7]])


class Exporter:
    """The graph of a BERT model in the ways of torch's exporters.

    ``paths``: nodes are named by their modules, else by a count. ``once``: equal vectors are kept once, the first by its name;
    ``identities``: the others are outputs of Identity nodes. ``fused``: linear maps are Gemm nodes with a matrix as it is.
    """

    def __init__(self, weights: Arrays, config: dict[str, Any], **ways: bool) -> None:
        self.w, self.config, self.ways = weights, config, ways
        self.nodes: list[Any] = []
        self.kept: dict[str, Any] = {}
        self.first: dict[bytes, str] = {}
        self.count = 0

    def node(self, kind: str, inputs: list[str], module: str, **attributes: Any) -> str:
        self.count += 1
        path = self.ways.get("paths", True)
        name = f"/{module.replace('.', '/')}/{kind}" if path else f"node_{kind}_{self.count}"
        self.nodes.append(helper.make_node(kind, inputs, [f"out_{self.count}"], name=name, **attributes))
        return f"out_{self.count}"

    def constant(self, value: Any, kind: Any) -> str:
        self.count += 1
        return self.keep(f"/Constant_{self.count}_output_0", np.array(value, dtype=kind))

    def keep(self, name: str, value: np.ndarray) -> str:
        self.kept[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def vector(self, name: str) -> str:
        value = self.w[name].astype(np.float32)
        known = self.first.setdefault(value.tobytes(), name)
        if known == name or not self.ways.get("once"):
            return name if name in self.kept else self.keep(name, value)
        if self.ways.get("identities"):
            if name not in [node.output[0] for node in self.nodes]:
                self.nodes.insert(0, helper.make_node("Identity", [known], [name], name=f"Identity_{len(self.nodes)}"))
            return name
        return known

    def linear(self, module: str, x: str) -> str:
        W = self.w[f"{module}.weight"].astype(np.float32)
        self.count += 1
        if self.ways.get("fused"):
            flat = self.node("Reshape", [x, self.constant([-1, W.shape[1]], np.int64)], module)
            bias = self.vector(f"{module}.bias")
            y = self.node("Gemm", [flat, self.keep(f"{module}.weight", W), bias], module, transB=1)
            return self.node("Reshape", [y, self.constant([1, -1, len(W)], np.int64)], module)
        y = self.node("MatMul", [x, self.keep(f"onnx::MatMul_{self.count}", W.T)], module)
        return self.node("Add", [self.vector(f"{module}.bias"), y], module)

    def norm(self, module: str, x: str) -> str:
        parts = [self.vector(f"{module}.{part}") for part in ("weight", "bias")]
        return self.node("LayerNormalization", [x, *parts], module, epsilon=self.config["layer_norm_eps"])

    def heads(self, module: str, x: str, order: tuple[int, ...]) -> str:
        wide = self.node("Reshape", [self.linear(module, x), self.constant([1, -1, 2, 8], np.int64)], module)
        return self.node("Transpose", [wide], module, perm=order)

    def layer(self, i: int, x: str) -> str:
        stem = f"encoder.layer.{i}"
        q, k, v = (
            self.heads(f"{stem}.attention.self.{name}", x, order)
            for name, order in (("query", (0, 2, 1, 3)), ("key", (0, 2, 3, 1)), ("value", (0, 2, 1, 3)))
        )
        own = f"{stem}.attention.self"
        S = self.node("Mul", [self.node("MatMul", [q, k], own), self.constant(8**-0.5, np.float32)], own)
        P = self.node("Softmax", [S], own, axis=-1)
        y = self.node("Transpose", [self.node("MatMul", [P, v], own)], own, perm=(0, 2, 1, 3))
        y = self.node("Reshape", [y, self.constant([1, -1, 16], np.int64)], own)
        y = self.node("Add", [self.linear(f"{stem}.attention.output.dense", y), x], f"{stem}.attention.output")
        y = self.norm(f"{stem}.attention.output.LayerNorm", y)
        h = self.node("Gelu", [self.linear(f"{stem}.intermediate.dense", y)], f"{stem}.intermediate.act")
        z = self.node("Add", [self.linear(f"{stem}.output.dense", h), y], f"{stem}.output")
        return self.norm(f"{stem}.output.LayerNorm", z)

    def model(self) -> Any:
        parts = []
        indices = {
            "word": "input_ids",
            "position": self.constant(np.arange(7)[None], np.int64),
            "token_type": self.constant(np.zeros((1, 7)), np.int64),
        }
        for name, index in indices.items():
            table = f"embeddings.{name}_embeddings.weight"
            self.keep(table, self.w[table].astype(np.float32))
            parts.append(self.node("Gather", [table, index], f"embeddings.{name}_embeddings", axis=0))
        x = self.node("Add", [self.node("Add", parts[:2], "embeddings"), parts[2]], "embeddings")
        x = self.norm("embeddings.LayerNorm", x)
        for i in range(2):
            x = self.layer(i, x)
        self.keep("embeddings.position_ids", np.arange(12)[None])
        given = helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, [1, 7])
        result = helper.make_tensor_value_info(x, onnx.TensorProto.FLOAT, [1, 7, 16])
        graph = helper.make_graph(self.nodes, "main_graph", [given], [result], list(self.kept.values()))
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def folder(tmp_path: Path, model: Any, config: dict[str, Any]) -> Path:
    onnx.save_model(model, str(tmp_path / "model.onnx"))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def untrained(weights: Arrays) -> Arrays:
    """Gains of one and no biases, as before training: all these vectors are equal."""
    out = dict(weights)
    for name, w in weights.items():
        if w.ndim == 1:
            out[name] = np.ones_like(w) if "LayerNorm.weight" in name else np.zeros_like(w)
    return out


WAYS = {
    "named": {},
    "counted": {"paths": False},
    "gemm": {"fused": True},
    "gemm without paths": {"fused": True, "paths": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_states_are_those_of_transformers(way: str, tmp_path: Path) -> None:
    config, weights, inputs, states = reference("bert")
    made = Exporter(weights, config, **WAYS[way]).model()
    evaluated = (
        importlib.import_module("onnx.reference")
        .ReferenceEvaluator(made)
        .run(None, {"input_ids": inputs[:1].astype(np.int64)})[0]
    )
    np.testing.assert_allclose(evaluated[0], states[-1, 0], rtol=0, atol=1e-5)
    model = load_model(folder(tmp_path, made, config))
    np.testing.assert_allclose(model.hidden_states(inputs), states, rtol=0, atol=1e-5)
    # one file, with its configuration given
    alone = load_model(tmp_path / "model.onnx", config=config)
    np.testing.assert_array_equal(alone.hidden_states(inputs), model.hidden_states(inputs))
    assert alone.checkpoint.fingerprint == model.checkpoint.fingerprint


@pytest.mark.parametrize("ways", [{"identities": True}, {"identities": True, "paths": True}, {}])
def test_equal_vectors_that_are_kept_once(ways: dict[str, bool], tmp_path: Path) -> None:
    config, weights, _, _ = reference("bert")
    plain = untrained(weights)
    made = Exporter(plain, config, once=True, **ways).model()
    assert len(made.graph.initializer) < len(weights)
    expected = load_model(plain, config=config).hidden_states(IDS)
    np.testing.assert_allclose(load_model(folder(tmp_path, made, config)).hidden_states(IDS), expected, atol=1e-6)


def test_without_any_name_a_matrix_is_refused(tmp_path: Path) -> None:
    config, weights, _, _ = reference("bert")
    made = Exporter(untrained(weights), config, once=True, paths=False).model()
    with pytest.raises(ValueError, match=r"the matrix 'onnx::MatMul_\d+' in .*model\.onnx must have a bias of its own"):
        load_model(folder(tmp_path, made, config))


def test_tensors_in_files_of_their_own_and_a_folder_above(tmp_path: Path) -> None:
    config, weights, inputs, states = reference("bert")
    made = Exporter(weights, config).model()
    (tmp_path / "onnx").mkdir()
    onnx.save_model(
        made,
        str(tmp_path / "onnx" / "model.onnx"),
        save_as_external_data=True,
        location="model.onnx_data",
        size_threshold=0,
    )
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for source in (tmp_path, tmp_path / "onnx" / "model.onnx"):
        np.testing.assert_allclose(load_model(source).hidden_states(inputs), states, rtol=0, atol=1e-5)
    before = open_checkpoint(tmp_path).fingerprint
    data = tmp_path / "onnx" / "model.onnx_data"
    raw = bytearray(data.read_bytes())
    raw[2] ^= 1
    data.write_bytes(bytes(raw))
    assert open_checkpoint(tmp_path).fingerprint != before
    data.write_bytes(bytes(raw[:100]))
    with pytest.raises(ValueError, match=r"model\.onnx .*with its data beside it"):
        load_model(tmp_path).hidden_states(inputs)


def _insert(kind: str, domain: str = "") -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.graph.node.add().CopyFrom(helper.make_node(kind, ["input_ids"], ["y"], name="new", domain=domain))

    return change


def _unknown_tensor(model: Any) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.ones((7, 16), np.float32), "embedding_1"))
    model.graph.node.append(helper.make_node("Add", ["embedding_1", "out_1"], ["y"], name="node_add"))


def _second_use(model: Any) -> None:
    name = next(node.input[1] for node in model.graph.node if node.op_type == "MatMul")
    model.graph.node.append(helper.make_node("Transpose", [name], ["y"], name="t"))


def _other_name(model: Any) -> None:
    for tensor in model.graph.initializer:
        if tensor.name == "embeddings.word_embeddings.weight":
            tensor.name = "embeddings.factors.weight"


def _twice(model: Any) -> None:
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == "encoder.layer.0.attention.self.key.bias":
                node.input[i] = "encoder.layer.0.attention.self.query.bias"
        node.name = node.name.replace("/key/", "/query/")


REFUSED = {
    "packed integers": (_insert("DequantizeLinear"), r"'DequantizeLinear'"),
    "integer products": (_insert("MatMulInteger"), r"'MatMulInteger'"),
    "fused operations": (
        _insert("SkipLayerNormalization", "com.microsoft"),
        r"'SkipLayerNormalization' .*com\.microsoft",
    ),
    "folded tables": (_unknown_tensor, r"the tensor 'embedding_1' of shape \(7, 16\)"),
    "another use of a matrix": (_second_use, r"query\.weight .* an operation Transpose on it"),
    "unknown names": (_other_name, r"embeddings\.factors\.weight|embeddings\.word_embeddings"),
    "two matrices of one module": (_twice, r"query\.weight .* must be one matrix, received two"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(case: str, tmp_path: Path) -> None:
    config, weights, _, _ = reference("bert")
    made = Exporter(weights, config).model()
    change, message = REFUSED[case]
    change(made)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(folder(tmp_path, made, config))
    assert "model.onnx" in str(caught.value)


def test_the_epsilon_of_the_graph_counts(tmp_path: Path) -> None:
    config, weights, _, _ = reference("bert")
    made = Exporter(weights, config).model()
    with pytest.raises(
        ValueError, match=r"layer_norm_eps .* must be 0\.001, as the graph of the file has it, received 1e-12"
    ):
        load_model(folder(tmp_path, made, config | {"layer_norm_eps": 1e-12}))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    config, weights, _, _ = reference("bert")
    folder(tmp_path, Exporter(weights, config).model(), config)
    file = tmp_path / "model.onnx"
    whole = file.read_bytes()
    for size in np.linspace(3, len(whole) - 1, 20).astype(int):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.onnx"):
            load_model(file).hidden_states(IDS)


def test_a_header_that_starts_like_an_onnx_file(tmp_path: Path) -> None:
    """The length of a .safetensors header, 0x120708, starts with the bytes of an ONNX file."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(0x120708)
    data = len(header).to_bytes(8, "little") + header + np.ones(1, "<f4").tobytes()
    (tmp_path / "x").write_bytes(data)
    assert open_checkpoint(tmp_path / "x").tensor("a", 1) == 1.0


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    """Nothing but a ValueError escapes; names that are no text among them."""
    config, weights, inputs, _ = reference("bert")
    file = folder(tmp_path, Exporter(weights, config).model(), config) / "model.onnx"
    whole, draw = file.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        at = int(draw.integers(len(data)))
        data[at : at + int(draw.integers(3))] = draw.bytes(int(draw.integers(1, 3)))
        file.write_bytes(bytes(data))
        try:
            load_model(file).hidden_states(inputs)
        except ValueError as exc:
            refused += "model.onnx" in str(exc)
    assert refused > 50
