"""Formats of mutated files: tokenizers."""

from __future__ import annotations

import json
import random
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

from file_fuzz import FORMATS, Format
from fuzz_checkpoints import make_gguf, parsed_gguf
from tokenizers import Tokenizer

from otattn.models import load_tokenizer

TEXT = "the Cafés paris 12 t"

VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "caf",
    "##es",
    "##é",
    "##s",
    "paris",
    "1",
    "##2",
    "t",
    "Cafés",
]


def make_words(folder: Path, rng: random.Random) -> None:
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    settings = {
        "do_lower_case": rng.random() < 0.5,
        "strip_accents": rng.choice((None, True, False)),
        "model_max_length": 512,
    }
    settings["added_tokens_decoder"] = {"0": {"content": "[PAD]", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def read_tokens(folder: Path) -> Any:
    tokenizer = load_tokenizer(folder)
    return tokenizer.encode(TEXT, add_special_tokens=False).ids, tokenizer


def judge_words(folder: Path, value: Any) -> None:
    """WordPiece by its definition: the longest piece first."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    with open(folder / "vocab.txt", encoding="utf-8") as stream:
        words = {line.rstrip("\n"): i for i, line in enumerate(stream)}
    lower = settings.get("do_lower_case")
    lower = True if lower is None else lower
    strip = settings.get("strip_accents")
    text = TEXT.lower() if lower else TEXT
    if lower if strip is None else strip:
        text = "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")
    unknown = settings.get("unk_token") or "[UNK]"
    unknown = unknown["content"] if isinstance(unknown, dict) else unknown
    special = [settings.get(f"{key}_token") or f"[{key.upper()}]" for key in ("unk", "cls", "sep", "pad", "mask")]
    if not all(isinstance(token, str) and token.startswith("[") for token in special):
        return  # other special tokens may stand in the text
    ids: list[int] = []
    for word in text.split():
        pieces: list[int] | None = []
        at = 0
        while pieces is not None and at < len(word):
            starts = ("##" if at else "") + word
            size = next(
                (n for n in range(len(starts), 2 * bool(at), -1) if _piece(word, at, n, words) is not None), None
            )
            if size is None:
                pieces = None
            else:
                pieces.append(words[_piece(word, at, size, words) or ""])
                at += size - 2 * bool(at)
        ids += [words[unknown]] if pieces is None else pieces
    assert value[0] == ids, (value[0], ids)


def _piece(word: str, at: int, size: int, words: dict[str, int]) -> str | None:
    piece = ("##" if at else "") + word[at : at + size - 2 * bool(at)]
    return piece if len(piece) == size and piece in words else None


def make_tokenizer_json(folder: Path, rng: random.Random) -> None:
    make_words(folder, rng)
    (folder / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(folder)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").unlink()


def judge_tokenizer_json(folder: Path, value: Any) -> None:
    other = Tokenizer.from_file(str(folder / "tokenizer.json"))
    other.no_truncation()
    other.no_padding()
    assert value[0] == other.encode(TEXT, add_special_tokens=False).ids


def read_gguf_tokens(folder: Path) -> Any:
    tokenizer = load_tokenizer(folder / "x.gguf")
    return tokenizer.encode("ab the", add_special_tokens=False).ids, tokenizer


def judge_gguf_tokens(folder: Path, value: Any) -> None:
    """Byte-level BPE by its definition: the earliest merge first."""
    meta, _ = parsed_gguf(folder / "x.gguf", tensors=False)
    tokens, types = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.token_type", [])
    if any(code in (3, 4) and token in "ab the" for token, code in zip(tokens, types, strict=False)):
        return
    ranks = {tuple(m.split(" ")): i for i, m in reversed(list(enumerate(meta["tokenizer.ggml.merges"])))}
    index = {token: i for i, token in enumerate(tokens)}
    ids: list[int] = []
    for word in ("ab", "Ġthe"):
        pieces = [c for c in word if c in index]
        while True:
            found = [(ranks[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in ranks]
            if not found:
                break
            i = min(found)[1]
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        ids += [index[piece] for piece in pieces]
    if len(set(ranks)) == len(meta["tokenizer.ggml.merges"]):  # of a merge that stands twice the package takes the last
        assert value[0] == ids, (value[0], ids)


FORMATS |= {
    "gguf tokens": Format(("x.gguf",), make_gguf, read_gguf_tokens, judge_gguf_tokens),
    "vocab.txt": Format(("vocab.txt", "tokenizer_config.json"), make_words, read_tokens, judge_words),
    "tokenizer.json": Format(("tokenizer.json",), make_tokenizer_json, read_tokens, judge_tokenizer_json),
}
