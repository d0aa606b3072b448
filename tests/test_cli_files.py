"""The command line on files and folders that are not what it needs: one line, at once, in bounded memory."""

import importlib
import os
import pathlib
import subprocess
import sys
import tracemalloc

import matplotlib as mpl
import numpy as np
import pytest

from otattn import cli
from otattn._files import npz as archive
from otattn.cli import main
from otattn.data import load_layer

EYE = np.eye(3)
X = np.random.default_rng(0).normal(size=(4, 3))


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """What the commands import is no part of what they take."""
    for module in ("lipschitz.local.growth", "plotting", "stability", "report.build"):
        importlib.import_module(f"otattn.{module}")


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    np.savez(tmp_path / "layer.npz", A=EYE, V=EYE)
    np.save(tmp_path / "tokens.npy", X)
    return tmp_path


def arguments(folder: pathlib.Path, *, weights: str = "layer.npz", tokens: str = "tokens.npy") -> list[str]:
    return ["--weights", str(folder / weights), "--tokens", str(folder / tokens), "--quiet"]


def refused(capsys, run: list[str]) -> str:
    """The one line of a refusal, and no memory of the size of what the files claim."""
    tracemalloc.start()
    code = main(run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("otattn: ")
    assert captured.err.count("\n") == 1
    assert peak < 2**24
    return captured.err


# ----------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float64])
def test_an_archive_of_zeros_is_refused_by_its_header(folder, capsys, dtype):
    """The whole array is 72 MB as float64, the file far below 1 MB."""
    side = 3000
    big = np.broadcast_to(np.zeros((), dtype), (side, side))
    np.savez_compressed(folder / "bomb.npz", A=big, V=np.zeros((1, side)))
    assert (folder / "bomb.npz").stat().st_size < 2**20
    np.save(folder / "wide.npy", np.zeros((2, side)))
    text = refused(capsys, ["local", *arguments(folder, weights="bomb.npz", tokens="wide.npy")])
    assert f"received {8 * side * side} for 'A'" in text


def test_shapes_are_checked_before_anything_is_read(folder, capsys, monkeypatch):
    np.savez(folder / "other.npz", A=np.zeros((900, 900)), V=np.zeros((900, 900)))
    monkeypatch.setattr(archive, "_data", lambda *_: pytest.fail("an array was read"))
    assert "(n, 900)" in refused(capsys, ["local", *arguments(folder, weights="other.npz")])


def test_arrays_that_are_not_used_are_not_read(folder, monkeypatch, capsys):
    np.savez(folder / "own.npz", A=EYE, V=EYE, hidden_states=np.zeros((1, 2, 3)), token_ids=np.zeros(2), x=X)
    read = []
    original = archive._data
    monkeypatch.setattr(archive, "_data", lambda s, h, name: read.append(name.split("'")[1]) or original(s, h, name))
    layer = load_layer(folder / "own.npz", with_tokens=False)
    assert layer.hidden_states.size == 0
    assert sorted(read) == ["A", "V"]
    read.clear()
    monkeypatch.setattr(archive, "_data", original)
    with pytest.raises(ValueError, match="token_ids must hold one integer"):
        load_layer(folder / "own.npz")
    assert main(["local", *arguments(folder, weights="own.npz"), "--n", "4"]) == 0
    assert "head" in capsys.readouterr().out


def test_many_small_arrays_are_bounded_together(folder):
    zeros = np.zeros((2000, 1000))
    np.savez_compressed(folder / "many.npz", **{f"a{k}": zeros for k in range(5)})
    assert set(archive.read_npz(folder / "many.npz", ["a0", "a1"])) == {"a0", "a1"}
    with pytest.raises(ValueError, match="at most 67108864 bytes together"):
        archive.read_npz(folder / "many.npz")
    np.savez(folder / "many.npz", **{f"a{k}": zeros for k in range(5)})
    assert len(archive.read_npz(folder / "many.npz")) == 5  # the file itself is as large


def test_integers_count_as_what_they_become(folder):
    np.save(folder / "bytes.npy", np.zeros((2000, 1000), dtype=np.int8))
    with pytest.raises(ValueError, match="received 16000000"):
        archive.read_npy(folder / "bytes.npy", max_bytes=15 * 10**6)
    assert archive.read_npy(folder / "bytes.npy", max_bytes=16 * 10**6).shape == (2000, 1000)


# ----------------------------------------------------------------------------------- headers


def npy(folder: pathlib.Path, header: bytes, data: bytes = b"") -> str:
    (folder / "odd.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data)
    return "odd.npy"


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': " + b"-" * 9000 + b"'<f8', 'fortran_order': False, 'shape': (3,), }",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': " + b"(" * 4000 + b")" * 4000 + b"}",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (" + b"9" * 5000 + b",)}",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (" + b"1," * 2000 + b")}",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (4, 3), 'shape': (2, 3)}",
        b"{'descr': __import__('os').abort(), 'fortran_order': False, 'shape': (4, 3)}",
        b"{" * 9999,
    ],
)
def test_headers_are_read_and_never_evaluated(folder, capsys, header):
    assert "odd.npy must have" in refused(capsys, ["local", *arguments(folder, tokens=npy(folder, header, b"\0" * 96))])


