"""The metadata of a GGUF file as the fields of a Hugging Face `config.json`.

Every key of the architecture is either understood, or supported with some values only, or known
not to change what the model computes, or an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

ARCHITECTURES = {
    'llama': 'LlamaForCausalLM',
    'qwen3': 'Qwen3ForCausalLM',
    'qwen3moe': 'Qwen3MoeForCausalLM',
}
_UNDERSTOOD = {
    'attention.head_count',
    'attention.head_count_kv',
    'attention.key_length',
    'attention.layer_norm_rms_epsilon',
    'attention.sliding_window',
    'attention.value_length',
    'block_count',
    'context_length',
    'embedding_length',
    'feed_forward_length',
    'rope.dimension_count',
    'rope.freq_base',
    'rope.scaling.factor',
    'rope.scaling.original_context_length',
    'rope.scaling.type',
    'rope.scaling.yarn_beta_fast',
    'rope.scaling.yarn_beta_slow',
    'vocab_size',
}
_UNDERSTOOD_OF_EXPERTS = {
    'expert_count',
    'expert_feed_forward_length',
    'expert_used_count',
    'expert_weights_norm',
}
# Supported with these values only; zero is how some writers leave a field out.
_REQUIRED = {
    'attention.causal': (True,),
    'expert_gating_func': (1, 0),  # the softmax
    'expert_group_count': (0, 1),
    'expert_group_used_count': (0, 1),
    'expert_shared_count': (0,),
    'expert_weights_scale': (1, 0),
    'leading_dense_block_count': (0,),
    'rope.scale_linear': (1, 0),
    'rope.scaling.attn_factor': (1,),
    'rope.scaling.yarn_attn_factor': (1,),
    'rope.scaling.yarn_ext_factor': (1,),
    'tensor_data_layout': ('Meta AI original pth',),  # the order of Q and K rows that 'llama' has
}
_REQUIRED_WITHOUT_EXPERTS = {'expert_count': (0,), 'expert_used_count': (0,)}
# How sentence embeddings are made; whether the training itself used the scaling.
_HARMLESS = {'pooling_type', 'rope.scaling.finetuned'}


def config_fields(
    metadata: Mapping[str, Any],
    *,
    vocab_size: int,
    tied: bool,
    rope_factors: list[float] | None,
    ignore: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the fields of `config.json` that say the same.

    Args:
      metadata: Of the file.
      vocab_size: Rows of the embedding.
      tied: Whether the embedding also produces the logits.
      rope_factors: Numbers that divide the frequencies of the rotary embedding, where the file has
        them.
      ignore: Keys, unknown to this package, that are known not to matter.

    Raises:
      ValueError: The file is no model, or a part of one; its architecture, a key of it or a value
        isn't supported, or a key is missing.
    """
    fields = _Fields(metadata, ignore)
    hidden, heads = fields.whole('embedding_length'), fields.whole('attention.head_count')
    head_dim = fields.whole('attention.key_length', hidden // heads)
    for name in ('attention.value_length', 'rope.dimension_count'):
        if fields.whole(name, head_dim) != head_dim:
            raise ValueError(
                f'{fields.key(name)} = {fields.get(name)}; only the width of the keys, {head_dim}, '
                'is supported.'
            )
    if fields.whole('vocab_size', vocab_size) != vocab_size:
        raise ValueError(
            f'{fields.key("vocab_size")} = {fields.get("vocab_size")}, but the embedding has '
            f'{vocab_size} rows.'
        )
    config = {
        'vocab_size': vocab_size,
        'hidden_size': hidden,
        'num_hidden_layers': fields.whole('block_count'),
        'num_attention_heads': heads,
        'num_key_value_heads': fields.whole('attention.head_count_kv', heads),
        'head_dim': head_dim,
        'hidden_act': 'silu',
        'max_position_embeddings': fields.whole('context_length'),
        'rms_norm_eps': fields.real('attention.layer_norm_rms_epsilon'),
        'rope_theta': fields.real('rope.freq_base', 10_000.0),
        'rope_scaling': _rope_scaling(fields, rope_factors),
        'tie_word_embeddings': tied,
    }
    if fields.architecture == 'qwen3moe':
        config |= {
            'num_experts': fields.whole('expert_count'),
            'num_experts_per_tok': fields.whole('expert_used_count'),
            'moe_intermediate_size': fields.whole('expert_feed_forward_length'),
            # Where the file doesn't say, llama.cpp normalises.
            'norm_topk_prob': bool(fields.get('expert_weights_norm', True)),
        }
    else:
        config['intermediate_size'] = fields.whole('feed_forward_length')
    return config | _architecture(fields)


class _Fields:
    """The keys of the architecture, without its name."""

    def __init__(self, metadata, ignore):
        self.architecture = metadata.get('general.architecture')
        if not isinstance(self.architecture, str) or self.architecture not in ARCHITECTURES:
            raise ValueError(
                f'general.architecture = {self.architecture!r} is not supported; expected one of '
                f'{", ".join(ARCHITECTURES)}.'
            )
        if metadata.get('general.type', 'model') != 'model':
            raise ValueError(f'general.type = {metadata["general.type"]!r}; expected a model.')
        if metadata.get('split.count', 1) not in (0, 1):
            raise ValueError(
                f'it is one of {metadata["split.count"]} parts of a model; join them with '
                '`llama-gguf-split --merge`.'
            )
        start = f'{self.architecture}.'
        self._values = {
            key.removeprefix(start): _single(value)
            for key, value in metadata.items()
            if key.startswith(start)
        }
        self._ignored = {key.removeprefix(start) for key in ignore if key.startswith(start)}
        self._check()

    def key(self, name):
        return f'{self.architecture}.{name}'

    def get(self, name, default=None):
        return self._values.get(name, default)

    def whole(self, name, default=None):
        value = self._values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f'{self.key(name)} = {value!r}; expected a whole number from 1 on.')
        return value

    def real(self, name, default=None):
        value = self._values.get(name, default)
        if not isinstance(value, int | float) or not 0 < value < float('inf'):
            raise ValueError(f'{self.key(name)} = {value!r}; expected a positive number.')
        return float(value)

    def _check(self):
        required, understood = dict(_REQUIRED), set(_UNDERSTOOD)
        if self.architecture == 'qwen3moe':
            understood |= _UNDERSTOOD_OF_EXPERTS
        else:
            required |= _REQUIRED_WITHOUT_EXPERTS
        known = understood | set(required) | _HARMLESS | self._ignored
        unknown = [self.key(name) for name in sorted(set(self._values) - known)]
        if unknown:
            raise ValueError(
                f'the keys {", ".join(unknown)} are not supported; if they do not change what the '
                f'model computes, pass ignore={tuple(unknown)!r}.'
            )
        for name, values in required.items():
            if self._values.get(name, values[0]) not in values:
                raise ValueError(
                    f'{self.key(name)} = {self._values[name]!r}; only {values[0]!r} is supported.'
                )


