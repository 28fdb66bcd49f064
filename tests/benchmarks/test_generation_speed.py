"""Our times beside transformers' are of the same work."""

import pytest

from sa_jax.benchmarks.generation import PHASES, measure, table
from sa_jax.models.pretrained import load_pretrained


@pytest.mark.slow
def test_measures_both_on_the_same_weights(tmp_path):
    transformers = pytest.importorskip('transformers')
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, dtype='float32').model
    measured = []
    rows = measure(
        model,
        tmp_path,
        batches=[1, 3],
        prompt_tokens=9,
        new_tokens=4,
        rounds=2,
        on_measured=lambda: measured.append(1),
    )
    assert len(measured) == 2 * 2 * 2 * 2
    assert [(x['batch'], x['phase']) for x in rows] == [(b, p) for b in (1, 3) for p in PHASES]
    for row in rows:
        assert 0 < row['least_ratio'] <= row['ratio'] <= row['greatest_ratio']
        assert min(row['ours_tokens_per_s'], row['transformers_tokens_per_s']) > 0


def test_table():
    row = {
        'batch': 8,
        'phase': 'decode',
        'ours_tokens_per_s': 81.04,
        'transformers_tokens_per_s': 40.52,
        'ratio': 2.0,
        'least_ratio': 1.5,
        'greatest_ratio': 2.25,
    }
    assert table([row]).splitlines()[-1] == '| 8 | decode | 81.0 | 40.5 | 2.00 (1.50 … 2.25) |'
