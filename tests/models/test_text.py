"""Windows of text, tokenizers beside the weights, files of installed packages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic as syn

from otattn.models import load_tokenizer, locate, read_text, text_windows

tokenizers = pytest.importorskip("tokenizers", reason="the extra `models` (tokenizers) is not installed")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklm"]


def tokenizer(*, special: bool = True) -> Any:
    words = WORDS if special else [w for w in WORDS if w not in ("[CLS]", "[SEP]")]
    out = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    out.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return out


TEXT = " ".join("abcdefghijklm")


def letters(ids: np.ndarray) -> list[str]:
    return ["".join(WORDS[i] for i in row) for row in ids]


def test_windows_follow_one_another() -> None:
    ids = text_windows(TEXT, tokenizer(), length=5)
    assert ids.dtype == np.int64
    assert letters(ids) == ["[CLS]abc[SEP]", "[CLS]def[SEP]", "[CLS]ghi[SEP]", "[CLS]jkl[SEP]"]
    assert letters(text_windows(TEXT, tokenizer(), length=5, count=2)) == letters(ids)[:2]


def test_windows_at_a_stride_start_at_the_same_places() -> None:
    both = [letters(text_windows(TEXT, tokenizer(), length=n, stride=4)) for n in (4, 6)]
    assert both == [
        ["[CLS]ab[SEP]", "[CLS]ef[SEP]", "[CLS]ij[SEP]"],
        ["[CLS]abcd[SEP]", "[CLS]efgh[SEP]", "[CLS]ijkl[SEP]"],
    ]
    # a window may end with the text, and no more fit
    assert letters(text_windows("a b c d", tokenizer(), length=6, stride=1)) == ["[CLS]abcd[SEP]"]


def test_special_tokens_may_be_others_or_none() -> None:
    assert text_windows(TEXT, tokenizer(special=False), length=6).shape == (2, 6)
    assert letters(text_windows("a b", tokenizer(), length=4, ends=("[PAD]", "[UNK]"))) == ["[PAD]ab[UNK]"]
    with pytest.raises(ValueError, match="ends must be tokens"):
        text_windows(TEXT, tokenizer(), length=6, ends=("[X]", "[SEP]"))


def test_text_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_text(TEXT, encoding="utf-8")
    assert np.array_equal(text_windows(file, tokenizer(), length=5), text_windows(TEXT, tokenizer(), length=5))
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match="UTF-8"):
        read_text(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 2}, "length must be at least 3"),
        ({"length": 5, "count": 5}, "must fill 5 windows of 3 tokens 3 apart, received 13 tokens, enough for 4"),
        ({"length": 20}, "must fill 1 windows"),
        ({"length": 5, "stride": 0}, "stride must be at least 1"),
    ],
)
def test_text_that_is_too_short(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_windows(TEXT, tokenizer(), **options)


def test_tokenizer_beside_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="the extra `models` (safetensors) is not installed")
    w = syn.bert_weights(np.random.default_rng(0), layers=1)
    model = syn.bert(syn.write_safetensors(tmp_path / "model.safetensors", w), num_heads=2)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json or vocab\.txt"):
        load_tokenizer(model)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b", "c"]))
    assert load_tokenizer(model).encode("ab c", add_special_tokens=False).tokens == ["a", "##b", "c"]
    limited = tokenizer()
    limited.enable_truncation(2)
    limited.enable_padding(length=9)
    limited.save(str(tmp_path / "tokenizer.json"))
    for source in (model, tmp_path / "model.safetensors", tmp_path / "tokenizer.json"):
        assert load_tokenizer(source).encode("a b c").tokens == ["a", "b", "c"]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer of the tokenizers package"):
        load_tokenizer(model)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="JSON file"):
        load_tokenizer(model)
    with pytest.raises(FileNotFoundError, match="built from arrays"):
        load_tokenizer(syn.bert(w, num_heads=2))


def test_files_of_packages() -> None:
    assert locate("numpy", "version.py").is_file()
    with pytest.raises(FileNotFoundError, match="must hold a file"):
        locate("numpy", "no such file")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps otattn-no-such-package"):
        locate("otattn-no-such-package", "x")
