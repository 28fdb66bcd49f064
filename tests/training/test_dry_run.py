"""The description of a run."""

from sa_jax.training.dry_run import describe


def test_describes_parameters_flops_memory_and_shardings(tiny, one_device):
    text = describe(tiny(), one_device)
    # 2 * 258 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32 + 33 * 2 * 2) + 32
    assert 'Parameters: 37,416, of them 16,512 in embeddings, 264 in path gates' in text
    for part in ('projections', 'feed_forward', 'attention/1_sliding_window', 'unembedding'):
        assert part in text
    assert 'Memory per device' in text
    assert 'Mesh: data 1, fsdp 1, tensor 1' in text
    query = next(line for line in text.splitlines() if 'params/layers/attention/query' in line)
    assert "'fsdp', 'tensor'" in query
