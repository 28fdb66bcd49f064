"""What a run's records say of its time."""

from sa_jax.training.finish import timing


def test_records_of_earlier_versions_are_left_out():
    old = {'step': 1, 'tokens_per_s': 9.0}
    new = {'step_seconds': {'median': 2.0, 'most': 5.0}, 'input_wait': 0.5, 'save_seconds': 3.0}
    assert timing([old]) == {}
    assert timing([old, new]) == new
    assert timing([new | {'save_seconds': 4.0}, new])['save_seconds'] == 4.0
