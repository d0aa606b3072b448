"""Attention of trained models: checkpoints, layers and heads, numpy forward passes, windows of text.

:func:`load_model` opens a model of any known family, :func:`random` makes an untrained one; reading ``.safetensors`` and ``.gguf``
files and tokenizing need the extra ``models``, ``.onnx`` files the extra ``onnx``.
"""

from otattn.attention.feed_forward import FeedForward
from otattn.models.checkpoint import ArrayCheckpoint, Checkpoint, NpzCheckpoint
from otattn.models.config import ModelConfig
from otattn.models.formats.gguf_file import GGUFCheckpoint
from otattn.models.formats.onnx_file import ONNXCheckpoint
from otattn.models.formats.safetensors_file import SafetensorsCheckpoint, ShardedCheckpoint
from otattn.models.heads import Projections
from otattn.models.layer import ModelLayer
from otattn.models.load import load_model, open_checkpoint, random
from otattn.models.text import locate, model_path, read_text, text_windows
from otattn.models.tokenizer import load_tokenizer
from otattn.models.transformer import Transformer

__all__ = [
    "ArrayCheckpoint",
    "Checkpoint",
    "FeedForward",
    "GGUFCheckpoint",
    "ModelConfig",
    "ModelLayer",
    "NpzCheckpoint",
    "ONNXCheckpoint",
    "Projections",
    "SafetensorsCheckpoint",
    "ShardedCheckpoint",
    "Transformer",
    "load_model",
    "load_tokenizer",
    "locate",
    "model_path",
    "open_checkpoint",
    "random",
    "read_text",
    "text_windows",
]
