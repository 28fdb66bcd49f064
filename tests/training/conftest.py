"""A tiny run: its configuration, and the text it reads."""

import random

import jax
import pytest
import tiny_config

WORDS = ('state', 'union', 'people', 'congress', 'war', 'peace', 'treasury', 'year', 'law')


@pytest.fixture(scope='session')
def text_dir(tmp_path_factory):
    """A folder with a few short documents for training and validation."""
    folder = tmp_path_factory.mktemp('text')
    draw = random.Random(0)
    for split, count in (('train', 12), ('validation', 4)):
        (folder / split).mkdir()
        for index in range(count):
            words = draw.choices(WORDS, k=draw.randint(20, 120))
            (folder / split / f'{index}.txt').write_text(' '.join(words))
    return folder


@pytest.fixture(scope='package', autouse=True)
def compilation_cache(tmp_path_factory):
    """Compiles each of the programs that several tests run only once."""
    changes = {
        'jax_compilation_cache_dir': str(tmp_path_factory.mktemp('compiled')),
        'jax_persistent_cache_min_compile_time_secs': 0.5,
    }
    before = {name: getattr(jax.config, name) for name in changes}
    for name, value in changes.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp('data')


@pytest.fixture
def tiny(text_dir):
    """Returns a function from variant and dotted overrides to a configuration."""

    def make(variant='sa_swa', **changes):
        config = tiny_config.get_config(variant)
        config.data.path = str(text_dir)
        config.update_from_flattened_dict({k.replace('__', '.'): v for k, v in changes.items()})
        return config

    return make


@pytest.fixture
def one_device():
    return jax.devices()[:1]
