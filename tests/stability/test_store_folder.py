"""The folder of a store: whose it is, where it may lie, what is refused in it, and a record that is not the best pair's."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import otattn as oa
from otattn.errors import StoreError, StoreWarning
from otattn.stability import DirectoryStore, study
from otattn.stability import folder as folder_module

SOFTMAX = oa.SoftmaxAttention([[1.0, 0.5], [0.0, -1.0]], [[1.0, 0.0], [0.3, 1.0]])
BALL = oa.samplers.uniform_ball_pairs(4, 2, 1.0)
study_of = partial(oa.stability_study, SOFTMAX, BALL, n_pairs=6, rng=0, progress=False)


def edit(folder: Path, line: int, change: Any) -> None:
    """Change a record and give it the right checksum, as one who knows the format could."""
    known = json.loads((folder / "study.json").read_text())["fingerprint"]
    lines = (folder / "chunks.jsonl").read_text().splitlines()
    record = json.loads(lines[line])
    change(record)
    body = [record[name] for name in ("indices", "numerators", "denominators")]
    record["checksum"] = hashlib.sha256((known + json.dumps(body)).encode()).hexdigest()[:32]
    lines[line] = json.dumps(record)
    (folder / "chunks.jsonl").write_text("\n".join(lines) + "\n")


def scaled(name: str, factor: float) -> Any:
    return lambda record: record.update({name: [factor * x for x in record[name]]})


@pytest.mark.parametrize(("name", "factor"), [("numerators", 2.0), ("numerators", 1.0001), ("denominators", 0.9)])
def test_a_best_record_that_is_not_its_pair_is_named(tmp_path: Path, name: str, factor: float) -> None:
    whole = study_of(store=tmp_path)
    best = int(whole.indices[whole.ratios.argmax()])
    edit(tmp_path, best, scaled(name, factor))
    with pytest.raises(StoreError, match=rf"line {best + 1} of .*chunks\.jsonl must hold .* of pair {best}"):
        study_of(store=tmp_path)
    lines = (tmp_path / "chunks.jsonl").read_text().splitlines()
    (tmp_path / "chunks.jsonl").write_text("".join(line + "\n" for k, line in enumerate(lines) if k != best))
    assert study_of(store=tmp_path).best.value == whole.best.value  # deleted, it is computed again


def test_the_best_value_is_the_largest_ratio_whatever_rounding_does(tmp_path: Path) -> None:
    whole = study_of(store=tmp_path)
    first, second = np.argsort(whole.ratios)[[-1, -2]]
    # what another processor may have written: the last digits differ
    edit(tmp_path, int(first), scaled("numerators", 1.0 - 4e-13))
    again = study_of(store=tmp_path)
    assert again.best.value == again.ratios.max() == whole.best.value
    edit(tmp_path, int(second), scaled("denominators", 1.0 + 4e-13))
    again = study_of(store=tmp_path)
    assert again.best.value == again.ratios.max() == whole.best.value
    # a rival by rounding alone loses
    rival = study._best(
        *(SOFTMAX, BALL, 2.0, (0, ())),
        *(
            whole.numerators * (1.0 + 3e-10 * (np.arange(6) == second)),
            whole.denominators.copy(),
            (),
            DirectoryStore(tmp_path),
        ),
    )
    assert rival.value == whole.best.value


def test_images_whose_rounding_is_felt_have_one_best_value() -> None:
    mean = oa.SoftmaxAttention(np.zeros((2, 2)), 1e-9 * np.eye(2), value_bias=[3.0, 4.0])
    found = oa.stability_study(mean, BALL, n_pairs=20, rng=1, progress=False)
    assert found.best.value == found.ratios.max()


class Restless:
    """Another pair each time, whatever the generator says."""

    calls = 0

    def __call__(self, rng: np.random.Generator) -> Any:
        Restless.calls += 1
        return rng.normal(size=(3, 2)), Restless.calls * rng.normal(size=(3, 2))


def test_a_sampler_with_a_will_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="must draw the same pair from the same generator"):
        oa.stability_study(SOFTMAX, Restless(), n_pairs=5, rng=0, progress=False)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, "x", None, True])
def test_records_that_are_no_distances_are_set_aside(tmp_path: Path, value: Any) -> None:
    whole = study_of(store=tmp_path)
    edit(tmp_path, 2, lambda record: record.update(indices=[-2] if value is True else record["indices"]))
    if value is not True:
        edit(tmp_path, 2, lambda record: record.update(numerators=[value]))
    with pytest.warns(StoreWarning, match="line 3 torn, damaged"):
        assert np.array_equal(study_of(store=tmp_path).ratios, whole.ratios)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    fcntl = pytest.importorskip("fcntl", reason="this system has no fcntl")

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, refuse)
    with pytest.raises(
        StoreError, match=r"locks are not available on the file system of .*; take a folder on a local disk"
    ):
        study_of(store=tmp_path)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EACCES])
def test_a_lock_that_another_process_holds_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fcntl = pytest.importorskip("fcntl", reason="this system has no fcntl")

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, refuse)
    (tmp_path / "owner").write_text("1234")
    with pytest.raises(StoreError, match=r"in use by another process \(number 1234\)"):
        study_of(store=tmp_path)


BARE = """
import os, sys
sys.modules["fcntl"] = None
for name in ("pread", "pwrite"):
    if hasattr(os, name):
        delattr(os, name)
