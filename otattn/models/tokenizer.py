"""The tokenizer of a model, from the files beside its weights or from its GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from otattn.models.checkpoint import Checkpoint
from otattn.models.files import existing, is_folder, named_path, need, read_json, refuse_pointer
from otattn.models.formats.gguf_file import GGUFCheckpoint
from otattn.models.load import open_checkpoint
from otattn.models.transformer import Transformer

__all__ = ["load_tokenizer", "named_failure"]

MAX_VOCABULARY = 64 * 2**20
_SETTINGS = "tokenizer_config.json"
_WORDPIECE = ("Bert", "DistilBert", "Electra", "MobileBert", "MPNet", "Retribert")
_CONTROL, _USER = 3, 4
_PROBES = ("a", "the", "\U0010fffd", "\u6f22", "\u00e9", "7", "!", "x" * 200)
"""Words of all kinds, most of them in no vocabulary: a tokenizer that cannot encode them is damaged."""
_SPECIAL = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}


def load_tokenizer(source: Transformer | Checkpoint | str | PathLike[str]) -> Any:
    """The tokenizer of a model: ``tokenizer.json`` or ``vocab.txt`` beside its weights, or that of its GGUF file.

    ``tokenizer_config.json`` beside them is honoured: case, accents, Chinese characters, prefix space, names of the special
    tokens.

    Parameters
    ----------
    source : Transformer, Checkpoint or path
        A model or checkpoint read from files; what the loaders of models take (a folder, a file of weights, an index of
        shards, a GGUF file); or ``tokenizer.json`` or ``vocab.txt`` itself.

    Returns
    -------
    tokenizers.Tokenizer
        Without truncation and padding. Control tokens in a text are one token each.

    Raises
    ------
    FileNotFoundError
        There is no tokenizer.
    ImportError
        The extra ``models`` is not installed.
    ValueError
        The tokenizer is damaged, contradicts its settings, or is of a kind that is not known here.
    """
    library = need("tokenizers")
    checkpoint: Any = source.checkpoint if isinstance(source, Transformer) else source
    if isinstance(checkpoint, Mapping):
        raise FileNotFoundError("arrays have no tokenizer; give the path of tokenizer.json.")
    if isinstance(checkpoint, Checkpoint):
        if isinstance(checkpoint, GGUFCheckpoint):
            return _from_gguf(checkpoint, library)
        if checkpoint.folder is None:
            raise FileNotFoundError(
                "the model was built from arrays, which have no tokenizer; give the path of tokenizer.json."
            )
        return _from_folder(checkpoint.folder, library)
    path = named_path(checkpoint)
    if is_folder(path):
        if any((path / name).is_file() for name in ("tokenizer.json", "vocab.txt")) or not any(path.glob("*.gguf")):
            return _from_folder(path, library)
        return load_tokenizer(open_checkpoint(path))
    with open(existing(path), "rb") as stream:
        if stream.read(4) == b"GGUF":
            return _from_gguf(GGUFCheckpoint(path), library)
    settings = path.name in ("config.json", _SETTINGS) or path.name.endswith(".index.json")
    if path.suffix == ".json" and not settings:
        return _from_json(path, library)
    return _from_words(path, library) if path.name == "vocab.txt" else _from_folder(path.parent, library)


def _from_folder(folder: Path, library: Any) -> Any:
    if (folder / "tokenizer.json").is_file():
        return _from_json(folder / "tokenizer.json", library)
    if (folder / "vocab.txt").is_file():
        return _from_words(folder / "vocab.txt", library)
    raise FileNotFoundError(f"{folder} must hold tokenizer.json or vocab.txt, received neither; copy it there.")


def _settings(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json``, its switches checked to be true, false or null."""
    file = folder / _SETTINGS
    out = read_json(file) if file.is_file() else {}
    for key in ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space", "do_basic_tokenize"):
        if not (out.get(key) is None or isinstance(out[key], bool)):
            raise ValueError(f"{key} in {file} must be true, false or null, received {out[key]!r}; it is damaged.")
    return out


