"""The decoder: configuration, layers, sharding, published checkpoints, decoding and generation."""

from sa_jax.models.generation import generate
from sa_jax.models.pretrained import Pretrained, load_pretrained, save_pretrained

__all__ = ['Pretrained', 'generate', 'load_pretrained', 'save_pretrained']
