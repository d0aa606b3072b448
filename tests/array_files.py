"""Damaged ``.npz``, ``.npy`` and JSON files for the command line, and what it should make of them.

A file is right when the command ends in one line that begins with "otattn: " and exit code 2, or in the local constants
that its arrays have, computed here from the formula of softmax attention and numpy's own reader.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from otattn.cli import main

N = 3  # tokens of the constants that are compared


@dataclass(frozen=True)
class Outcome:
    """``kind`` is "value", "refused" or "fault"; ``text`` the line on stderr or what is wrong."""

    kind: str
    text: str
    seconds: float
    command: str
    mutation: str


# ------------------------------------------------------------------------------------------ good files


def weights(rng: np.random.Generator, dtype: Any = np.float64) -> dict[str, Any]:
    h, k, d, e = 2, 2, 3, int(rng.integers(1, 4))
    out: dict[str, Any] = {
        "query_weight": rng.normal(size=(h * k, d)).astype(dtype),
        "key_weight": rng.normal(size=(h * k, d)).astype(dtype),
        "value_weight": rng.normal(size=(h * e, d)).astype(dtype),
        "num_heads": h,
    }
    if rng.random() < 0.5:
        out |= {"query_bias": rng.normal(size=h * k), "key_bias": rng.normal(size=h * k), "value_bias": np.ones(h * e)}
    if rng.random() < 0.3:
        out |= {"output_weight": rng.normal(size=(3, h * e)), "output_bias": np.zeros(3), "notes": np.array("text")}
    return out


def matrices(rng: np.random.Generator, dtype: Any = np.float64) -> dict[str, Any]:
    stack = (2,) if rng.random() < 0.5 else ()
    return {
        "A": rng.normal(size=(*stack, 3, 3)).astype(dtype),
        "V": rng.normal(size=(*stack, 2, 3)).astype(dtype),
        **({"bias": rng.normal(size=(*stack, 3))} if rng.random() < 0.3 else {}),
    }


def tokens(rng: np.random.Generator, dtype: Any = np.float64) -> np.ndarray:
    shape = (4, 3) if rng.random() < 0.5 else (2, 4, 3)
    x = (2.0 * rng.normal(size=shape)).astype(dtype)
    return np.asfortranarray(x) if rng.random() < 0.3 else x


def npz_bytes(arrays: dict[str, Any], *, compressed: bool = False) -> bytes:
    stream = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(stream, **arrays)
    return stream.getvalue()


def npy_bytes(array: Any, *, pickled: bool = False) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=pickled)
    return stream.getvalue()


DTYPES = (np.float64, np.float32, np.float16, ">f8", np.int8, np.longdouble)


# ------------------------------------------------------------------------------------------ spoiling them


def flipped(rng: np.random.Generator, data: bytes) -> bytes:
    out = bytearray(data)
    head = min(len(out), 300)
    for _ in range(int(rng.integers(1, 6))):
        out[int(rng.integers(head if rng.random() < 0.5 else len(out)))] = int(rng.integers(256))
    return bytes(out)


def cut(rng: np.random.Generator, data: bytes) -> bytes:
    return data[: int(rng.integers(len(data)))]


def shifted(rng: np.random.Generator, data: bytes) -> bytes:
    at, size = int(rng.integers(len(data))), int(rng.integers(1, 20))
    if rng.random() < 0.5:
        return data[:at] + bytes(rng.integers(0, 256, size=size, dtype=np.uint8)) + data[at:]
    return data[:at] + data[at + size :]


def repeated(rng: np.random.Generator, data: bytes) -> bytes:
    return data + data[: int(rng.integers(1, len(data) + 1))]


WORDS = {
    b"<f8": (
        b"<f4",
        b">f8",
        b"|O8",
        b"<c8",
        b"|V8",
        b"<M8",
        b"<U2",
        b"|S8",
        b"<i8",
        b"<u8",
        b"|b1",
        b"<f0",
        b"f8,",
        b"<f2",
    ),
    b"False": (b"True ", b"0    ", b"None ", b"False"),
    b"shape": (b"Shape", b"descr", b"shape"),
    b"(4, 3)": (
        b"(3, 4)",
        b"(-4,3)",
        b"(9**9)",
        b"(4, 3L",
        b"(12, )",
        b"((4,3)",
        b"()    ",
        b"(4, 0)",
        b"[4, 3]",
        b"(99,3)",
    ),
    b"(3, 3)": (b"(9, 1)", b"(3, -)", b"(1, 9)", b"(3,3.)", b"(9,)  "),
    b"{'descr": (b"{{descr", b"{'descr", b"------" + b"--", b"__impor"),
    b"NUMPY\x01": (b"NUMPY\x02", b"NUMPY\x03", b"NUMPY\xff"),
    b"PK\x01\x02": (b"PK\x05\x06", b"PK\x03\x04"),
    b".npy": (b".npz", b".NPY", b"/npy"),
    b"query": (b"qeury", b"value"),
}


def reworded(rng: np.random.Generator, data: bytes) -> bytes:
    """A word of a header replaced by another of the same length, so that what follows stays in its place."""
    known = [word for word in WORDS if word in data]
    if not known:
        return flipped(rng, data)
    word = known[int(rng.integers(len(known)))]
    new = WORDS[word][int(rng.integers(len(WORDS[word])))]
    return data.replace(word, new[: len(word)].ljust(len(word)), int(rng.integers(1, 3)))


SPOIL = {"flipped": flipped, "cut": cut, "shifted": shifted, "repeated": repeated, "reworded": reworded}


def odd_header(rng: np.random.Generator) -> bytes:
    """Headers that a parser of Python expressions chokes on, or that claim what is not there."""
    body = [
        b"{'descr': " + b"-" * 9000 + b"'<f8', 'fortran_order': False, 'shape': (3,), }",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': " + b"(" * 3000 + b")" * 3000 + b", }",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (1" + b"0" * 4000 + b",), }",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (" + b"1, " * 2000 + b"), }",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (4, 3), 'more': 1}",
        b"{'descr': [('a', '<f8'), ('b', '<f8')], 'fortran_order': False, 'shape': (6,), }",
        b"{'descr': '|V99999999', 'fortran_order': False, 'shape': (0, 3), }",
        b"{'descr': '<U99999999', 'fortran_order': False, 'shape': (), }",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (0, 9223372036854775807, 9223372036854775807), }",
        b'{"descr": "<f8", "fortran_order": False, "shape": (4, 3)}',
        b"\xff" * 100,
        b"",
    ][int(rng.integers(12))]
    version = b"\x01\x00" + len(body).to_bytes(2, "little")
    if rng.random() < 0.3:
        version = b"\x02\x00" + (len(body) if rng.random() < 0.5 else 2**31).to_bytes(4, "little")
    return b"\x93NUMPY" + version + body + np.arange(12.0).tobytes()


def bomb(rng: np.random.Generator) -> bytes:
    """A small archive of zeros that would become hundreds of megabytes."""
    side = int(rng.choice([3000, 6000]))
    arrays = {"A": np.zeros((side, side), np.uint8), "V": np.zeros((1, side), np.uint8)}
    return npz_bytes(arrays, compressed=True)


def odd_archive(rng: np.random.Generator) -> bytes:
    stream = io.BytesIO()
    method = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)[int(rng.integers(4))]
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name in ("A.npy", "V.npy", "bias.npy")[: int(rng.integers(1, 4))]:
            content = odd_header(rng) if rng.random() < 0.5 else npy_bytes(np.eye(3))
            archive.writestr(name, content if rng.random() < 0.9 else b"")
    return stream.getvalue()


def odd_tokens(rng: np.random.Generator) -> bytes:
    """Arrays that are whole, and no tokens."""
    x = rng.normal(size=(4, 3))
    bad = x.copy()
    bad[1, 2] = (np.nan, np.inf, 1e308, -1e200)[int(rng.integers(4))]
    choices = [
        npy_bytes(bad),
        npy_bytes(x + 1j),
        npy_bytes(x.astype("S4")),
        npy_bytes(x.astype(np.float16).view("V2")),
        npy_bytes(np.array([{}, {}], dtype=object), pickled=True),
        npy_bytes(np.zeros((0, 3))),
        npy_bytes(x[None, None]),
        npy_bytes(x[:, :2]),
        npy_bytes(np.rec.fromarrays([x[:, 0]], names="a")),
        npy_bytes(x.astype(np.longdouble) * np.longdouble("1e4000")),
        npy_bytes(x * 1e-300),
        npy_bytes(x * 1e12),
    ]
    return choices[int(rng.integers(len(choices)))]


def odd_json(rng: np.random.Generator) -> bytes:
    good = json.dumps({"A": [[1.0, 0.0], [0.0, 1.0]], "V": [[1.0, 0.0]]}).encode()
    choices = [
        good,
        b"[" * 100_000,
        b"{" * 5000,
        cut(rng, good),
        flipped(rng, good),
        b'{"A": 1e999}',
        b"\xef\xbb\xbf" + good,
        b"",
    ]
    return choices[int(rng.integers(len(choices)))]


def case(seed: int) -> tuple[bytes, bytes, str]:
    """Bytes of the weights, bytes of the tokens, and what was done to them."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[int(rng.integers(len(DTYPES)))] if rng.random() < 0.5 else np.float64
    arrays = (weights if rng.random() < 0.5 else matrices)(rng, np.float64 if dtype is np.int8 else dtype)
    parts = [npz_bytes(arrays, compressed=rng.random() < 0.5), npy_bytes(tokens(rng, dtype))]
    side = int(rng.integers(2))
    roll = rng.random()
    if roll < 0.02:
        return (*parts, "none")
    if roll < 0.75:
        name = list(SPOIL)[int(rng.integers(len(SPOIL)))]
        for _ in range(int(rng.integers(1, 3))):
            parts[side] = SPOIL[name](rng, parts[side] or b"\0")
        return (*parts, f"{name} {('npz', 'npy')[side]}")
    if roll < 0.83:
        return parts[0], odd_header(rng), "odd header"
    if roll < 0.89:
        return odd_archive(rng), parts[1], "odd archive"
    if roll < 0.90:
        return bomb(rng), parts[1], "bomb"
    if roll < 0.96:
        return parts[0], odd_tokens(rng), "odd tokens"
    if roll < 0.98:
        parts[side] = odd_json(rng)
        return (*parts, "JSON")
    return parts[1], parts[0], "exchanged"