def test_headers_of_other_writers_are_read(folder, capsys):
    for header in (
        b'{"shape": (4, 3), "fortran_order": False, "descr": "<f8"}',
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (4L, 3L), }   \n",
    ):
        np.testing.assert_array_equal(archive.read_npy(folder / npy(folder, header, X.tobytes())), X)
    for x in (X, X[:, 0], np.float64(2.0), np.asfortranarray(X), X.astype(">f4"), X.astype(np.longdouble), X > 0):
        np.save(folder / "x.npy", x)
        back = archive.read_npy(folder / "x.npy")
        assert back.dtype == np.asarray(x).dtype
        np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "JSON text"),
        (b'{"A": [[1]]}', "JSON text"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x80\x04K\x01.", "pickle"),
        (b"", "an empty file"),
        (b"hello", "something else"),
    ],
)
def test_other_kinds_of_files_are_named(folder, capsys, content, message):
    (folder / "odd").write_bytes(content)
    for odd in ({"weights": "odd"}, {"tokens": "odd"}):
        text = refused(capsys, ["local", *arguments(folder, **odd)])
        assert message in text
        assert "odd" in text


def test_exchanged_files_are_named(folder, capsys):
    run = ["local", *arguments(folder, weights="tokens.npy", tokens="layer.npz")]
    assert "must be an .npz file, received one array (.npy)" in refused(capsys, run)
    assert "must be an .npy file of one array" in refused(capsys, ["local", *arguments(folder, tokens="layer.npz")])


def test_two_arrays_in_one_file_are_not_one(folder, capsys):
    with open(folder / "two.npy", "wb") as stream:
        np.save(stream, X)
        np.save(stream, X)
    assert "must hold one array" in refused(capsys, ["local", *arguments(folder, tokens="two.npy")])


def test_bfloat16_says_what_to_convert(folder, capsys):
    np.save(folder / "half.npy", X.astype(np.float16).view("V2"))
    assert "convert it to float32" in refused(capsys, ["local", *arguments(folder, tokens="half.npy")])


# ----------------------------------------------------------------------------------- errors and output


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError("12 GiB"), "needs more memory than there is (MemoryError: 12 GiB)"),
        (RecursionError("deep"), "RecursionError: deep"),
        (RuntimeError("a\nb"), "otattn: a b\n"),
        (NotImplementedError("not there"), "not there"),
        (ZeroDivisionError("by zero"), "by zero"),
        (ModuleNotFoundError("no cvxpy"), "no cvxpy"),
    ],
)
def test_no_error_of_the_machine_is_a_traceback(folder, capsys, monkeypatch, error, text):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(cli, "load_layer", fail)
    assert text in refused(capsys, ["local", *arguments(folder)])


@pytest.mark.parametrize("command", ["report", "local", "bounds", "stability", "flow", "gradient-flow"])
def test_the_folder_is_checked_before_the_work(folder, capsys, monkeypatch, command):
    (folder / "taken").write_text("")
    monkeypatch.setattr(cli, "load_layer", lambda *_, **__: pytest.fail("work began"))
    for out in (folder / "taken", folder / "taken" / "below"):
        text = refused(capsys, [command, *arguments(folder), "--out", str(out)])
        assert "--out must be a folder that can be written" in text
    assert "--out must be the name of a folder" in refused(capsys, [command, *arguments(folder), "--out", ""])


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("local", ["--n", "3", "4", "--adversarial"]),
        pytest.param("bounds", ["--n", "2", "--radius", "1"], marks=pytest.mark.slow),
    ],
)
def test_numbers_without_latex(folder, capsys, monkeypatch, command, more):
    """The numbers are written; the picture that needs LaTeX is one line."""
    monkeypatch.setenv("PATH", str(folder))
    out = folder / "out"
    run = [command, *arguments(folder), *more, "--out", str(out)]
    with mpl.rc_context({"text.usetex": True}), pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.filters", [])
        assert main(run) == 0
    captured = capsys.readouterr()
    assert "head" in captured.out
    assert captured.err.startswith(f"otattn: warning: {command}.png was not drawn (")
    assert captured.err.count("\n") == 1
    assert [p.name for p in out.iterdir()] == [f"{command}.json"]


@pytest.mark.slow
def test_an_ascii_terminal(folder):
    """Exponents are printed with their error, whatever the terminal knows."""
    run = [sys.executable, "-m", "otattn", "local", *arguments(folder), "--n", "2", "3", "4"]
    texts = []
    for settings in ({"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {}):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONIO", "PYTHONUTF8", "LC_", "LANG"))}
        done = subprocess.run(run, env={**clean, **settings}, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == b""
        texts.append(done.stdout)
    assert b" +- " in texts[0]
    assert b" +- " in texts[1]


@pytest.mark.slow
def test_a_reader_that_leaves(folder):
    """``otattn ... | head``: no traceback, also at exit."""
    read, write = os.pipe()
    os.close(read)
    run = [sys.executable, "-m", "otattn", "local", *arguments(folder), "--n", "2"]
    done = subprocess.run(run, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == b""


@pytest.mark.slow
def test_limits_are_printed_with_their_status(capsys):
    assert main(["flow", "--quiet", "--n", "4", "--t-end", "0.1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "limit rank" in line]
    assert lines
    assert all(line.endswith(("(closed_form)", "(followed)", "(rank_only)", "(unsettled)")) for line in lines)
