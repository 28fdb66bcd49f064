"""What a training step sends between devices, for every split of eight."""

import jax
import pytest
import tiny_config

from sa_jax.report.collectives import collectives, totals
from sa_jax.training.program import build_program

FLOAT32 = 4
SPLITS = [(d, f, 8 // (d * f)) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if d * f <= 8]


def gathered(matrices, tables, fsdp, tensor):
    """Shards of the parameters: the layers' forward and backward, both tables for the step."""
    return (2 * matrices + tables) // tensor if fsdp > 1 else 0


def reduced(matrices, tables, activation, layers, data, fsdp, tensor):
    """Gradients over copies and shards; activations where heads and hidden units are split."""
    gradients = 0
    if data * fsdp > 1:
        gradients = (matrices + tables) // tensor
    if data > 1 and fsdp > 1:
        gradients += matrices // (tensor * fsdp)
    if tensor == 1:
        return gradients
    # Forward behind attention and feed-forward; backward before query, key, value, gates, and the
    # feed-forward layer's two; once at the lookup and once at the logits.
    return gradients + (8 * layers + 2) * activation // (data * fsdp)


@pytest.mark.slow
@pytest.mark.parametrize('split', SPLITS, ids=str)
def test_nothing_needless_is_sent(split):
    data, fsdp, tensor = split
    config = tiny_config.get_config('sa_swa')
    config.model.update(num_heads=8, num_kv_heads=8, head_dim=8, vocab_size=264)
    config.training.gradient_accumulation = 1
    config.mesh.update(data=data, fsdp=fsdp, tensor=tensor)
    program = build_program(config)
    sent = totals(collectives(program.compile_step().as_text()))

    sizes = {
        jax.tree_util.keystr(path, simple=True, separator='/'): FLOAT32 * x.size
        for path, x in jax.tree_util.tree_leaves_with_path(program.abstract_state.params)
    }
    small = ('norm', 'bias')  # are copied everywhere
    tables = sum(size for name, size in sizes.items() if name.endswith('embedding'))
    matrices = sum(x for name, x in sizes.items() if not name.endswith(small)) - tables
    rows, length = config.training.batch_size, config.data.sequence_length
    activation = FLOAT32 * rows * length * config.model.hidden_size

    assert set(sent) <= {'all-reduce', 'all-gather'}
    assert sent.get('all-gather', (0, 0))[1] == gathered(matrices, tables, fsdp, tensor)
    expected = reduced(matrices, tables, activation, config.model.num_layers, data, fsdp, tensor)
    # Beyond it: norms and biases, scalars, and the sums of a split vocabulary's softmax.
    assert expected < sent['all-reduce'][1] < 1.03 * expected
