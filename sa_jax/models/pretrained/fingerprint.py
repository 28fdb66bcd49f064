"""What identifies a model, whatever its files were called."""

from __future__ import annotations

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sa_jax.models.config import CHANGEABLE
from sa_jax.models.pretrained.load import Pretrained

# Values of each parameter that are looked at.
_SAMPLED = 1024


def fingerprint(pretrained: Pretrained) -> str:
    """A hash of a model: its architecture, some values of every parameter, its tokenizer.

    It is the same whatever the files were called, the patterns, and the devices.
    """
    model, tokenizer, context_length = pretrained
    digest = hashlib.sha256(f'{tokenizer.fingerprint} {context_length}'.encode())
    if tokenizer.adds_bos:
        digest.update(b'adds_bos')
    for field in dataclasses.fields(model.config):
        if field.name not in CHANGEABLE:
            digest.update(f'{field.name} {getattr(model.config, field.name)!r}'.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model)):
        sampled = np.linspace(0, leaf.size - 1, min(_SAMPLED, leaf.size)).astype(np.int64)
        values = leaf[np.unravel_index(sampled, leaf.shape)].astype(jnp.bfloat16)
        digest.update(jax.tree_util.keystr(path).encode() + np.asarray(values).tobytes())
    return digest.hexdigest()[:16]