@contextmanager
def named_failure(message: str) -> Iterator[None]:
    """Every failure of the tokenizers package, which raises plain exceptions and panics, as one ValueError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as exc:  # a panic in Rust is no Exception
        raise ValueError(f"{message} ({type(exc).__name__}: {str(exc)[:200]}).") from exc


def _from_json(file: Path, library: Any) -> Any:
    size = file.stat().st_size
    if size > MAX_VOCABULARY:
        raise ValueError(f"{file} must have at most {MAX_VOCABULARY} bytes, received {size}; is it a tokenizer?")
    refuse_pointer(file)
    try:
        with named_failure(f"{file} must be a tokenizer of the tokenizers package, but is not"):
            tokenizer = library.Tokenizer.from_file(str(file))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            unknown = getattr(tokenizer.model, "unk_token", None)
            if unknown is not None and tokenizer.model.token_to_id(unknown) is None:
                raise ValueError(f"the token {unknown!r} for unknown words is not in the vocabulary")
            for word in _PROBES:
                tokenizer.encode(word, add_special_tokens=False)
    except ValueError:
        read_json(file, max_bytes=MAX_VOCABULARY)  # tells damaged JSON from another kind of file
        raise
    _honour(tokenizer, _settings(file.parent), file, library)
    return tokenizer


def _honour(tokenizer: Any, settings: Mapping[str, Any], file: Path, library: Any) -> None:
    """The settings beside ``tokenizer.json`` win where a tokenizer has such a switch, else they must agree with it."""
    normalizer, pre = tokenizer.normalizer, tokenizer.pre_tokenizer
    if isinstance(normalizer, library.normalizers.BertNormalizer):
        names = {"do_lower_case": "lowercase", "tokenize_chinese_chars": "handle_chinese_chars"}
        for key, name in names.items():
            if settings.get(key) is not None:
                setattr(normalizer, name, settings[key])
        if "strip_accents" in settings:  # null: as the case is
            normalizer.strip_accents = settings["strip_accents"]
        tokenizer.normalizer = normalizer
    if isinstance(pre, library.pre_tokenizers.ByteLevel) and settings.get("add_prefix_space") is not None:
        pre.add_prefix_space = settings["add_prefix_space"]
        tokenizer.pre_tokenizer = pre
    for key, letter, changed in (("do_lower_case", "A", "a"), ("strip_accents", "é", "e")):
        does = normalizer is not None and changed in normalizer.normalize_str(letter)
        if settings.get(key) is not None and does != settings[key]:
            raise ValueError(
                f"{key} in {file.parent / _SETTINGS} must be as {file.name} does, {str(does).lower()}, received "
                f"{str(settings[key]).lower()}; correct one of the two files."
            )


def _from_words(file: Path, library: Any) -> Any:
    """BERT's WordPiece from the lines of a vocabulary."""
    refuse_pointer(file)
    if file.stat().st_size > MAX_VOCABULARY:
        raise ValueError(f"{file} must have at most {MAX_VOCABULARY} bytes; is it a vocabulary?")
    settings = _settings(file.parent)
    kind = str(settings.get("tokenizer_class") or "BertTokenizer")
    if (
        kind.removesuffix("Fast").removesuffix("Tokenizer") not in _WORDPIECE
        or settings.get("do_basic_tokenize") is False
    ):
        raise ValueError(
            f"{file} must be the vocabulary of a BERT tokenizer that splits words, received tokenizer_class {kind!r} and "
            f"do_basic_tokenize {settings.get('do_basic_tokenize')!r}; save tokenizer.json beside it."
        )
    try:
        words = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as exc:
        raise ValueError(f"{file} must be UTF-8 text, received other bytes ({exc}); it is damaged.") from exc
    vocabulary = {word: i for i, word in enumerate(words)}
    special = {key: _content(settings.get(key), name) for key, name in _SPECIAL.items()}
    if special["unk_token"] not in vocabulary:
        raise ValueError(
            f"{file} must hold the token {special['unk_token']!r} for unknown words, received {len(words)} other lines; it is "
            "no vocabulary of BERT, or damaged."
        )
    _no_strange_tokens(settings, vocabulary, file)
    lower = settings.get("do_lower_case")
    chinese = settings.get("tokenize_chinese_chars")
    with named_failure(f"{file} must be a vocabulary of WordPiece, but is not"):
        tokenizer = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token=special["unk_token"]))
        tokenizer.normalizer = library.normalizers.BertNormalizer(
            lowercase=True if lower is None else lower,
            strip_accents=settings.get("strip_accents"),
            handle_chinese_chars=True if chinese is None else chinese,
        )
        tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = library.decoders.WordPiece()
        tokenizer.add_special_tokens([token for token in special.values() if token in vocabulary])
        ends = [(special[key], vocabulary.get(special[key])) for key in ("sep_token", "cls_token")]
        if None not in (ends[0][1], ends[1][1]):
            tokenizer.post_processor = library.processors.BertProcessing(*ends)
    return tokenizer