import warnings
warnings.simplefilter("error")
import otattn as oa
from otattn.errors import StoreError
from otattn.stability import DirectoryStore
warnings.simplefilter("default")
attention = oa.SoftmaxAttention([[1.0, 0.5], [0.0, -1.0]], [[1.0, 0.0], [0.3, 1.0]])
study = [oa.stability_study(attention, oa.samplers.uniform_ball_pairs(4, 2, 1.0), n_pairs=6, rng=0, progress=False,
                            store=sys.argv[1]) for _ in range(2)]
print(study[0].ratios.tobytes() == study[1].ratios.tobytes(), study[0].best.value.hex())
store = DirectoryStore(sys.argv[1])
store.open(__import__("json").load(open(sys.argv[1] + "/study.json"))["fingerprint"])
try:
    DirectoryStore(sys.argv[1]).open("another")
except StoreError as exc:
    print("in use" in str(exc))
"""


def test_it_works_without_fcntl_and_pread(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", BARE, str(tmp_path / "s")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["True", study_of().best.value.hex(), "True"]


@pytest.mark.parametrize("name", ["lock", "owner", "study.json", "chunks.jsonl"])
def test_links_in_place_of_files_are_refused(tmp_path: Path, name: str) -> None:
    study_of(store=tmp_path / "s")
    file, target = tmp_path / "s" / name, tmp_path / "elsewhere"
    target.write_bytes(file.read_bytes())
    before = target.read_bytes()
    file.unlink()
    file.symlink_to(target)
    with pytest.raises(StoreError, match=rf"{name} must be a plain file, received a symbolic link"):
        study_of(store=tmp_path / "s")
    file.unlink()
    file.symlink_to(tmp_path / "nowhere")  # a link that dangles would be created
    with pytest.raises(StoreError, match="symbolic link"):
        study_of(store=tmp_path / "s")
    assert target.read_bytes() == before
    assert not (tmp_path / "nowhere").exists()
    file.unlink()
    file.mkdir()
    with pytest.raises(StoreError, match="a folder or a device"):
        study_of(store=tmp_path / "s")


def test_a_folder_that_is_a_link_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    whole = study_of(store=tmp_path / "link")
    assert np.array_equal(study_of(store=tmp_path / "real").ratios, whole.ratios)


def only_reads(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """No file can be opened for writing, as on a disk that is mounted to read (permissions do not stop root)."""
    opened = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_complete_store_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    whole = study_of(store=tmp_path)
    left = sorted(f.name for f in tmp_path.iterdir())
    only_reads(monkeypatch, code)
    again = study_of(store=tmp_path)
    assert np.array_equal(again.ratios, whole.ratios)
    assert again.best.value == whole.best.value
    with pytest.raises(StoreError, match="as long as pairs are missing"):
        study_of(store=tmp_path, n_pairs=7)
    with pytest.raises(StoreError, match="must belong to this study"):
        study_of(store=tmp_path, rng=1)
    assert sorted(f.name for f in tmp_path.iterdir()) == left
    (tmp_path / "new").mkdir()
    with pytest.raises(StoreError, match="can only be read"):
        study_of(store=tmp_path / "new")


def test_its_own_errors_are_not_dressed_up(tmp_path: Path) -> None:
    study_of(store=tmp_path)
    with pytest.raises(StoreError) as caught:
        study_of(store=tmp_path, rng=1)
    assert caught.value.__cause__ is None
    assert "folder that can be written" not in str(caught.value)
    study_of(store=tmp_path)  # and the lock is free again


@pytest.mark.parametrize(
    "address", ["s3://bucket/x", "file:///tmp/x", "gs://b", "http://host/x", "hdfs://host:1/x", "", " ", "a\0b"]
)
def test_addresses_and_nothing_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (study_of, partial(oa.sweep, SOFTMAX, n=2, n_pairs=2, progress=False)):
        with pytest.raises(ValueError, match="store must be"):
            call(store=address)
    with pytest.raises(ValueError, match="store must be"):
        DirectoryStore(address)
    if address.strip() and "\0" not in address:
        with pytest.raises(ValueError, match="store must be"):
            study_of(store=Path(address))
    assert not list(tmp_path.iterdir())


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    study_of(store="~/runs/a")
    study_of(store=Path("~/runs/b"))
    oa.sweep(SOFTMAX, n=2, n_pairs=2, progress=False, store="~/runs/c")
    assert sorted(f.name for f in (tmp_path / "home" / "runs").iterdir()) == ["a", "b", "c"]
    assert not (tmp_path / "~").exists()
    with pytest.raises(ValueError, match="write it in full"):
        study_of(store="~nobody-of-that-name/x")


@pytest.mark.parametrize("store", [3, object(), [], 1.5])
def test_what_is_no_store_is_refused(store: Any) -> None:
    with pytest.raises(TypeError, match="store must be"):
        study_of(store=store)


def test_a_failed_write_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        folder_module.write_whole(tmp_path / "a", b"content")
    with pytest.raises(StoreError, match="take a new folder"):
        study_of(store=tmp_path / "s")
    assert [f.name for f in tmp_path.iterdir()] == ["s"]


def test_the_folders_of_a_sweep_never_meet(tmp_path: Path) -> None:
    other = oa.SoftmaxAttention(SOFTMAX.A, 2 * SOFTMAX.V)
    third = oa.SoftmaxAttention(SOFTMAX.A, 3 * SOFTMAX.V)
    long = "x" * 300
    maps = {"a b": SOFTMAX, "a-b": other, "a/b": third, long: SOFTMAX, long + "y": other, "": third, "ä" * 200: SOFTMAX}
    maps |= {"A-b": third, "ö" * 200: other}
    options: dict[str, Any] = {
        "n": 2,
        "radius": (1.0, 1.0 + 1e-7, np.nextafter(1.0, 2.0)),
        "n_pairs": 3,
        "progress": False,
    }
    plain = oa.sweep(maps, **options)
    stored = oa.sweep(maps, store=tmp_path, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = oa.sweep(maps, store=tmp_path, **options)
    for a, b, c in zip(plain.studies, stored.studies, again.studies, strict=True):
        assert a.ratios.tobytes() == b.ratios.tobytes() == c.ratios.tobytes()
    names = [f.name for f in tmp_path.iterdir()]
    assert len({name.lower() for name in names}) == len(maps) * 3
    assert all(name.isascii() and len(name) <= 140 for name in names)
    seeds = oa.sweep(SOFTMAX, n=2, rng=(10**200, 10**200 + 1), n_pairs=2, progress=False, store=tmp_path / "seeds")
    assert len(list((tmp_path / "seeds").iterdir())) == len(seeds.studies) == 2
