"""Attention of trained models: checkpoints, layers and heads, numpy forward passes, windows of text.

``bert``, ``gpt2`` and ``llama`` open a model, ``open_model`` any of the three; reading ``.safetensors`` and ``.gguf`` files and
tokenizing need the extra ``models``.
"""

from otattn.attention.feed_forward import FeedForward
from otattn.models.any_model import open_model
from otattn.models.bert import Bert, bert
from otattn.models.checkpoint import ArrayCheckpoint, Checkpoint
from otattn.models.gguf_file import GGUFCheckpoint
from otattn.models.gpt2 import GPT2, gpt2
from otattn.models.layer import ModelLayer, Projections
from otattn.models.llama import Llama, llama
from otattn.models.npz_file import NpzCheckpoint
from otattn.models.safetensors_file import SafetensorsCheckpoint
from otattn.models.shards import ShardedCheckpoint, open_checkpoint
from otattn.models.text import locate, read_text, text_windows
from otattn.models.tokenizer import load_tokenizer
from otattn.models.transformer import ModelConfig, Transformer

__all__ = [
    "GPT2",
    "ArrayCheckpoint",
    "Bert",
    "Checkpoint",
    "FeedForward",
    "GGUFCheckpoint",
    "Llama",
    "ModelConfig",
    "ModelLayer",
    "NpzCheckpoint",
    "Projections",
    "SafetensorsCheckpoint",
    "ShardedCheckpoint",
    "Transformer",
    "bert",
    "gpt2",
    "llama",
    "load_tokenizer",
    "locate",
    "open_checkpoint",
    "open_model",
    "read_text",
    "text_windows",
]
