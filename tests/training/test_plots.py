"""The figures of a run."""

from sa_jax.training.plots import plot_gates, plot_loss


def test_plots_are_written(tmp_path):
    records = [
        {'step': step, 'loss': 5 - step, 'gates': {'0_a': [0.5, 0.4], '1_b': [0.5, 0.6]}}
        for step in range(3)
    ]
    records[-1]['evaluation'] = {'loss': 3.5}
    plot_loss(records, tmp_path / 'loss.png', {'unigram': 6.0, 'bigram': 4.0})
    plot_gates(records, tmp_path / 'gates.png')
    for name in ('loss.png', 'gates.png'):
        assert (tmp_path / name).read_bytes().startswith(b'\x89PNG')
