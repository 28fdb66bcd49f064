"""Published checkpoints: their configurations, tensors and files."""

from sa_jax.models.pretrained.load import Pretrained, load_pretrained
from sa_jax.models.pretrained.save import save_pretrained

__all__ = ['Pretrained', 'load_pretrained', 'save_pretrained']
