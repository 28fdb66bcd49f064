"""Tasks made from the held-out speeches."""

import hashlib
import json

from sa_jax.data.speech_tasks import passages, write_speech_tasks

FILLER = 'It is the same each year. '


def test_passages_end_in_a_word_that_has_occurred():
    # 25 sentences of six words, and one more that may end the passage.
    start = 'Our harvest was good. ' + 25 * FILLER
    found = list(passages(f'{start}They came for the harvest. Then more.'))
    assert found == [(f'{start}They came for the', 'harvest')]
    for other in ('They came for the weather.', 'They came for the harvest'):
        assert list(passages(start + other)) == []
    # The word that would fit comes too soon, then too late.
    assert list(passages('Our harvest was a good harvest. ' + 40 * FILLER)) == []
    assert list(passages('')) == []


def test_passages_do_not_overlap():
    text = 'Our harvest was good. ' + 25 * FILLER + 'They came for the harvest. '
    contexts = [context for context, _ in passages((3 * text).strip())]
    assert contexts == 3 * [text.removesuffix(' harvest. ')]


def test_files_are_the_same_everywhere(tmp_path):
    write_speech_tasks(tmp_path)
    items = [json.loads(x) for x in (tmp_path / 'speeches_last_word.jsonl').open()]
    assert len(items) > 40
    for item in items:
        assert item['continuation'] in item['context'].lower()
        assert 149 <= len(item['context'].split()) < 190
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in tmp_path.iterdir()
    }
    assert digests == {
        'speeches_last_word.jsonl': 'ce0e61775f2151e1',
        'speeches_text.txt': '5d3d93ea82136961',
    }
