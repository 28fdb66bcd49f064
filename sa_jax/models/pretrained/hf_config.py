"""A Hugging Face `config.json` as the configuration of a decoder.

Every field is either understood, or known not to change what the model computes, or an error: a
field that is passed over in silence gives a model that is almost right.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from typing import Any

from sa_jax.models.config import MAX_LAYERS, MAX_SIZE, DecoderConfig

# What has no architecture of Hugging Face's: the decoder's own fields, under this name.
OWN = 'SaJaxDecoder'
_OWN_FIELDS = {'architectures', 'decoder', 'max_position_embeddings', 'model_type'}
# The architectures, and the width of a head where the file doesn't give it (None: D / N).
_DEFAULT_HEAD_DIM = {
    'LlamaForCausalLM': None,
    'MistralForCausalLM': None,
    'Qwen3ForCausalLM': 128,
    'Qwen3MoeForCausalLM': None,
}
_UNDERSTOOD = {
    'architectures',
    'head_dim',
    'hidden_size',
    'intermediate_size',
    'layer_types',
    'max_position_embeddings',
    'max_window_layers',
    'moe_intermediate_size',
    'norm_topk_prob',
    'num_attention_heads',
    'num_experts',
    'num_experts_per_tok',
    'num_hidden_layers',
    'num_key_value_heads',
    'num_local_experts',
    'rms_norm_eps',
    'rope_parameters',
    'rope_scaling',
    'rope_theta',
    'sliding_window',
    'tie_word_embeddings',
    'use_sliding_window',
    'vocab_size',
}
# Supported with these values only.
_REQUIRED = {
    'attention_bias': (False, None),
    'decoder_sparse_step': (1,),
    'hidden_act': ('silu',),
    'mlp_bias': (False, None),
    'mlp_only_layers': ([], None),
    'partial_rotary_factor': (1, 1.0, None),
    'quantization_config': (None,),
    'rope_interleaved': (False, None),
}
# Of training, of generation, or of other programs.
_HARMLESS = {
    '_model_name_or_path',
    '_name_or_path',
    'attention_dropout',
    'bos_token_id',
    'chunk_size_feed_forward',
    'dtype',
    'eos_token_id',
    'id2label',
    'initializer_range',
    'is_decoder',
    'is_encoder_decoder',
    'is_llama_config',
    'label2id',
    'model_type',
    'output_attentions',
    'output_hidden_states',
    'output_router_logits',
    'pad_token_id',
    'pretraining_tp',
    'problem_type',
    'return_dict',
    'router_aux_loss_coef',
    'torch_dtype',
    'transformers.js_config',
    'transformers_version',
    'unk_token_id',
    'use_cache',
}


def context_length(fields: Mapping[str, Any]) -> int:
    """The tokens that a checkpoint was made for.

    Raises:
      ValueError: The file doesn't say.
    """
    return _number(fields, 'max_position_embeddings')


def decoder_config(
    fields: Mapping[str, Any], *, compute_dtype: str, ignore: Collection[str] = ()
) -> DecoderConfig:
    """Reads the configuration of a checkpoint.

    Args:
      fields: What `config.json` holds.
      compute_dtype: Of the decoder.
      ignore: Fields that the caller knows not to matter.

    Returns:
      The configuration. Its attention is 'full', or 'sliding_window' where the checkpoint has one.

    Raises:
      ValueError: The architecture, a field or its value isn't supported, or a field is missing.
    """
    fields = {name: value for name, value in fields.items() if name not in ignore}
    architecture = _architecture(fields)
    if architecture == OWN:
        return _own(fields, compute_dtype)
    _check_fields(fields)
    hidden, heads = _number(fields, 'hidden_size'), _number(fields, 'num_attention_heads')
    head_dim = _DEFAULT_HEAD_DIM[architecture] or hidden // heads
    if fields.get('head_dim') is not None:
        head_dim = _number(fields, 'head_dim')
    kv_heads = heads
    if fields.get('num_key_value_heads') is not None:
        kv_heads = _number(fields, 'num_key_value_heads')
    is_sparse = architecture == 'Qwen3MoeForCausalLM'
    rope_theta, rope_scaling = _rope(fields)
    return DecoderConfig(
        vocab_size=_number(fields, 'vocab_size'),
        hidden_size=hidden,
        num_layers=_number(fields, 'num_hidden_layers'),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_number(
            fields, 'moe_intermediate_size' if is_sparse else 'intermediate_size'
        ),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=_positive('rms_norm_eps', fields.get('rms_norm_eps')),
        tie_embeddings=bool(fields.get('tie_word_embeddings', False)),
        qk_norm=architecture.startswith('Qwen3'),
        compute_dtype=compute_dtype,
        **(_experts(fields) if is_sparse else {}),
        **_attention(fields, architecture),
    )


def _architecture(fields):
    named = fields.get('architectures')
    supported = (*_DEFAULT_HEAD_DIM, OWN)
    if not isinstance(named, list) or len(named) != 1 or named[0] not in supported:
        raise ValueError(
            f'config.json has architectures = {named!r}; supported is one of '
            f'{", ".join(supported)}.'
        )
    return named[0]


def _own(fields, compute_dtype):
    decoder = fields.get('decoder')
    surplus = sorted(set(fields) - _OWN_FIELDS)
    if not isinstance(decoder, dict) or surplus:
        raise ValueError(
            f'config.json of a {OWN} has decoder = {decoder!r:.60} and the fields '
            f'{", ".join(surplus) or "that it should have"}; expected {", ".join(_OWN_FIELDS)}.'
        )
    return DecoderConfig.from_config_dict(decoder | {'compute_dtype': compute_dtype})


def config_fields(config: DecoderConfig, context_length: int) -> dict[str, Any]:
    """What `config.json` holds for a decoder: the inverse of `decoder_config`.

    A decoder that is a Llama has the fields of one, so that other programs read it.
    """
    if not _is_llama(config):
        decoder = {
            field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)
        }
        return {
            'architectures': [OWN],
            'model_type': 'sa_jax',
            'max_position_embeddings': context_length,
            'decoder': decoder,
        }
    return {
        'architectures': ['LlamaForCausalLM'],
        'model_type': 'llama',
        'vocab_size': config.vocab_size,
        'hidden_size': config.hidden_size,
        'num_hidden_layers': config.num_layers,
        'num_attention_heads': config.num_heads,
        'num_key_value_heads': config.num_kv_heads,
        'head_dim': config.head_dim,
        'intermediate_size': config.intermediate_size,
        'max_position_embeddings': context_length,
        'rms_norm_eps': config.norm_eps,
        'rope_theta': config.rope_theta,
        'tie_word_embeddings': config.tie_embeddings,
        'hidden_act': 'silu',
    }


def _is_llama(config):
    is_plain = not (config.has_gates or config.qk_norm or config.num_experts or config.rope_scaling)
    return is_plain and all(x.paths == [('full', {})] for x in config.patterns)


def _plain(value):
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    return [_plain(x) for x in value] if isinstance(value, tuple) else value


def _check_fields(fields):
    unknown = sorted(set(fields) - _UNDERSTOOD - set(_REQUIRED) - _HARMLESS)
    if unknown:
        raise ValueError(
            f'config.json has the fields {", ".join(unknown)}, which are not supported. If they '
            f"don't change what the model computes, pass ignore={tuple(unknown)!r}."
        )
    for name, values in _REQUIRED.items():
        if name in fields and fields[name] not in values:
            raise ValueError(
                f'config.json has {name} = {fields[name]!r}; supported is {values[0]!r} only.'
            )


def _rope(fields):
    """Base of the wavelengths and their scaling, as files of transformers 4 and 5 give them."""
    scaling = fields.get('rope_parameters') or fields.get('rope_scaling') or {}
    if not isinstance(scaling, dict):
        raise ValueError(
            f'config.json has rope_parameters or rope_scaling = {scaling!r:.60}; expected an '
            'object of fields.'
        )
    scaling = dict(scaling)
    theta = scaling.pop('rope_theta', fields.get('rope_theta'))
    if 'type' in scaling:  # the older name
        scaling.setdefault('rope_type', scaling.pop('type'))
    theta = _positive('rope_theta', theta)
    if scaling.pop('partial_rotary_factor', 1) not in (1, None):
        raise ValueError('config.json has a partial_rotary_factor; supported is 1 only.')
    kind = scaling.pop('rope_type', 'default')
    if kind == 'default':
        if scaling:
            raise ValueError(
                f'config.json scales its rotary embeddings by {scaling}, of no known rope_type; '
                'supported are the types that sa_jax.models.rope.frequencies names.'
            )
        return theta, {}
    if kind == 'yarn':
        context = _number(fields, 'max_position_embeddings')
        scaling.setdefault('original_max_position_embeddings', context)
    return theta, {'rope_type': kind} | scaling


def _experts(fields):
    name = 'num_experts' if 'num_experts' in fields else 'num_local_experts'
    return {
        'num_experts': _number(fields, name),
        'num_experts_per_token': _number(fields, 'num_experts_per_tok'),
        'normalize_experts': bool(fields.get('norm_topk_prob', False)),
    }


def _attention(fields, architecture):
    """Full attention, but for the layers that have a sliding window."""
    layers = _number(fields, 'num_hidden_layers')
    slides = _sliding_layers(fields, architecture, layers)
    if not any(slides):
        return {'attention': ('full',)}
    paths = {
        'attention': ('sliding_window',),
        'attention_options': {'sliding_window': {'window': _number(fields, 'sliding_window')}},
    }
    full = {str(layer): {'attention': ('full',)} for layer in range(layers) if not slides[layer]}
    return paths | {'layer_attention': full}


def _sliding_layers(fields, architecture, layers):
    """Which layers have the window, by the rules of each family in transformers."""
    window = fields.get('sliding_window')
    if architecture == 'LlamaForCausalLM':
        slides = [False] * layers
        if window is not None:
            raise ValueError(
                f'config.json has sliding_window = {window!r}, which no Llama has; a model with a '
                "window is a MistralForCausalLM. If it isn't used, pass ignore=('sliding_window',)."
            )
    elif architecture == 'MistralForCausalLM':
        # Where it is missing, versions of transformers differ.
        if 'sliding_window' not in fields:
            raise ValueError(
                'config.json lacks sliding_window; expected a number of tokens, or null for none.'
            )
        slides = [window is not None] * layers
    elif not fields.get('use_sliding_window', False) or window is None:
        slides = [False] * layers
    elif architecture == 'Qwen3ForCausalLM' and fields.get('layer_types') is None:
        first = _required(fields, 'max_window_layers')
        slides = [layer >= first for layer in range(layers)]
    else:
        slides = [True] * layers
    types = fields.get('layer_types')
    if types is None:
        return slides
    known = {'full_attention': False, 'sliding_attention': True}
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not all(isinstance(x, str) and x in known for x in types)
    ):
        raise ValueError(
            f'config.json has layer_types = {types!r}; expected one of {", ".join(known)} for '
            f'each of the {layers} layers.'
        )
    named = [known[kind] for kind in types]
    # Qwen3 follows them; the other families' code does not look at them.
    if named != slides and (architecture != 'Qwen3ForCausalLM' or not any(slides)):
        raise ValueError(
            f'config.json has layer_types = {types!r}, which its other fields contradict: they '
            f'give a sliding window to {sum(slides)} of {layers} layers.'
        )
    return named


def _required(fields, name):
    if fields.get(name) is None:
        raise ValueError(f'config.json lacks {name}, which its architecture needs; add it.')
    return fields[name]


def _positive(name, value):
    # Whole numbers of JSON may be larger than any other.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise ValueError(f'config.json has {name} = {value!r:.60}; expected a number above 0.')
    return float(value)


def _number(fields, name):
    value = _required(fields, name)
    most = MAX_LAYERS if name in ('num_hidden_layers', 'num_layers') else MAX_SIZE
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(
            f'config.json has {name} = {value!r:.60}; expected a whole number from 1 to {most:,}.'
        )
    return value
