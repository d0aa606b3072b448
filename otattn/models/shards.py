"""Which files a checkpoint is made of: one file, a folder, an index of shards."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.models.checkpoint import ArrayCheckpoint, Checkpoint
from otattn.models.files import existing, foreign, is_folder, named_path, read_json
from otattn.models.gguf_file import GGUFCheckpoint
from otattn.models.npz_file import NpzCheckpoint
from otattn.models.safetensors_file import SafetensorsCheckpoint

__all__ = ["ShardedCheckpoint", "open_checkpoint"]

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r".*-(\d{5})-of-(\d{5})\.[^.]+", re.DOTALL)
_FOREIGN = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.ckpt")


class ShardedCheckpoint(Checkpoint):
    """The tensors of several ``.safetensors`` files that an index (``model.safetensors.index.json``) lists.

    Raises
    ------
    FileNotFoundError
        A shard is missing.
    ValueError
        The index is damaged, or does not fit its shards.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = existing(path)
        self.origin, self.folder = str(self.path), self.path.parent
        listed = read_json(self.path).get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
            raise ValueError(f"{self.path} must hold weight_map, the file of each tensor; it is no index, or damaged.")
        self._files: dict[str, SafetensorsCheckpoint] = {}
        for file in sorted(set(listed.values())):
            if Path(file).name != file or file in ("", ".."):
                raise ValueError(f"{self.path} must name files beside it, received {file!r}; it is damaged.")
            self._files[file] = SafetensorsCheckpoint(self.folder / file)
        self._where = {name: self._files[file] for name, file in listed.items()}
        held = [(name, part) for part in self._files.values() for name in part.shapes]
        strange = [name for name, part in held if self._where.get(name) is not part]
        missing = [name for name, part in self._where.items() if name not in part]
        if strange or missing:
            name = (strange + missing)[0]
            raise ValueError(
                f"{self.path} and its {len(self._files)} files must tell the same tensors, but differ in {name!r} and "
                f"{len(strange) + len(missing) - 1} others; copy all files again."
            )
        self._shapes = {name: part.shapes[name] for name, part in self._where.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def _read(self, name: str, rows: NDArray[np.int64] | None) -> NDArray[Any]:
        return self._where[name]._read(name, rows)

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for _, part in sorted(self._files.items()):
            digest.update(bytes.fromhex(part.fingerprint))
        return digest.hexdigest()


def open_checkpoint(source: Checkpoint | Mapping[str, Any] | str | PathLike[str]) -> Checkpoint:
    """The tensors of a file (``.safetensors``, ``.gguf``, ``.npz``, told apart by content), of a folder, or of a mapping.

    Parameters
    ----------
    source : path, mapping of arrays, or Checkpoint
        A file, ``model.safetensors.index.json``, or a folder that holds ``model.safetensors``, that index, or one GGUF
        model, split or not. One shard alone is refused.

    Raises
    ------
    FileNotFoundError
    ImportError
        The extra ``models`` is not installed.
    ValueError
        A damaged file, one of another format (the message says which), a part of a model.
    """
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, Mapping):
        return ArrayCheckpoint(source)
    path = named_path(source)
    file = existing(_in_folder(path) if is_folder(path) else path)
    with open(file, "rb") as stream:
        magic = stream.read(4)
    if magic == b"GGUF":
        return GGUFCheckpoint(file)
    if magic[:2] == b"PK":
        what = foreign(file)
        if what is None:
            return NpzCheckpoint(file)
        raise ValueError(f"{file} must be a .safetensors, .gguf or .npz file, received {what[0]}; {what[1]}.")
    if file.name.endswith(".safetensors.index.json"):
        return ShardedCheckpoint(file)
    shard = _SHARD.fullmatch(file.name)
    out = SafetensorsCheckpoint(file)
    if shard is not None and int(shard[2]) > 1:
        raise ValueError(
            f"{file} is shard {int(shard[1])} of {int(shard[2])}; give the folder or the index {_INDEX} with all shards."
        )
    return out


def _in_folder(folder: Path) -> Path:
    """The file of the weights in a folder."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        raise ValueError(
            f"{folder} must hold a whole model, but has an adapter ({adapter.name}), which is not applied here; merge it "
            "into the weights first, or name the file of the weights to read them alone."
        )
    for name in (_WHOLE, _INDEX):
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.gguf"))
    firsts = [file for file in found if (part := _SHARD.fullmatch(file.name)) is None or int(part[1]) == 1]
    if len(firsts) == 1:
        return firsts[0]
    others = sorted(file.name for pattern in _FOREIGN for file in folder.glob(pattern))
    have = [file.name for file in found] + others
    raise ValueError(
        f"{folder} must be a file, or a folder with {_WHOLE}, {_INDEX} or one .gguf model, received "
        f"{', '.join(have[:4]) or 'none of them'}; "
        + ("save the model with safetensors." if others else "name the file of the weights.")
    )
