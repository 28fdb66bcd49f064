"""Decoders as checkpoints in Hugging Face's format."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from sa_jax.extras import optional_import
from sa_jax.models.pretrained.hf_config import config_fields
from sa_jax.models.pretrained.load import Pretrained
from sa_jax.models.pretrained.tensors import sources
from sa_jax.tokenization.tokenizers import HuggingFaceTokenizer


def save_pretrained(pretrained: Pretrained, directory: str | os.PathLike) -> None:
    """Writes config.json, model.safetensors, and tokenizer.json unless tokens are bytes or pieces.

    `load_pretrained` reads them back. What is a Llama other programs read as well; a decoder with
    other attention has an architecture of its own, which they refuse.

    Args:
      pretrained: The model, its tokenizer and context length.
      directory: Appears once it is complete; its parents are created.

    Raises:
      ValueError: The directory exists.
    """
    safetensors = optional_import('safetensors.numpy', 'safetensors files', 'pretrained')
    directory = Path(directory).expanduser()
    if directory.exists():
        raise ValueError(f'{directory} exists; choose a directory that does not.')
    model, tokenizer, context_length = pretrained
    table = sources(model.config)
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model))):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        found = table[name].tensors(np.asarray(jax.device_get(leaf)), model.config)
        tensors |= {key: np.ascontiguousarray(x) for key, x in found.items()}
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f'.{directory.name}.') as parent:
        folder = Path(parent) / directory.name
        folder.mkdir()
        fields = config_fields(model.config, context_length)
        (folder / 'config.json').write_text(json.dumps(fields, indent=2) + '\n')
        safetensors.save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
        if isinstance(tokenizer, HuggingFaceTokenizer):
            tokenizer.save(folder)
        folder.rename(directory)
