"""Earlier tokens are hidden, and nothing else changes."""

import numpy as np
import pytest
from flax import nnx

from sa_jax.evaluation.context import context_lengths, hide_earlier
from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder

# One document fills the first row; the second has two, the third one and padding.
BATCH = {
    'inputs': np.arange(24).reshape(3, 8),
    'segment_ids': np.array([[1] * 8, [1] * 3 + [2] * 5, [1] * 6 + [0] * 2], np.int32),
    'positions': np.array([range(8), [0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 0]]),
    'weights': np.array([[1] * 8, [1] * 8, [1] * 6 + [0] * 2], np.float32),
}


def test_hides_what_is_before_the_context_and_counts_the_end():
    (found,) = hide_earlier([BATCH], 4, 2)
    np.testing.assert_array_equal(found['inputs'], BATCH['inputs'])
    np.testing.assert_array_equal(found['weights'], [[0] * 6 + [1] * 2, [0] * 8, [0] * 8])
    segments = found['segment_ids']
    assert segments.dtype == np.int32
    same = segments[:, :, None] == segments[:, None]
    before = BATCH['segment_ids'][:, :, None] == BATCH['segment_ids'][:, None]
    late = np.arange(8) >= 4
    np.testing.assert_array_equal(same[:, late][:, :, late], before[:, late][:, :, late])
    assert not (same & (segments > 0)[:, None])[:, late][:, :, ~late].any()
    np.testing.assert_array_equal(segments[2, 6:], 0)
    (whole,) = hide_earlier([BATCH], 8, 2)
    np.testing.assert_array_equal(whole['segment_ids'], BATCH['segment_ids'])


def test_a_model_sees_its_context_only():
    config = DecoderConfig(
        vocab_size=24,
        hidden_size=8,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        attention=('full',),
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    row = {name: x[:1] for name, x in BATCH.items()}

    def last(context, inputs):
        (batch,) = hide_earlier([row], context, 2)
        logits = model(
            inputs, segment_ids=batch['segment_ids'], positions=batch['positions']
        ).logits
        return np.asarray(logits[0, -1])

    changed = row['inputs'].copy()
    changed[0, 3] = 0
    np.testing.assert_array_equal(last(4, row['inputs']), last(4, changed))
    assert np.abs(last(5, row['inputs']) - last(5, changed)).max() > 1e-4


def test_lengths_double_up_to_the_row():
    assert context_lengths(1024, 64) == [64, 128, 256, 512, 1024]
    assert context_lengths(100, 30) == [30, 60, 100]
    for scored in (0, 8):
        with pytest.raises(ValueError, match=f'{scored} tokens of a row of 8 .* 1 to 7'):
            context_lengths(8, scored)
    with pytest.raises(ValueError, match="2 tokens can't be predicted within a context of 1"):
        next(hide_earlier([BATCH], 1, 2))
