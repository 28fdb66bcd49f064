"""What is another run, and mistyped overrides."""

import pytest
from absl import flags

from sa_jax.training.configuration import differences, parse_flags, to_json


def test_differences_name_the_fields(tiny):
    before, after = tiny(), tiny()
    after.model.hidden_size = 64
    after.optimizer.learning_rate = 0.5
    assert differences(to_json(before), to_json(after)) == [
        'model.hidden_size: 32 -> 64',
        'optimizer.learning_rate: 0.01 -> 0.5',
    ]


def test_an_absent_field_is_a_difference():
    assert differences({'a': {'b': 1}}, {'a': {}}) == ["a.b: 1 -> '(absent)'"]


@pytest.mark.parametrize(
    'field',
    [
        'training.steps',
        'training.log_every',
        'training.checkpoint_every',
        'training.keep_checkpoints',
        'evaluation.every',
        'mesh.fsdp',
    ],
)
def test_rhythm_and_length_are_not_another_run(tiny, field):
    before, after = tiny(), tiny()
    after.update_from_flattened_dict({field: 77})
    assert not differences(to_json(before), to_json(after))


@pytest.mark.parametrize('error', [AttributeError, KeyError])
def test_mistyped_override_names_argument_and_nearest_field(monkeypatch, error):
    def fail(argv):
        raise error('\'stps\'\nDid you mean "steps" instead of "stps"?')

    monkeypatch.setattr('absl.app.parse_flags_with_usage', fail)
    with pytest.raises(SystemExit, match=r'--config.training.stps=5 .*Did you mean "steps"'):
        parse_flags(['pretrain', '--workdir=x', '--config.training.stps=5'])


def test_other_flags_pass():
    assert parse_flags(['pretrain', 'rest']) == ['pretrain', 'rest']
    assert flags.FLAGS.is_parsed()
