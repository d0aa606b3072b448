"""The sample layer: known constants of the real heads, and a user's own files, good and bad."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otattn._files.npz import read_npy, read_npz
from otattn.attention import SoftmaxAttention
from otattn.data import load_excerpt, load_layer, load_sample

# Spectral norms of D_X f, computed once by an independent implementation: window, head, n, value.
REFERENCE = [
    (0, 0, 16, 5.4807955550408005),
    (0, 5, 16, 5.943114894644713),
    (0, 11, 16, 5.755385029158341),
    (1, 0, 16, 4.871395880293458),
    (1, 5, 16, 5.403389633747608),
    (1, 11, 16, 2.936781267186128),
    (0, 0, 64, 8.1460734649037),
    (0, 0, 128, 10.353117995883977),
    (0, 5, 64, 9.012271537175454),
    (0, 5, 128, 10.101113280619979),
    (0, 11, 64, 4.454624032926621),
    (0, 11, 128, 3.898768493874821),
    (1, 0, 64, 8.538284012557872),
    (1, 0, 128, 10.130658464070937),
    (1, 5, 64, 7.7300692665657715),
    (1, 5, 128, 8.75212529960423),
    (1, 11, 64, 3.214194757537988),
    (1, 11, 128, 2.8379379213666436),
]


def largest_singular_value(J: Any) -> float:
    from scipy.sparse.linalg import eigsh

    # Lanczos on J^T J: the dense matrix would take 200 MB
    gram = J.H @ J
    start = np.random.default_rng(0).standard_normal(J.shape[1])
    return float(np.sqrt(eigsh(gram, k=1, v0=start, tol=1e-10, return_eigenvectors=False)[0]))


@pytest.mark.parametrize(("window", "head", "n", "value"), REFERENCE)
def test_real_heads_have_the_known_constants(window: int, head: int, n: int, value: float) -> None:
    layer = load_sample()
    J = layer.heads[head].jacobian(layer.tokens(window, n))
    assert largest_singular_value(J) == pytest.approx(value, rel=1e-8)


def test_sample_shapes_and_origin() -> None:
    layer = load_sample()
    assert layer.hidden_states.shape == (4, 128, 384)
    assert layer.hidden_states.dtype == np.float64
    assert not layer.hidden_states.flags.writeable
    assert len(layer.heads) == len(layer.outputs) == 12
    assert all(W.shape == (384, 32) for W in layer.outputs)
    assert layer.token_ids is not None
    assert layer.token_ids.shape == (4, 128)
    assert layer.tokens(3, 7).shape == (7, 384)
    assert layer.dim == 384
    for fact in ("all-MiniLM-L6-v2", "Apache", "Alice", "public domain"):
        assert fact in layer.origin
    assert load_sample() is layer
    assert "thought Alice" in load_excerpt()


def test_layer_is_the_torch_formula() -> None:
    layer = load_sample()
    from importlib.resources import files

    with np.load(str(files("otattn.data").joinpath("minilm_layer3.npz")), allow_pickle=False) as raw:
        w = {k: raw[k].astype(float) for k in raw.files}
    X = layer.tokens(2, 20)
    q, k, v = (X @ w[f"{s}_weight"].T + w[f"{s}_bias"] for s in ("query", "key", "value"))
    heads = []
    for h in range(12):
        s = slice(32 * h, 32 * h + 32)
        logits = q[:, s] @ k[:, s].T / np.sqrt(32)
        P = np.exp(logits - logits.max(1, keepdims=True))
        heads.append(P / P.sum(1, keepdims=True) @ v[:, s])
        np.testing.assert_allclose(layer.heads[h].on_tokens(X), heads[-1], atol=1e-12)
    out = np.hstack(heads) @ w["output_weight"].T + w["output_bias"]
    np.testing.assert_allclose(layer.attention.on_tokens(X), out, atol=1e-12)


@pytest.mark.parametrize(("window", "n"), [(4, 3), (-1, 3), (0, 129), (0, 0), (0.5, 3)])
def test_tokens_out_of_range(window: Any, n: int) -> None:
    with pytest.raises(ValueError, match=r"window|n must"):
        load_sample().tokens(window, n)


def weights(rng: np.random.Generator, h: int = 2, k: int = 3, d: int = 4, e: int = 2) -> dict[str, Any]:
    return {
        "query_weight": rng.normal(size=(h * k, d)),
        "key_weight": rng.normal(size=(h * k, d)),
        "value_weight": rng.normal(size=(h * e, d)),
        "num_heads": h,
    }


def saved(folder: Path, arrays: dict[str, Any], name: str = "layer.npz") -> Path:
    path = folder / name
    np.savez(path, **arrays)
    return path


def test_own_layer_without_biases_concatenates_its_heads(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w = weights(rng)
    X = rng.normal(size=(5, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", X)
    layer = load_layer(saved(tmp_path, w), tmp_path / "x.npy")
    assert layer.hidden_states.shape == (1, 5, 4)
    assert layer.token_ids is None
    own = [
        SoftmaxAttention.from_qkv(w["query_weight"][3 * h : 3 * h + 3], w["key_weight"][3 * h : 3 * h + 3], v)
        for h, v in enumerate(np.split(w["value_weight"], 2))
    ]
    both = np.hstack([a.on_tokens(layer.tokens()) for a in own])
    np.testing.assert_allclose(layer.attention.on_tokens(layer.tokens()), both, atol=1e-14)


def test_own_layer_with_everything(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    w = weights(rng) | {
        "query_bias": rng.normal(size=6),
        "key_bias": rng.normal(size=6),
        "value_bias": rng.normal(size=4),
        "output_weight": rng.normal(size=(5, 4)),
        "output_bias": rng.normal(size=5),
        "hidden_states": rng.normal(size=(2, 3, 4)).astype(np.float16),
        "token_ids": np.arange(6).reshape(2, 3),
        "unrelated": np.arange(3),
    }
    layer = load_layer(saved(tmp_path, w))
    X = layer.tokens(1)
    q, k, v = (X @ w[f"{s}_weight"].T + w[f"{s}_bias"] for s in ("query", "key", "value"))
    parts = []
    for h in range(2):
        E = np.exp(q[:, 3 * h : 3 * h + 3] @ k[:, 3 * h : 3 * h + 3].T / np.sqrt(3))
        parts.append(E / E.sum(1, keepdims=True) @ v[:, 2 * h : 2 * h + 2])
    expected = np.hstack(parts) @ w["output_weight"].T + w["output_bias"]
    np.testing.assert_allclose(layer.attention.on_tokens(X), expected, atol=1e-12)
    assert layer.token_ids is not None
    assert layer.token_ids.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("stacked", [False, True])
def test_own_matrices(tmp_path: Path, stacked: bool) -> None:
    rng = np.random.default_rng(2)
    h, d, e = (3 if stacked else 1), 4, 2
    A, V, c = rng.normal(size=(h, d, d)), rng.normal(size=(h, e, d)), rng.normal(size=(h, d))
    arrays = {"A": A, "V": V, "bias": c} if stacked else {"A": A[0], "V": V[0], "bias": c[0]}
    layer = load_layer(saved(tmp_path, arrays))
    X = rng.normal(size=(6, d))
    expected = sum(SoftmaxAttention(A[i], V[i], bias=c[i]).on_tokens(X) for i in range(h))
    np.testing.assert_allclose(layer.attention.on_tokens(X), expected, atol=1e-14)
    assert layer.hidden_states.shape == (0, 0, 4)
    with pytest.raises(ValueError, match="tokens_npy"):
        layer.tokens(0, 3)


def drop(*names: str) -> Any:
    return lambda w: [w.pop(name) for name in names]


BAD = [
    (drop("key_weight", "num_heads"), "missing: key_weight, num_heads"),
    (lambda w: w.update(num_heads=4), "multiple of num_heads = 4 rows"),
    (lambda w: w.update(num_heads=0), "num_heads must be one integer"),
    (lambda w: w.update(num_heads=2.5), "num_heads must be one integer"),
    (lambda w: w.update(num_heads=[2, 2]), "num_heads must be one integer"),
    (lambda w: w.update(key_weight=np.ones((4, 4))), "key_weight must have the shape"),
    (lambda w: w.update(value_weight=np.ones((4, 3))), "value_weight must have 4 columns"),
    (lambda w: w.update(query_bias=np.ones(5)), "query_bias must have 6 entries"),
    (lambda w: w.update(output_weight=np.ones((5, 3))), "output_weight must have shape"),
    (lambda w: w.update(output_bias=np.ones(5)), "output_bias must have 4 entries"),
    (lambda w: w.update(A=np.eye(4)), "either layer weights or the matrices"),
    (lambda w: w.update(query_weight=np.full((6, 4), np.nan)), "query_weight must be finite"),
    (lambda w: w.update(query_weight=np.ones((6, 4)) * 1j), "query_weight must be an array of real numbers"),
    (lambda w: w.update(hidden_states=np.ones((2, 3, 5))), "hidden_states must have shape"),
    (lambda w: w.update(hidden_states=np.ones((2, 3, 4)), token_ids=np.arange(5)), "token_ids must hold"),
    (lambda w: w.update(hidden_states=np.ones((2, 3, 4)), token_ids=np.ones((2, 3))), "token_ids must hold"),
    (lambda w: (w.clear(), w.update(A=np.eye(3))), "missing: V"),
    (lambda w: (w.clear(), w.update(A=np.eye(3), V=np.ones((2, 2, 3)))), "A and V must be one matrix each"),
    (lambda w: (w.clear(), w.update(A=np.eye(3), V=np.eye(3), bias=np.ones(2))), "bias must have shape"),
    (lambda w: (w.clear(), w.update(A=np.eye(3), V=np.eye(3), num_heads=2)), "num_heads must be 1"),
    (lambda w: w.clear(), "missing: query_weight"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_layers_are_refused(tmp_path: Path, spoil: Any, message: str) -> None:
    w = weights(np.random.default_rng(0))
    spoil(w)
    with pytest.raises(ValueError, match=message):
        load_layer(saved(tmp_path, w))


def test_bad_tokens_are_refused(tmp_path: Path) -> None:
    good = saved(tmp_path, weights(np.random.default_rng(0)))
    for k, bad in enumerate([np.ones((3, 5)), np.ones(4), np.ones((0, 4)), np.array([["a"]]), np.full((2, 4), np.inf)]):
        np.save(tmp_path / f"{k}.npy", bad)
        with pytest.raises(ValueError, match="tokens_npy must"):
            load_layer(good, tmp_path / f"{k}.npy")


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    trap, target = np.array([Trap(str(tmp_path / "sprung"))], dtype=object), tmp_path / "layer.npz"
    np.savez(target, query_weight=trap)
    with pytest.raises(ValueError, match="pickled objects, which are never loaded"):
        load_layer(target)
    np.save(tmp_path / "x.npy", trap)
    with pytest.raises(ValueError, match="never loaded"):
        read_npy(tmp_path / "x.npy")
    target.write_bytes(pickle.dumps(Trap(str(tmp_path / "sprung"))))
    with pytest.raises(ValueError, match=r"must be an .npz file"):
        load_layer(target)
    assert not (tmp_path / "sprung").exists()


def npy_bytes(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def test_a_header_that_claims_too_much_allocates_nothing(tmp_path: Path) -> None:
    lie = npy_bytes(np.ones(3)).replace(b"(3,), ", b"(900000000000,), ".ljust(6))
    lie = lie.replace(b" " * 11 + b"\n", b"\n")  # the header keeps its length
    with zipfile.ZipFile(tmp_path / "lie.npz", "w") as archive:
        archive.writestr("A.npy", lie)
    with pytest.raises(ValueError, match="must hold 7200000000000 bytes"):
        read_npz(tmp_path / "lie.npz")


def test_size_limits(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "zeros.npz", A=np.zeros(10**6), V=np.zeros(10**6))
    assert set(read_npz(tmp_path / "zeros.npz", max_bytes=16 * 10**6)) == {"A", "V"}
    assert set(read_npz(tmp_path / "zeros.npz", {"A"}, max_bytes=8 * 10**6)) == {"A"}
    for limit in (10**6, 9 * 10**6):
        with pytest.raises(ValueError, match=f"at most {limit} bytes"):
            read_npz(tmp_path / "zeros.npz", max_bytes=limit)
    np.save(tmp_path / "zeros.npy", np.zeros(10**5))
    with pytest.raises(ValueError, match="at most 1000 bytes"):
        read_npy(tmp_path / "zeros.npy", max_bytes=1000)


def test_fortran_order_and_scalars_survive(tmp_path: Path) -> None:
    F = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    np.savez(tmp_path / "f.npz", F=F, s=np.float32(2.5), empty=np.zeros((0, 3)), text=np.array("abc"))
    out = read_npz(tmp_path / "f.npz")
    np.testing.assert_array_equal(out["F"], F)
    assert out["s"].item() == 2.5
    assert out["empty"].shape == (0, 3)
    assert out["text"].item() == "abc"


@pytest.mark.parametrize("compressed", [False, True])
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, compressed: bool) -> None:
    rng = np.random.default_rng(3)
    path = tmp_path / "layer.npz"
    (np.savez_compressed if compressed else np.savez)(path, **weights(rng))
    whole = path.read_bytes()
    refused = 0
    for k in range(150):
        data = bytearray(whole)
        if k % 3 == 0:
            data = data[: rng.integers(0, len(data))]
        else:
            for place in rng.integers(0, len(data), 1 + k % 5):
                data[place] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(data))
        try:
            load_layer(path)
        except ValueError:  # anything else fails the test
            refused += 1
    assert refused >= 100  # the rest hit bytes that zip never reads, or members that were not needed


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must be an existing file"):
        load_layer(tmp_path / "none.npz")
    with pytest.raises(ValueError, match="must be a file"):
        load_layer(tmp_path)
    (tmp_path / "empty.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must be an .npz file"):
        load_layer(tmp_path / "empty.npz")
    np.save(tmp_path / "x.npy", np.ones(3))
    with pytest.raises(ValueError, match=r"must be an .npz file"):
        load_layer(tmp_path / "x.npy")
    with pytest.raises(ValueError, match=r"npy file"):
        read_npy(tmp_path / "empty.npz")


@pytest.mark.parametrize("space", ["\x0b", "\x1c", "\x85", "\xa0"])
def test_headers_hold_no_odd_spaces(tmp_path: Path, space: str) -> None:
    data = npy_bytes(np.ones((4, 3)))
    for old, new in ((b"  \n", space.encode("latin-1") + b" \n"), (b"False,", b"False ")):
        (tmp_path / "x.npy").write_bytes(data.replace(old, new))
        with pytest.raises(ValueError, match="must have a header"):
            read_npy(tmp_path / "x.npy")


def test_an_archive_behind_other_bytes_is_none(tmp_path: Path) -> None:
    path = saved(tmp_path, weights(np.random.default_rng(0)))
    path.write_bytes(b"#!" + path.read_bytes())
    assert zipfile.is_zipfile(path)
    with pytest.raises(ValueError, match=r"must be an .npz file"):
        load_layer(path)
