"""Tokenizers beside the weights: settings are honoured, damaged vocabularies name their file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic as syn
from gguf_writer import HEADS, KV, write

from otattn.models import load_model, load_tokenizer, open_checkpoint, text_windows

tokenizers = pytest.importorskip("tokenizers", reason="the extra `models` (tokenizers) is not installed")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "Paris", "paris", "cased", "café", "cafe", "CAFÉ", "漢", "字", "漢字", "##s"]


def vocabulary(folder: Path, words: list[str] | None = None, **settings: Any) -> Path:
    (folder / "vocab.txt").write_text("\n".join(WORDS if words is None else words) + "\n", encoding="utf-8")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def split(folder: Path, text: str) -> list[str]:
    return load_tokenizer(folder).encode(text, add_special_tokens=False).tokens


# the settings, and the tokens of "Paris cased café 漢字"
HONOURED: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["paris", "cased", "cafe", "漢", "字"]),
    ({"do_lower_case": False, "strip_accents": False}, ["Paris", "cased", "café", "漢", "字"]),
    ({"do_lower_case": False}, ["Paris", "cased", "café", "漢", "字"]),
    ({"do_lower_case": False, "strip_accents": True}, ["Paris", "cased", "cafe", "漢", "字"]),
    ({"do_lower_case": True, "strip_accents": False}, ["paris", "cased", "café", "漢", "字"]),
    ({"do_lower_case": True, "strip_accents": None}, ["paris", "cased", "cafe", "漢", "字"]),
    ({"tokenize_chinese_chars": False}, ["paris", "cased", "cafe", "漢字"]),
    ({"do_lower_case": None, "tokenizer_class": "BertTokenizer"}, ["paris", "cased", "cafe", "漢", "字"]),
]


@pytest.mark.parametrize(("settings", "tokens"), HONOURED, ids=str)
def test_settings_beside_vocab_txt(settings: dict[str, Any], tokens: list[str], tmp_path: Path) -> None:
    assert split(vocabulary(tmp_path, **settings), "Paris cased café 漢字") == tokens


@pytest.mark.parametrize(("settings", "tokens"), HONOURED, ids=str)
def test_settings_beside_tokenizer_json(settings: dict[str, Any], tokens: list[str], tmp_path: Path) -> None:
    """The file itself says the opposite of the first settings; a switch that is set beside it wins."""
    plain = load_tokenizer(vocabulary(tmp_path))
    plain.save(str(tmp_path / "tokenizer.json"))
    vocabulary(tmp_path, words=["[UNK]"], **settings)
    assert split(tmp_path, "Paris cased café 漢字") == tokens


def test_special_tokens_of_the_settings(tmp_path: Path) -> None:
    words = ["<pad>", "<unk>", "<s>", "</s>", "paris"]
    names = {"pad_token": "<pad>", "unk_token": {"content": "<unk>"}, "cls_token": "<s>", "sep_token": "</s>"}
    tokenizer = load_tokenizer(vocabulary(tmp_path, words, **names))
    assert tokenizer.encode("paris rome").tokens == ["<s>", "paris", "<unk>", "</s>"]
    assert tokenizer.encode("paris <s>", add_special_tokens=False).tokens == ["paris", "<s>"]
    with pytest.raises(ValueError, match=r"vocab\.txt must hold the token '\[UNK\]'"):
        load_tokenizer(vocabulary(tmp_path, words, do_lower_case=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_lower_case": "no"}, "do_lower_case in .* must be true, false or null"),
        ({"strip_accents": 1}, "strip_accents in .* must be true, false or null"),
        ({"tokenizer_class": "RobertaTokenizer"}, "'RobertaTokenizer'"),
        ({"do_basic_tokenize": False}, "do_basic_tokenize False"),
        ({"added_tokens_decoder": {"99": {"content": "[NEW]"}}}, r"'\[NEW\]' at 99"),
        ({"added_tokens_decoder": {"5": {"content": "[PAD]"}}}, r"'\[PAD\]' at 5"),
    ],
)
def test_settings_that_are_not_honoured_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(vocabulary(tmp_path, **settings))
    repeated = {"added_tokens_decoder": {"0": {"content": "[PAD]"}, "1": {"content": "[UNK]"}}}
    assert split(vocabulary(tmp_path, **repeated), "paris") == ["paris"]


def test_settings_that_contradict_tokenizer_json_are_refused(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFD(), tokenizers.normalizers.Lowercase()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"do_lower_case": true}')
    assert split(tmp_path, "A") == ["a"]
    settings.write_text('{"do_lower_case": false}')
    with pytest.raises(
        ValueError, match=r"do_lower_case in .*tokenizer_config\.json must be as tokenizer\.json does, true"
    ):
        load_tokenizer(tmp_path)
    tokenizer.normalizer = None
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert split(tmp_path, "A") == ["[UNK]"]
    settings.write_text('{"strip_accents": true}')
    with pytest.raises(ValueError, match=r"strip_accents in .* must be as tokenizer\.json does, false"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("prefix", [True, False])
def test_the_prefix_space_of_byte_level_tokenizers(prefix: bool, tmp_path: Path) -> None:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=not prefix)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": prefix}))
    assert split(tmp_path, "a") == (["Ġ", "a"] if prefix else ["a"])


def test_whatever_the_loaders_take(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="the extra `models` (safetensors) is not installed")
    w = syn.bert_weights(np.random.default_rng(0))
    file = syn.write_safetensors(tmp_path / "model.safetensors", w)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 3, "model_type": "bert"}')
    with pytest.raises(FileNotFoundError, match=r"must hold tokenizer\.json or vocab\.txt"):
        load_tokenizer(tmp_path)
    vocabulary(tmp_path)
    np.savez(tmp_path / "x.npz", **w)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    sources = [
        tmp_path,
        str(tmp_path),
        file,
        syn.bert(tmp_path),
        syn.bert(file),
        open_checkpoint(file),
        tmp_path / "x.npz",
    ]
    sources += [tmp_path / name for name in ("vocab.txt", "config.json", "tokenizer_config.json")]
    sources += [tmp_path / "model.safetensors.index.json", syn.bert(tmp_path / "x.npz")]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for source in sources:
        assert load_tokenizer(source).encode("Paris", add_special_tokens=False).tokens == ["paris"]
    for arrays in (w, open_checkpoint(w)):
        with pytest.raises(FileNotFoundError, match=r"arrays.* have no tokenizer"):
            load_tokenizer(arrays)
    with pytest.raises(FileNotFoundError, match="existing file"):
        load_tokenizer(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe\xff", "UTF-8"),
        (b"", r"must hold the token '\[UNK\]'"),
        (b"\n\n\n", r"must hold the token '\[UNK\]'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
    ],
)
def test_damaged_vocabularies(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "vocab.txt" in str(caught.value)


def test_line_ends_of_windows_and_repeated_lines(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes("\r\n".join([*WORDS, "paris"]).encode())
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("paris", add_special_tokens=False).ids == [
        len(WORDS)
    ]  # the last one counts, as in BERT's code


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', '{"a": 1e999}']
)
def test_damaged_tokenizer_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer.json" in str(caught.value)


@pytest.mark.parametrize("words", [["a"], ["a", "the", "7", "!"]])
def test_a_vocabulary_without_the_unknown_token(words: list[str], tmp_path: Path) -> None:
    """It encodes its own words, and would fail on the first other one."""
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 9,
    }
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "model": model | {"vocab": {w: i for i, w in enumerate(words)}}}))
    with pytest.raises(ValueError, match=r"tokenizer\.json must be a tokenizer .*\[UNK\]"):
        load_tokenizer(tmp_path)


# byte-level BPE in GGUF files

TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<tool>",
    "a",
    "b",
    "c",
    "Ġ",
    "ab",
    "Ġab",
    "1",
    "2",
    "12",
    "<",
    ">",
    "t",
    "|",
    "x",
]
TYPES = [3, 3, 4, *[1] * (len(TOKENS) - 3)]


def packed(folder: Path, **change: Any) -> Path:
    entries = {
        "tokens": TOKENS,
        "types": TYPES,
        "merges": ["a b", "Ġ ab", "1 2"],
        "pre": "smollm",
        "model": "gpt2",
    } | change

    def fill(writer: Any) -> None:
        writer.add_tokenizer_model(entries["model"])
        writer.add_tokenizer_pre(entries["pre"])
        writer.add_token_list(entries["tokens"])
        if entries["types"] is not None:
            writer.add_token_types(entries["types"])
        writer.add_token_merges(entries["merges"])

    w = syn.llama_weights(np.random.default_rng(5), heads=HEADS, kv=KV, vocab=len(entries["tokens"]))
    write(folder / "x.gguf", w, change=fill)
    return folder / "x.gguf"


def test_control_tokens_in_a_text_are_one_token(tmp_path: Path) -> None:
    file = packed(tmp_path)
    for source in (file, tmp_path, load_model(file)):
        tokenizer = load_tokenizer(source)
        assert tokenizer.encode("<|im_start|>ab ab<tool>a12").tokens == [
            *("<|im_start|>", "ab", "Ġab", "<tool>", "a"),
            *("1", "2"),
        ]
        assert tokenizer.get_vocab_size() == len(TOKENS)
    ids = text_windows("<|im_start|>ab ab<tool>a12", tokenizer, length=7)
    np.testing.assert_array_equal(ids, [[1, 7, 8, 2, 3, 9, 10]])


def test_without_types_no_token_is_special(tmp_path: Path) -> None:
    tokens = load_tokenizer(packed(tmp_path, types=None)).encode("<t>a").tokens
    assert tokens == ["<", "t", ">", "a"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merges": ["ab"]}, r"tokenizer\.ggml\.merges .* received 'ab'"),
        ({"merges": ["a b c"]}, "received 'a b c'"),
        ({"merges": ["a z"]}, "received 'a z'"),
        ({"merges": ["b c"]}, "received 'b c'"),
        ({"merges": ["a b", ""]}, "received ''"),
        ({"tokens": ["a"] * 17}, "merges|different"),
        ({"types": [1] * 16}, "one code from 0 to 6 for each of 17 tokens"),
        ({"types": [9] * 17}, "one code from 0 to 6"),
        ({"pre": "default"}, "byte-level BPE tokenizer split like"),
        ({"pre": "llama-bpe"}, "'llama-bpe'"),
        ({"model": "llama"}, "received 'llama'"),
    ],
)
def test_damaged_and_unknown_vocabularies_of_gguf(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = packed(tmp_path, **change)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(file)
    assert "x.gguf" in str(caught.value)


@pytest.mark.parametrize("word", [b"Paris", b"a b"])
def test_vocabularies_that_are_not_utf8(word: bytes, tmp_path: Path) -> None:
    tokens = [*TOKENS[:-1], "Paris"] if word == b"Paris" else TOKENS
    file = packed(tmp_path, tokens=tokens)
    data = file.read_bytes()
    assert word in data
    file.write_bytes(data.replace(word, b"\xff" + word[1:], 1))
    with pytest.raises(ValueError, match="UTF-8") as caught:
        load_tokenizer(file)
    assert "x.gguf" in str(caught.value)


def test_a_tokenizer_that_fails_on_a_text() -> None:
    class Broken:
        def token_to_id(self, name: str) -> None:
            return None

        def encode(self, text: str, add_special_tokens: bool) -> None:
            raise RuntimeError("no such piece")

    with pytest.raises(ValueError, match=r"must encode the text, but failed \(RuntimeError: no such piece\)"):
        text_windows("a b c", Broken(), length=3)
