"""Every family against Hugging Face's own code on the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sa_jax.models import rope
from sa_jax.models.pretrained import load_pretrained

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

SIZES = {
    'vocab_size': 300,
    'hidden_size': 48,
    'num_hidden_layers': 3,
    'num_attention_heads': 6,
    'num_key_value_heads': 2,
    'intermediate_size': 80,
    'max_position_embeddings': 256,
    # Large weights: attention far from uniform, experts far from equal.
    'initializer_range': 0.3,
}
QWEN3 = {'head_dim': 16}
MOE = QWEN3 | {'num_experts': 8, 'num_experts_per_tok': 3, 'moe_intermediate_size': 24}
YARN = {
    'rope_type': 'yarn',
    'rope_theta': 1e4,
    'factor': 8.0,
    'original_max_position_embeddings': 32,
}
LLAMA3 = {
    'rope_type': 'llama3',
    'rope_theta': 1e4,
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 32,
}
LINEAR = {'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 4.0}
CASES = {
    'llama': ('Llama', {}),
    'llama_tied': ('Llama', {'tie_word_embeddings': True}),
    'llama_linear': ('Llama', {'rope_parameters': LINEAR}),
    'llama_llama3': ('Llama', {'rope_parameters': LLAMA3}),
    'llama_yarn': ('Llama', {'rope_parameters': YARN}),
    'mistral': ('Mistral', {'sliding_window': 9}),
    'mistral_full': ('Mistral', {'sliding_window': None}),
    'qwen3': ('Qwen3', QWEN3),
    # Transformers turns the window off unless both say otherwise.
    'qwen3_window': (
        'Qwen3',
        QWEN3 | {'use_sliding_window': True, 'sliding_window': 7, 'max_window_layers': 0},
    ),
    'qwen3_window_above': (
        'Qwen3',
        QWEN3 | {'use_sliding_window': True, 'sliding_window': 7, 'max_window_layers': 1},
    ),
    'qwen3_window_off': (
        'Qwen3',
        QWEN3 | {'use_sliding_window': False, 'sliding_window': 7, 'max_window_layers': 0},
    ),
    'qwen3_moe': ('Qwen3Moe', MOE | {'norm_topk_prob': True}),
    'qwen3_moe_unnormalized': ('Qwen3Moe', MOE | {'norm_topk_prob': False}),
    'qwen3_moe_window': (
        'Qwen3Moe',
        MOE | {'norm_topk_prob': True, 'use_sliding_window': True, 'sliding_window': 7},
    ),
}


def _make(family, changes):
    torch.manual_seed(0)
    config = getattr(transformers, f'{family}Config')(**SIZES, **changes)
    model = getattr(transformers, f'{family}ForCausalLM')(config).eval()
    for name, parameter in model.named_parameters():
        if 'norm' in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def _logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


def _tokens(length):
    return np.random.default_rng(0).integers(0, SIZES['vocab_size'], (2, length))


@pytest.mark.parametrize('case', CASES)
def test_logits_equal(tmp_path, case):
    model, tokens = _make(*CASES[case]), _tokens(65)
    model.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path, dtype='float32').model
    if 'moe' in case:
        model.set_experts_implementation('eager')  # the only one in float64
    # In float32 theirs may be as far from it as 1e-4.
    expected = _logits(model.double(), tokens)
    assert np.abs(expected).max() > 3
    found = jax.jit(lambda tokens: ours(tokens).logits)(jnp.asarray(tokens))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize('at_the_edge', [False, True])
def test_logits_equal_where_experts_are_tied(tmp_path, monkeypatch, at_the_edge):
    """Two experts of one probability, both chosen or only one of them.

    Which one is chosen is left open by torch.topk; here it is that of lower index, as ours.
    """
    model, tokens = _make('Qwen3Moe', MOE | {'norm_topk_prob': True}), _tokens(65)
    with torch.no_grad():
        for layer in model.model.layers:
            router = layer.mlp.gate.weight
            router[5] = router[2]
            if at_the_edge:
                router[:] = router[:1]

    def topk(x, k, dim=-1, **_):
        return tuple(
            y.narrow(dim, 0, k) for y in torch.sort(x, dim=dim, descending=True, stable=True)
        )

    monkeypatch.setattr(torch, 'topk', topk)
    model.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path, dtype='float32').model
    found = jax.jit(lambda tokens: ours(tokens).logits)(jnp.asarray(tokens))
    np.testing.assert_allclose(found, _logits(model, tokens), rtol=0, atol=1e-4)


def test_bfloat16_checkpoints_equal_to_their_precision(tmp_path):
    model, tokens = _make('Qwen3', QWEN3).to(torch.bfloat16), _tokens(65)
    model.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path).model
    found = jax.jit(lambda tokens: ours(tokens).logits)(jnp.asarray(tokens))
    exact = _logits(model.float(), tokens)
    # As far from exact as Hugging Face's own bfloat16.
    theirs = _logits(model.to(torch.bfloat16), tokens)
    ours_off, theirs_off = (np.sqrt(np.mean((x - exact) ** 2)) for x in (found, theirs))
    assert ours_off < 1.2 * theirs_off


@pytest.mark.parametrize(
    'scaling', [LINEAR, LLAMA3, YARN | {'original_max_position_embeddings': 32}]
)
def test_stretched_wavelengths_equal(scaling):
    functions = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
    config = transformers.LlamaConfig(**SIZES, rope_parameters=scaling)
    expected, factor = functions[scaling['rope_type']](config, 'cpu')
    ours = {name: value for name, value in scaling.items() if name != 'rope_theta'}
    found = rope.frequencies(8, scaling['rope_theta'], ours)
    np.testing.assert_allclose(found[0], expected.numpy(), rtol=1e-5)
    assert found[1] == pytest.approx(factor)