def _single(value):
    """One number for all layers, where a file gives the same for each."""
    return value[0] if isinstance(value, list) and len(set(value)) == 1 else value


def _architecture(fields):
    name, window = ARCHITECTURES[fields.architecture], fields.get('attention.sliding_window')
    if not window:
        return {'architectures': [name]}
    window = fields.whole('attention.sliding_window')
    if fields.architecture == 'llama':
        return {'architectures': ['MistralForCausalLM'], 'sliding_window': window}
    return {
        'architectures': [name],
        'max_window_layers': 0,
        'sliding_window': window,
        'use_sliding_window': True,
    }


def _rope_scaling(fields, rope_factors):
    kind, factor = fields.get('rope.scaling.type', 'linear'), fields.get('rope.scaling.factor', 1)
    scaling = None
    if kind == 'yarn':
        scaling = {
            'rope_type': 'yarn',
            'factor': fields.real('rope.scaling.factor'),
            'original_max_position_embeddings': fields.whole(
                'rope.scaling.original_context_length', fields.whole('context_length')
            ),
        }
        for name in ('beta_fast', 'beta_slow'):
            if fields.get(f'rope.scaling.yarn_{name}') is not None:
                scaling[name] = fields.real(f'rope.scaling.yarn_{name}')
    elif kind == 'linear':
        if factor not in (0, 1):
            scaling = {'rope_type': 'linear', 'factor': fields.real('rope.scaling.factor')}
    elif kind != 'none':
        raise ValueError(
            f'{fields.key("rope.scaling.type")} = {kind!r}; expected none, linear or yarn.'
        )
    if rope_factors is None:
        return scaling
    if scaling:
        raise ValueError(f'rope_freqs.weight beside {scaling} is not supported.')
    return {'rope_type': 'factors', 'factors': rope_factors}
