"""What a decoder is made of: sizes, attention paths, numerics."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from sa_jax.attention.registry import AttentionContext, get_attention
from sa_jax.models import rope

# What may change in a model that has its parameters.
CHANGEABLE = frozenset(
    {
        'attention',
        'attention_options',
        'compute_dtype',
        'layer_attention',
        'permutation_scope',
        'remat',
    }
)
# No model comes near; a file from elsewhere may claim any size.
MAX_LAYERS = 1 << 14
MAX_SIZE = 1 << 24
_CHOICES = {
    'gate': ('head', 'channel', 'softmax', 'none'),
    'permutation_scope': ('layer', 'example', 'head'),
    'compute_dtype': ('float32', 'bfloat16'),
    'remat': ('none', 'full', 'dots'),
}


class Pattern(NamedTuple):
    """The attention paths of a layer.

    Attributes:
      attention: Their names.
      options: By name, the options of each.
    """

    attention: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]]

    @property
    def paths(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Name and options of each path."""
        return [(name, self.options.get(name, FrozenDict())) for name in self.attention]


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
      intermediate_size: Hidden width of the SwiGLU, of each expert's where there are experts.
      num_experts: Feed-forward layers to choose among for each token; 0 for a single one.
      num_experts_per_token: How many of them a token goes through.
      normalize_experts: Whether the weights of a token's experts are scaled to sum to one.
      rope_theta: Base of the RoPE wavelengths.
      rope_scaling: How wavelengths are stretched for longer contexts, as `rope.frequencies` takes
        it: `rope_type` and its parameters. Empty for not at all.
      norm_eps: Added to the mean square in every RMSNorm.
      tie_embeddings: Whether the embedding also produces the logits.
      qk_norm: Whether queries and keys are RMS-normalised per head before RoPE.
      attention: Names of registered attention functions. Several are paths that share queries,
        keys and values, each scaled by a sigmoid gate before the one output projection.
      attention_options: By name, the options of each path, such as `{'stochastic':
        {'window': 64}}`.
      layer_attention: Layers that attend in another way, as many paths each: an index or a slice of
        layers as text, such as '0' or '-3:', to the `attention` and `attention_options` there.
        Where several name a layer, the last one holds.
      gate: What scales each path: a sigmoid per 'head', or per 'channel' of each head, each
        independent of the others; shares of a 'softmax' over the paths, per head; or 'none', so
        that paths are added up.
      gate_single_path: Whether a single path is gated as well, by a sigmoid.
      permutation_scope: Whether the permutations of a layer are shared by the batch and the
        heads ('layer'), drawn per example ('example'), or per key/value head ('head').
      compute_dtype: Type of activations and matrix products, 'float32' or 'bfloat16'. Logits are
        float32 either way.
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
    num_experts: int = 0
    num_experts_per_token: int = 0
    normalize_experts: bool = True
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qk_norm: bool = False
    attention: tuple[str, ...] = ('stochastic', 'sliding_window')
    attention_options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    layer_attention: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    gate: str = 'head'
    gate_single_path: bool = False
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
        object.__setattr__(self, 'rope_scaling', FrozenDict(_hashable(self.rope_scaling)))
        self._check_sizes()
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f'{name} must be one of {choices}, got {value!r}.')
        if self.gate_single_path and self.gate not in ('head', 'channel'):
            raise ValueError(
                f"gate_single_path needs gate = 'head' or 'channel', got {self.gate!r}: shares of "
                'one path are 1.'
            )
        rope.frequencies(self.head_dim, self.rope_theta, self.rope_scaling)
        self._check_attention(self.attention, self.attention_options)
        object.__setattr__(self, 'layer_attention', self._resolve_layer_attention())

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

    @property
    def has_gates(self) -> bool:
        """Whether the paths have gates."""
        return self.gate != 'none' and (len(self.attention) > 1 or self.gate_single_path)

    @functools.cached_property
    def layer_patterns(self) -> tuple[Pattern, ...]:
        """The pattern of each layer."""
        patterns = [Pattern(self.attention, self.attention_options)] * self.num_layers
        for layers, pattern in self.layer_attention.items():
            for layer in _layers(layers, self.num_layers):
                patterns[layer] = Pattern(pattern['attention'], pattern['attention_options'])
        return tuple(patterns)

    @functools.cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns that layers have, each once."""
        return tuple(dict.fromkeys(self.layer_patterns))

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
            most = MAX_LAYERS if name == 'num_layers' else MAX_SIZE
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(
                    f'{name} must be a whole number, at most {most:,} and at least 1, got '
                    f'{value!r:.60}.'
                )
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
        experts = self.num_experts_per_token, self.num_experts
        is_whole = all(isinstance(x, int) and not isinstance(x, bool) for x in experts)
        if not is_whole or (experts != (0, 0) and not 1 <= experts[0] <= experts[1] <= MAX_SIZE):
            raise ValueError(
                'num_experts_per_token must be a whole number between 1 and num_experts, or both '
                f'0; got {experts[0]} of {experts[1]}.'
            )
        for name in ('rope_theta', 'norm_eps'):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
                raise ValueError(f'{name} must be positive, and a number, got {value!r:.60}.')

    def _check_attention(self, attention, options):
        if not attention:
            raise ValueError("attention must name at least one path, such as ('stochastic',).")
        unused = set(options) - set(attention)
        if unused:
            raise ValueError(
                f'attention_options has options for {sorted(unused)}, which attention='
                f'{attention} does not use; remove them or add the path.'
            )
        for name in attention:
            of_path = options.get(name, FrozenDict())
            _check_path(name, of_path, self.num_heads, self.num_kv_heads, self.head_dim)

    def _resolve_layer_attention(self) -> FrozenDict:
        """Checks and completes the exceptions."""
        resolved = {}
        for layers, pattern in self.layer_attention.items():
            if not isinstance(pattern, Mapping):
                raise ValueError(
                    f'layer_attention[{layers!r}] = {pattern!r}; expected fields such as '
                    "{'attention': ('full',)}."
                )
            unknown = set(pattern) - {'attention', 'attention_options'}
            attention = pattern.get('attention', ())
            is_sequence = isinstance(attention, list | tuple)
            if unknown or not is_sequence or len(attention) != len(self.attention):
                raise ValueError(
                    f'layer_attention[{layers!r}] = {dict(pattern)}; expected attention with as '
                    f'many paths as elsewhere, {len(self.attention)}, and its attention_options.'
                )
            options = _freeze(pattern.get('attention_options', {}))
            self._check_attention(tuple(attention), options)
            _layers(layers, self.num_layers)
            resolved[layers] = FrozenDict(
                {'attention': tuple(attention), 'attention_options': options}
            )
        return FrozenDict(resolved)


def _layers(text: str, num_layers: int) -> Sequence[int]:
    """The layers that an index or a slice as text names."""
    parts = str(text).split(':')
    try:
        numbers = [int(part) if part else None for part in parts]
        layers = range(num_layers)
        found = [layers[numbers[0]]] if len(numbers) == 1 else layers[slice(*numbers)]
        if not found:
            raise IndexError
        return found
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f'layer_attention names the layers {text!r}; expected an index or a slice of '
            f"{num_layers} layers, such as '0' or '-3:'."
        ) from error


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
    except (OverflowError, TypeError, ValueError) as error:
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
    return FrozenDict({name: _hashable(values) for name, values in options.items()})


def _hashable(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
