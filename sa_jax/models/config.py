"""What a decoder is made of: sizes, attention paths, numerics."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from sa_jax.attention.registry import AttentionContext, get_attention

_CHOICES = {
    'gate': ('head', 'channel'),
    'permutation_scope': ('layer', 'example', 'head'),
    'compute_dtype': ('float32', 'bfloat16'),
    'remat': ('none', 'full', 'dots'),
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The architecture of a decoder. Hashable, so that it can be static under `jax.jit`.

    Attributes:
      vocab_size: Rows of the embedding.
      hidden_size: Width of the residual stream.
      num_layers: Number of layers.
      num_heads: Query heads per layer.
      num_kv_heads: Key and value heads per layer; divides `num_heads`.
      head_dim: Width of a head, even (RoPE rotates its two halves).
      intermediate_size: Hidden width of the SwiGLU.
      rope_theta: Base of the RoPE wavelengths.
      norm_eps: Added to the mean square in every RMSNorm.
      tie_embeddings: Whether the embedding also produces the logits.
      qk_norm: Whether queries and keys are RMS-normalised per head before RoPE.
      attention: Names of registered attention functions. Several are paths that share queries,
        keys and values, each scaled by a sigmoid gate before the one output projection.
      attention_options: By name, the options of each path, such as `{'stochastic':
        {'window': 64}}`.
      gate: Whether each path has a gate per 'head' or per 'channel' of each head. A single path
        has no gate.
      permutation_scope: Whether the permutations of a layer are shared by the batch and the
        heads ('layer'), drawn per example ('example'), or per key/value head ('head').
      compute_dtype: Type of activations and matrix products, 'float32' or 'bfloat16'.
        Parameters and logits are float32 either way.
      remat: What the backward pass recomputes in each layer: nothing ('none'), everything
        ('full'), or everything but the matrix products with the weights ('dots').

    Raises:
      ValueError: A field is out of range, names something unknown, or the options don't fit an
        attention function.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qk_norm: bool = False
    attention: tuple[str, ...] = ('stochastic', 'sliding_window')
    attention_options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    gate: str = 'head'
    permutation_scope: str = 'layer'
    compute_dtype: str = 'float32'
    remat: str = 'none'

    def __post_init__(self):
        if isinstance(self.attention, str):
            raise ValueError(
                f'attention must be a sequence of names, got {self.attention!r}; '
                f'write ({self.attention!r},) for a single path.'
            )
        object.__setattr__(self, 'attention', tuple(self.attention))
        object.__setattr__(self, 'attention_options', _freeze(self.attention_options))
        self._check_sizes()
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f'{name} must be one of {choices}, got {value!r}.')
        self._check_attention()

    @classmethod
    def from_config_dict(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Builds the configuration from the `model` section of a config file.

        Args:
          config: A mapping (such as `ml_collections.ConfigDict`) with the fields of this class.

        Returns:
          The validated configuration.

        Raises:
          ValueError: A field is unknown or missing, or its value is invalid.
        """
        values = config.to_dict() if hasattr(config, 'to_dict') else dict(config)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in values:
            if name not in fields:
                nearest = difflib.get_close_matches(name, fields, n=1)
                hint = f' Did you mean {nearest[0]!r}?' if nearest else ''
                raise ValueError(
                    f'The model has no field {name!r}.{hint} Fields: {", ".join(fields)}.'
                )
        missing = [
            name
            for name, field in fields.items()
            if field.default is field.default_factory is dataclasses.MISSING and name not in values
        ]
        if missing:
            raise ValueError(f'The model section lacks {", ".join(missing)}; set them.')
        return cls(**values)

    def _check_sizes(self):
        for name in (
            'vocab_size',
            'hidden_size',
            'num_layers',
            'num_heads',
            'num_kv_heads',
            'head_dim',
            'intermediate_size',
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f'{name} must be a whole number of at least 1, got {value!r}.')
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f'num_heads must be a multiple of num_kv_heads, so that each key/value head '
                f'serves as many query heads; got {self.num_heads} and {self.num_kv_heads}.'
            )
        if self.head_dim % 2:
            raise ValueError(
                f'head_dim must be even, since RoPE rotates the halves of a head into each '
                f'other; got {self.head_dim}.'
            )
        for name in ('rope_theta', 'norm_eps'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} must be positive, got {getattr(self, name)!r}.')

    def _check_attention(self):
        if not self.attention:
            raise ValueError("attention must name at least one path, such as ('stochastic',).")
        unused = set(self.attention_options) - set(self.attention)
        if unused:
            raise ValueError(
                f'attention_options has options for {sorted(unused)}, which attention='
                f'{self.attention} does not use; remove them or add the path.'
            )
        for name in self.attention:
            options = self.attention_options.get(name, FrozenDict())
            _check_path(name, options, self.num_heads, self.num_kv_heads, self.head_dim)


@functools.lru_cache
def _check_path(
    name: str, options: FrozenDict, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Tries an attention function on arrays without values: only it knows its options."""
    attend = get_attention(name).function

    def attend_to_zeros():
        query = jnp.zeros((1, 16, num_heads, head_dim))
        key = value = jnp.zeros((1, 16, num_kv_heads, head_dim))
        context = AttentionContext(key=jax.random.key(0))
        return attend(query, key, value, context, **options)

    try:
        jax.eval_shape(attend_to_zeros)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'attention_options[{name!r}] = {dict(options)} does not suit {name!r}: {error}'
        ) from error


def _freeze(options: Mapping[str, Mapping[str, Any]]) -> FrozenDict:
    """Makes the options hashable."""
    for name, values in options.items():
        if not isinstance(values, Mapping):
            raise ValueError(
                f'attention_options must map each path to a mapping of its options; '
                f'got {values!r} for {name!r}.'
            )
    return FrozenDict(
        {
            name: {
                option: tuple(value) if isinstance(value, list) else value
                for option, value in values.items()
            }
            for name, values in options.items()
        }
    )
