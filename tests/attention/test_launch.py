"""The launch table: complete, readable, written back as it was; devices and their cards."""

import dataclasses
import types

import jax
import pytest

from sa_jax.attention import launch
from sa_jax.attention.launch import Launch, Tile, card_of, launch_for, read_table, write_table


def test_the_table_serves_every_card_and_comes_back_as_written(tmp_path):
    table = read_table()
    cards = {card for card, _, _ in table}
    assert {'sm80', 'sm90', launch.OTHER} <= cards
    for card in cards:
        for dtype in ('bfloat16', 'float32'):
            assert {64, 128, 256} <= {h for c, d, h in table if (c, d) == (card, dtype)}
    write_table(table, tmp_path / 'table.json')
    assert (tmp_path / 'table.json').read_text() == launch.TABLE.read_text()


def test_looks_up_the_nearest_entry():
    table = read_table()
    assert launch_for('sm90', 'bfloat16', 64) == table['sm90', 'bfloat16', 64]
    assert launch_for('sm90', 'float16', 80) == table['sm90', 'bfloat16', 128]
    for card in (None, 'sm75', 'gfx90a'):
        assert launch_for(card, 'float32', 8) == table[launch.OTHER, 'float32', 64]
    with pytest.raises(ValueError, match='head_dim 320; the GPU kernel runs up to 256'):
        launch_for('sm80', 'bfloat16', 320)
    with pytest.raises(ValueError, match='dtype float64'):
        launch_for('sm80', 'float64', 64)


def test_names_bad_tiles():
    with pytest.raises(ValueError, match='block_q=48; expected a power of two'):
        Tile(48, 64, 4, 2)
    with pytest.raises(ValueError, match='block_k=8; expected'):
        Tile(64, 8, 4, 2)
    with pytest.raises(ValueError, match='warps=3'):
        Tile(64, 64, 3, 2)
    with pytest.raises(ValueError, match='stages=0'):
        Tile(64, 64, 4, 0)


def test_a_launch_survives_json():
    written = Launch(Tile(64, 32, 4, 2), Tile(32, 32, 4, 1), Tile(16, 128, 8, 3), fused=False)
    assert Launch.from_json(dataclasses.asdict(written)) == written
    assert written.block == 128


@pytest.mark.parametrize(
    ('platform', 'capability', 'card'),
    [('gpu', '9.0', 'sm90'), ('cuda', '10.3', 'sm103'), ('gpu', 'gfx942', None), ('cpu', '', None)],
)
def test_names_cards(platform, capability, card):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    assert card_of(device) == card


def test_the_default_device_follows_the_configuration():
    devices = jax.devices()
    assert launch.default_device() == devices[0]
    with jax.default_device(devices[-1]):
        assert launch.default_device() == devices[-1]
    with jax.default_device('cpu'):
        assert launch.default_device().platform == 'cpu'
    assert card_of(devices[0]) is None