def _content(token: Any, default: str) -> str:
    """A special token, which is a text or an object with its text."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else default


def _no_strange_tokens(settings: Mapping[str, Any], vocabulary: Mapping[str, int], file: Path) -> None:
    """Added tokens of the settings stand in the vocabulary at the same place."""
    added = settings.get("added_tokens_decoder") or {}
    for index, token in added.items() if isinstance(added, dict) else [("?", added)]:
        text = _content(token, "")
        if str(vocabulary.get(text)) != str(index):
            raise ValueError(
                f"added_tokens_decoder in {file.parent / _SETTINGS} must repeat lines of {file.name}, received {text!r} at "
                f"{index}; save tokenizer.json, which holds added tokens."
            )


def _from_gguf(checkpoint: GGUFCheckpoint, library: Any) -> Any:
    """Byte-level BPE from the metadata."""
    kind, split = (checkpoint.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    known = {"gpt-2": False, "smollm": True}
    if kind != "gpt2" or split not in known:
        raise ValueError(
            f"{checkpoint.origin} must have a byte-level BPE tokenizer split like {sorted(known)}, received {kind!r} and "
            f"{split!r}; give token_ids from the model's own tokenizer."
        )
    tokens, merges = (_strings(checkpoint, key) for key in ("tokens", "merges"))
    index = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2 or not {pair[0], pair[1], "".join(pair)} <= index.keys():
            raise ValueError(
                f"tokenizer.ggml.merges in {checkpoint.origin} must be pairs of tokens whose union is a token, received "
                f"{merge!r}; the vocabulary is damaged."
            )
    if len(index) != len(tokens):
        raise ValueError(f"tokenizer.ggml.tokens in {checkpoint.origin} must be different; the vocabulary is damaged.")
    pre = library.pre_tokenizers
    with named_failure(f"{checkpoint.origin} must hold a vocabulary of byte-level BPE, but does not"):
        tokenizer = library.Tokenizer(library.models.BPE(index, pairs))
        parts = [pre.Digits(individual_digits=True)] if known[split] else []
        tokenizer.pre_tokenizer = pre.Sequence([*parts, pre.ByteLevel(add_prefix_space=False)])
        tokenizer.decoder = library.decoders.ByteLevel()
        for token, code in _types(checkpoint, tokens):
            added = library.AddedToken(token, special=code == _CONTROL, normalized=False)
            (tokenizer.add_special_tokens if code == _CONTROL else tokenizer.add_tokens)([added])
    return tokenizer


def _strings(checkpoint: GGUFCheckpoint, key: str) -> list[str]:
    full = f"tokenizer.ggml.{key}"
    out = checkpoint.items(full)
    if not all(isinstance(item, str) for item in out):
        raise ValueError(f"{full} in {checkpoint.origin} must be strings, received numbers; the vocabulary is damaged.")
    return out


def _types(checkpoint: GGUFCheckpoint, tokens: list[str]) -> list[tuple[str, int]]:
    """Tokens that are whole wherever they stand in a text: control tokens and those of the user."""
    key = "tokenizer.ggml.token_type"
    if key not in checkpoint.lists:
        return []
    codes = checkpoint.items(key)
    if len(codes) != len(tokens) or not set(codes) <= set(range(7)):
        raise ValueError(
            f"{key} in {checkpoint.origin} must hold one code from 0 to 6 for each of {len(tokens)} tokens, received "
            f"{len(codes)} entries; the vocabulary is damaged."
        )
    return [(token, code) for token, code in zip(tokens, codes, strict=True) if code in (_CONTROL, _USER) and token]
