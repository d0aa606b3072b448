"""What a file is, told by its content; small JSON files. Nothing in a file is ever executed."""

from __future__ import annotations

import importlib
import json
import re
import zipfile
from os import PathLike
from pathlib import Path
from typing import Any

from otattn._files import npz

__all__ = [
    "existing",
    "foreign",
    "is_folder",
    "is_onnx",
    "named_path",
    "need",
    "objects_once",
    "read_json",
    "refuse_pointer",
]

MAX_JSON = 16 * 2**20
"""Most bytes of a configuration or of the header of a checkpoint; a header of 100,000 tensors has about 10 MiB."""

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_LFS = b"version https://git-lfs"
_CONVERT = "save model.state_dict() of the loaded model with safetensors.torch.save_file"
_SIGNATURES: tuple[tuple[bytes, int, str, str], ...] = (
    (_LFS, 0, "a pointer of Git LFS, not the file itself", "run git lfs pull, or download the file"),
    (b"\x89HDF\r\n", 0, "an HDF5 file (Keras, TensorFlow)", "convert it to .safetensors"),
    (b"TFL3", 4, "a TFLite file", "take the .safetensors file of the model"),
    (b"\x93NUMPY", 0, "one array (.npy)", "give a mapping of names to arrays, or an .npz file"),
    (b"\x1f\x8b", 0, "a gzip archive", "unpack it"),
    (b"BZh", 0, "a bzip2 archive", "unpack it"),
    (b"\xfd7zXZ\0", 0, "an xz archive", "unpack it"),
    (b"\x28\xb5\x2f\xfd", 0, "a zstd archive", "unpack it"),
    (b"7z\xbc\xaf\x27\x1c", 0, "a 7z archive", "unpack it"),
    (b"Rar!", 0, "a rar archive", "unpack it"),
    (b"ustar", 257, "a tar archive", "unpack it"),
    *(
        (magic, 0, "a GGML file from before GGUF", "convert it to GGUF")
        for magic in (b"lmgg", b"tjgg", b"fmgg", b"algg")
    ),
)
_SUFFIXES = {
    ".onnx": ("an ONNX file", "open it with load_model"),
    ".msgpack": ("a Flax file", "convert it to .safetensors"),
    ".h5": ("a Keras file", "convert it to .safetensors"),
    ".ckpt": ("a training checkpoint", _CONVERT),
    ".bin": ("a file of torch", _CONVERT),
    ".pt": ("a file of torch", _CONVERT),
    ".pth": ("a file of torch", _CONVERT),
}


def need(module: str, *, extra: str = "models") -> Any:
    """The module, or an ImportError that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        package = module.split(".")[0]
        raise ImportError(
            f"reading this file needs the package {package!r}, which is not installed; "
            f'install the extra: pip install "otattn[{extra}]".'
        ) from exc


def named_path(path: str | PathLike[str]) -> Path:
    """The path that a caller means: ``~`` is the home folder; addresses and the empty string are no files."""
    text = str(path)
    if not text or _ADDRESS.match(text):
        raise ValueError(
            f"a file or folder must be given by its path, received {text!r}; download it first and give its path."
        )
    file = Path(path)
    try:
        return file.expanduser()
    except RuntimeError:  # no such user: a name that starts with ~
        return file


def is_folder(path: Path) -> bool:
    """False, too, for names that no file can have."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def existing(path: str | PathLike[str]) -> Path:
    """``path``, if it is a file."""
    return npz.existing(named_path(path))


def foreign(path: Path) -> tuple[str, str] | None:
    """What a file is that is no checkpoint of ours, and what to do; None when its content does not tell."""
    with open(path, "rb") as stream:
        start = stream.read(512)
    for magic, offset, what, fix in _SIGNATURES:
        if start[offset : offset + len(magic)] == magic:
            return what, fix
    text = start.lstrip().lower()
    if not start:
        return "an empty file", "copy it again"
    if text.startswith((b"<!doctype", b"<html")):
        return "a web page", "the download failed; download the file itself"
    if text.startswith((b"{", b"[")):
        return "JSON text", "name the file of the weights (or the index model.safetensors.index.json)"
    if start[:2] == b"PK":
        return _archive(path)
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a pickle (torch.save), which is never loaded because it can run code", _CONVERT
    if start[:1] == b"\x08" and start[2:3] == b"\x12":  # ir_version and producer_name of a protobuf
        return _SUFFIXES[".onnx"]
    return _SUFFIXES.get(path.suffix.lower())


def is_onnx(path: Path) -> bool:
    """An ONNX file, by its content or its name; the header of a .safetensors file may start like one."""
    with open(path, "rb") as stream:
        named = stream.read(9)[8:] == b"{"
    return not named and foreign(path) == _SUFFIXES[".onnx"]


def _archive(path: Path) -> tuple[str, str] | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception:  # zipfile raises many kinds for damaged archives
        return "a damaged zip archive", "copy it again"
    if any(name.endswith(".npy") for name in names):
        return None
    if any(name.endswith("data.pkl") for name in names):
        return "a file of torch (torch.save), which is never loaded because it can run code", _CONVERT
    return (
        f"a zip archive without arrays ({', '.join(sorted(names)[:3]) or 'empty'})",
        "unpack it and name a file in it",
    )


def refuse_pointer(path: Path) -> None:
    """A ValueError when ``path`` is a pointer of Git LFS: it reads as text, so that text files ask for this."""
    with open(path, "rb") as stream:
        if stream.read(len(_LFS)) == _LFS:
            raise ValueError(
                f"{path} is a pointer of Git LFS, not the file itself; run git lfs pull, or download the file."
            )


def objects_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose keys must be different."""
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = next(key for key in out if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return out


def read_json(path: Path, *, max_bytes: int = MAX_JSON) -> dict[str, Any]:
    """The object in a small JSON file."""
    size = existing(path).stat().st_size
    if size > max_bytes:
        raise ValueError(f"{path} must have at most {max_bytes} bytes, received {size}; is it a configuration file?")
    refuse_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=objects_once)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{path} must be a JSON file, but reading it failed ({exc}); it is damaged.") from exc
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, received {type(value).__name__}; it is another file.")
    return value