# ------------------------------------------------------------------------------------------ what should come out


READ = {"query_weight", "key_weight", "value_weight", "num_heads", "query_bias", "key_bias", "A", "V", "bias"}


def reference(weights_file: Path, tokens_file: Path) -> np.ndarray | None:
    """Spectral norms of the derivative at the first N tokens, ``(heads, windows)``; None when numpy reads no layer."""
    try:
        with np.load(weights_file, allow_pickle=False) as archive:
            arrays = {k: archive[k] for k in archive.files if k in READ}
        X = np.asarray(np.load(tokens_file, allow_pickle=False), dtype=np.float64)
        heads = _heads({k: np.asarray(v, dtype=np.float64) for k, v in arrays.items()})
        X = X[None] if X.ndim == 2 else X
        with np.errstate(all="ignore"):
            return np.array([[_constant(*head, x[:N]) for x in X] for head in heads])
    except Exception:
        return None


def _heads(w: dict[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """``(A, c, V)`` of each head, with logits ``<A x + c, y>``."""
    if "A" in w:
        A, V = (v if v.ndim == 3 else v[None] for v in (w["A"], w["V"]))
        c = w["bias"].reshape(len(A), -1) if "bias" in w else np.zeros(A.shape[:2])
        return list(zip(A, c, V, strict=True))
    h = int(w["num_heads"])
    Q, K, V = (w[f"{s}_weight"].reshape(h, -1, w[f"{s}_weight"].shape[1]) for s in ("query", "key", "value"))
    b = w["query_bias"].reshape(h, -1) if "query_bias" in w else np.zeros(Q.shape[:2])
    root = np.sqrt(Q.shape[1])
    return [(k.T @ q / root, k.T @ c / root, v) for q, k, c, v in zip(Q, K, b, V, strict=True)]


def _constant(A: np.ndarray, c: np.ndarray, V: np.ndarray, X: np.ndarray) -> float:
    """Spectral norm of the derivative of ``x_i -> sum_j P_ij V x_j``, each of its columns from the product rule."""
    n, d = X.shape
    L = (X @ A.T + c) @ X.T
    P = np.exp(L - L.max(axis=1, keepdims=True))
    P /= P.sum(axis=1, keepdims=True)
    columns = []
    for direction in np.eye(n * d).reshape(n * d, n, d):
        dL = direction @ A.T @ X.T + (X @ A.T + c) @ direction.T
        dP = P * (dL - (P * dL).sum(axis=1, keepdims=True))
        columns.append((dP @ X + P @ direction) @ V.T)
    return float(np.linalg.norm(np.reshape(columns, (n * d, -1)), 2))


COMMANDS = {
    "local": ["--n", str(N), "--json"],
    "bounds": ["--radius", "1", "--n", "2", "--json"],
    "stability": ["--pairs", "2", "--n", "2", "--json"],
    "report": ["--pairs", "2"],
}


def run(command: str, folder: Path, mutation: str) -> Outcome:
    """One command on the two files in ``folder``."""
    files = folder / "w.npz", folder / "x.npy"
    arguments = [command, "--quiet", "--weights", str(files[0]), "--tokens", str(files[1]), *COMMANDS[command]]
    if command == "report":
        arguments += ["--out", str(folder / "out")]
    out, err = io.StringIO(), io.StringIO()
    start = time.perf_counter()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        return Outcome("fault", f"{type(exc).__name__}: {exc}", time.perf_counter() - start, command, mutation)
    seconds = time.perf_counter() - start
    line = err.getvalue()
    if code == 2 and line.startswith("otattn: ") and line.count("\n") == 1 and not out.getvalue():
        return Outcome("refused", line.strip(), seconds, command, mutation)
    if code != 0 or line:
        return Outcome("fault", f"exit code {code}: {line or 'no line'}", seconds, command, mutation)
    if command == "local":
        expected = reference(*files)
        found = np.array(json.loads(out.getvalue())["particle"])[:, :, 0]
        if (
            expected is None
            or expected.shape != found.shape
            or not np.allclose(found, expected, rtol=1e-6, atol=1e-300)
        ):
            return Outcome("fault", f"{found.tolist()} in place of {expected}", seconds, command, mutation)
    return Outcome("value", "", seconds, command, mutation)


def one_file(seed: int, folder: Path) -> list[Outcome]:
    """The damaged pair of a seed through ``local``, now and then through the slower commands too."""
    parts = case(seed)
    (folder / "w.npz").write_bytes(parts[0])
    (folder / "x.npy").write_bytes(parts[1])
    commands = ["local"]
    if seed % 50 == 0:
        commands += ["stability", "bounds"]
    if seed % 1000 == 0:
        commands.append("report")
    return [run(command, folder, parts[2]) for command in commands]
