"""What `config.json` says is understood or refused."""

import pytest
from checkpoint_files import LLAMA, QWEN3_MOE

from sa_jax.models.pretrained.hf_config import decoder_config

MISTRAL = LLAMA | {'architectures': ['MistralForCausalLM'], 'sliding_window': 5}
QWEN3 = LLAMA | {
    'architectures': ['Qwen3ForCausalLM'],
    'head_dim': 8,
    'sliding_window': 5,
    'max_window_layers': 1,
    'use_sliding_window': True,
}


def _read(fields, **changes):
    return decoder_config(fields | changes, compute_dtype='bfloat16')


def _windows(config):
    return [
        pattern.options['sliding_window']['window'] if pattern.attention != ('full',) else None
        for pattern in config.layer_patterns
    ]


def test_sizes_come_from_the_file():
    config = _read(LLAMA, head_dim=6, rms_norm_eps=1e-3, rope_theta=5e5, tie_word_embeddings=True)
    assert (config.head_dim, config.norm_eps, config.rope_theta) == (6, 1e-3, 5e5)
    assert config.tie_embeddings
    assert not config.qk_norm
    assert config.compute_dtype == 'bfloat16'
    assert _read(LLAMA).head_dim == 4
    # Of other families the width isn't that of the residual stream divided by the heads.
    assert _read({k: v for k, v in QWEN3.items() if k != 'head_dim'}).head_dim == 128
    assert _read(QWEN3).qk_norm


def test_experts_come_from_the_file():
    config = _read(QWEN3_MOE)
    assert (config.num_experts, config.num_experts_per_token) == (4, 2)
    assert (config.intermediate_size, config.normalize_experts) == (12, True)
    without = {k: v for k, v in QWEN3_MOE.items() if k != 'norm_topk_prob'}
    assert not _read(without).normalize_experts
    renamed = {k: v for k, v in QWEN3_MOE.items() if k != 'num_experts'} | {'num_local_experts': 4}
    assert _read(renamed) == _read(QWEN3_MOE)


@pytest.mark.parametrize(
    ('fields', 'windows'),
    [
        (LLAMA, [None, None]),
        (MISTRAL, [5, 5]),
        (MISTRAL | {'sliding_window': None}, [None, None]),
        (QWEN3, [None, 5]),
        (QWEN3 | {'max_window_layers': 0}, [5, 5]),
        (QWEN3 | {'max_window_layers': 2}, [None, None]),
        (QWEN3 | {'use_sliding_window': False, 'max_window_layers': 0}, [None, None]),
        (QWEN3 | {'layer_types': ['sliding_attention', 'full_attention']}, [5, None]),
        (QWEN3_MOE | {'use_sliding_window': True, 'sliding_window': 5}, [5, 5]),
        (QWEN3_MOE | {'use_sliding_window': False, 'sliding_window': 5}, [None, None]),
        (MISTRAL | {'layer_types': ['sliding_attention'] * 2}, [5, 5]),
    ],
)
def test_sliding_windows_are_those_of_the_layers(fields, windows):
    assert _windows(_read(fields)) == windows


def test_rotary_embeddings_are_read_from_old_and_new_files():
    old = {'rope_scaling': {'type': 'linear', 'factor': 4.0}}
    new = {'rope_parameters': {'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 1e4}}
    assert _read(LLAMA, **old) == _read(LLAMA, **new)
    assert dict(_read(LLAMA, **old).rope_scaling) == {'rope_type': 'linear', 'factor': 4.0}
    assert not _read(LLAMA, rope_scaling={'rope_type': 'default'}).rope_scaling
    yarn = _read(LLAMA, rope_scaling={'rope_type': 'yarn', 'factor': 4.0}).rope_scaling
    assert yarn['original_max_position_embeddings'] == 64


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'architectures': ['GPT2LMHeadModel']}, 'GPT2LMHeadModel.*LlamaForCausalLM'),
        ({'architectures': None}, 'architectures = None'),
        ({'attention_bias': True}, 'attention_bias = True; supported is False'),
        ({'hidden_act': 'gelu'}, "hidden_act = 'gelu'"),
        ({'quantization_config': {'bits': 4}}, 'quantization_config'),
        ({'logit_scale': 2.0}, r"logit_scale.*ignore=\('logit_scale',\)"),
        ({'hidden_size': None}, 'lacks hidden_size'),
        ({'hidden_size': '16'}, "hidden_size = '16'"),
        ({'hidden_size': 1 << 40}, 'hidden_size = 1099511627776; expected .* to 16,777,216'),
        ({'head_dim': 0}, 'head_dim = 0'),
        ({'rope_theta': None}, 'rope_theta = None'),
        ({'rope_theta': 'x'}, "rope_theta = 'x'"),
        ({'rms_norm_eps': [1]}, r'rms_norm_eps = \[1\]'),
        ({'rope_scaling': {'factor': 8.0}}, "{'factor': 8.0}, of no known rope_type"),
        ({'rope_scaling': {'rope_type': 'linear', 'factor': 0.0}}, 'no positive numbers'),
        (
            {'rope_parameters': {'full_attention': {'rope_type': 'yarn', 'factor': 8.0}}},
            'full_attention.*no known rope_type',
        ),
        ({'sliding_window': 5}, 'sliding_window = 5, which no Llama has'),
        ({'rope_scaling': {'rope_type': 'dynamic', 'factor': 2.0}}, "'dynamic'"),
        ({'rope_scaling': {'rope_type': 'linear'}}, 'factor'),
        ({'rope_scaling': {'rope_type': 'linear', 'factor': 2.0, 'odd': 1}}, 'odd'),
        ({'rope_parameters': {'rope_theta': 1e4, 'partial_rotary_factor': 0.5}}, 'partial_rotary'),
        ({'layer_types': ['full_attention']}, 'each of the 2 layers'),
        ({'layer_types': ['sliding_attention'] * 2}, 'contradict'),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        _read(LLAMA, **changes)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({k: v for k, v in MISTRAL.items() if k != 'sliding_window'}, 'lacks sliding_window'),
        (MISTRAL | {'sliding_window': 9.5}, 'sliding_window = 9.5'),
        (MISTRAL | {'layer_types': ['full_attention'] * 2}, 'contradict: they give .* 2 of 2'),
        (QWEN3 | {'use_sliding_window': False, 'layer_types': ['sliding_attention'] * 2}, '0 of 2'),
    ],
)
def test_windows_that_transformers_would_read_otherwise_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        _read(fields)


def test_sparse_layers_among_dense_ones_are_refused():
    with pytest.raises(ValueError, match='decoder_sparse_step = 2'):
        _read(QWEN3_MOE, decoder_sparse_step=2)
    with pytest.raises(ValueError, match='mlp_only_layers'):
        _read(QWEN3_MOE, mlp_only_layers=[0])


def test_a_field_known_not_to_matter_may_be_ignored():
    config = decoder_config(LLAMA | {'note': 1}, compute_dtype='float32', ignore=('note',))
    assert config == decoder_config(LLAMA, compute_dtype='float32')
