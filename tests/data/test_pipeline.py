"""The batches: independent of the process count, exactly resumable, nothing lost or doubled."""

import collections
import itertools
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from sa_jax.data import pipeline
from sa_jax.tokenization.tokenizers import ByteTokenizer

BOS = 256
TOKENIZER = ByteTokenizer()


@pytest.fixture(scope='module')
def corpus(make_corpus):
    # Lengths from below a row's to several rows', all texts different.
    return make_corpus([f'<{i}>' + 'abcdefghij'[i % 10] * (7 * i % 61) for i in range(23)])


def make_iterator(corpus, **options):
    defaults = {'sequence_length': 16, 'batch_size': 8, 'virtual_shards': 4, 'seed': 3}
    return pipeline.training_iterator(corpus, TOKENIZER, **(defaults | options))


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def segments(batches):
    """Yields the (inputs, targets) of every segment, row by row."""
    for batch in batches:
        for inputs, targets, ids in zip(
            batch['inputs'], batch['targets'], batch['segment_ids'], strict=True
        ):
            for segment in range(1, ids.max() + 1):
                yield inputs[ids == segment], targets[ids == segment]


def check_rows(batch):
    for inputs, targets, ids, positions, weights in zip(
        *(batch[k] for k in ('inputs', 'targets', 'segment_ids', 'positions', 'weights')),
        strict=True,
    ):
        length = np.count_nonzero(ids)
        np.testing.assert_array_equal(weights, ids > 0)
        # Padding comes last and is all zeros.
        for array in (inputs, targets, ids, positions):
            assert not array[length:].any()
        # Segments are numbered 1, 2, ... without a gap, positions count from 0 in each.
        steps = np.diff(ids[:length], prepend=0)
        assert set(steps) <= {0, 1}
        assert length == 0 or steps[0] == 1
        starts = np.flatnonzero(steps)
        expected = np.arange(length) - np.repeat(starts, np.diff(np.append(starts, length)))
        np.testing.assert_array_equal(positions[:length], expected)
        # A target is the next input, as long as the segment lasts.
        inside = np.flatnonzero(steps[1:] == 0)
        np.testing.assert_array_equal(targets[inside], inputs[inside + 1])


@pytest.mark.parametrize('packing', pipeline.PACKINGS)
@pytest.mark.parametrize('process_count', [2, 4])
def test_global_batch_is_independent_of_process_count(corpus, packing, process_count):
    expected = take(make_iterator(corpus, packing=packing), 12)
    parts = [
        take(
            make_iterator(
                corpus, packing=packing, process_index=index, process_count=process_count
            ),
            12,
        )
        for index in range(process_count)
    ]
    joined = [
        {name: np.concatenate([part[name] for part in step]) for name in step[0]}
        for step in zip(*parts, strict=True)
    ]
    assert_equal(joined, expected)


@pytest.mark.parametrize('packing', pipeline.PACKINGS)
def test_resumes_exactly_at_every_step(corpus, packing):
    options = {'packing': packing, 'virtual_shards': 2, 'batch_size': 4}
    iterator = make_iterator(corpus, **options)
    states, batches = [iterator.get_state()], []
    for batch in itertools.islice(iterator, 24):
        batches.append(batch)
        states.append(iterator.get_state())
    # Many rows end amid a document: those that continue one don't begin with the separator.
    assert np.mean([batch['inputs'][:, 0] != BOS for batch in batches]) > 0.2
    for step in range(20):
        resumed = make_iterator(corpus, **options)
        resumed.set_state(json.loads(json.dumps(states[step])))
        assert resumed.get_state() == states[step]
        assert_equal(take(resumed, 4), batches[step : step + 4])


@pytest.mark.parametrize('threads', [0, 2])
def test_a_used_iterator_can_be_set_back(corpus, threads):
    iterator = make_iterator(corpus, threads=threads)
    take(iterator, 3)
    state = iterator.get_state()
    expected = take(iterator, 5)
    iterator.set_state(state)
    assert_equal(take(iterator, 5), expected)
    assert_equal(expected, take(make_iterator(corpus), 8)[3:])


def test_resumes_with_another_process_count(corpus):
    parts = [make_iterator(corpus, process_index=i, process_count=2) for i in range(2)]
    for part in parts:
        take(part, 5)
    state = pipeline.merge_states([part.get_state() for part in parts])
    expected = take(make_iterator(corpus), 8)[5:]
    resumed = make_iterator(corpus)
    resumed.set_state(state)
    assert_equal(take(resumed, 3), expected)

    with pytest.raises(ValueError, match=r'lacks the virtual shards \[2, 3\].*merge_states'):
        make_iterator(corpus).set_state(parts[0].get_state())


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'virtual_shards': 2}, 'virtual_shards was 4 and is 2'),
        ({'sequence_length': 8}, 'sequence_length was 16 and is 8'),
        ({'seed': 4}, 'seed was 3 and is 4'),
        ({'packing': 'first_fit'}, "packing was 'concat' and is 'first_fit'"),
    ],
)
def test_rejects_the_state_of_another_pipeline(corpus, change, message):
    state = make_iterator(corpus).get_state()
    with pytest.raises(ValueError, match=message):
        make_iterator(corpus, **change).set_state(state)
    with pytest.raises(ValueError, match='different pipelines'):
        pipeline.merge_states([state, make_iterator(corpus, **change).get_state()])


def test_rejects_the_state_of_another_corpus_or_tokenizer(corpus, make_corpus):
    state = make_iterator(corpus).get_state()
    other = make_corpus(['x'] * 23, fingerprint='other')
    with pytest.raises(ValueError, match="corpus was 'in-memory' and is 'other'"):
        make_iterator(other).set_state(state)
    state['identity']['tokenizer'] = 'other'
    with pytest.raises(ValueError, match="tokenizer was 'other' and is 'bytes'"):
        make_iterator(corpus).set_state(state)


@pytest.mark.parametrize(
    ('name', 'value', 'message'),
    [
        ('elements_from_buffer_after_checkpoint', 1 << 32, 'no document fills as many rows'),
        ('elements_from_buffer_after_checkpoint', 'a', 'TypeError'),
        ('parent_state', {'next_index': 0.5}, 'Error'),
        ('parent_state', {'next_index': -1}, 'out of range'),
        ('remainder_slices', 3, 'AttributeError'),
    ],
)
def test_rejects_a_damaged_state(corpus, name, value, message):
    state = make_iterator(corpus).get_state()
    state['shards']['0'][name] = value
    with pytest.raises(ValueError, match=f'The saved state of the data: .*{message}'):
        make_iterator(corpus).set_state(state)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    sequence_length=st.integers(1, 24),
    batch_size=st.integers(1, 5),
)
def test_evaluation_covers_a_split_once(make_corpus, lengths, sequence_length, batch_size):
    texts = ['é' * (length // 2) + 'x' * (length % 2) for length in lengths]
    batches = list(
        pipeline.evaluation_batches(
            make_corpus(['x'], validation=texts),
            'validation',
            TOKENIZER,
            sequence_length=sequence_length,
            batch_size=batch_size,
        )
    )
    for batch in batches:
        assert all(array.shape == (batch_size, sequence_length) for array in batch.values())
        check_rows(batch)
    documents = [[BOS, *text.encode(), BOS] for text in texts]
    valid = [batch['weights'] > 0 for batch in batches]
    for name, part in (('inputs', slice(None, -1)), ('targets', slice(1, None))):
        tokens = [batch[name][mask] for batch, mask in zip(batches, valid, strict=True)]
        assert np.concatenate(tokens).tolist() == [t for d in documents for t in d[part]]


@hypothesis.settings(max_examples=10)
@hypothesis.given(
    lengths=st.lists(st.integers(0, 30), min_size=3, max_size=9),
    sequence_length=st.integers(4, 24),
    virtual_shards=st.sampled_from([1, 3]),
)
def test_concat_loses_and_doubles_no_token(make_corpus, lengths, sequence_length, virtual_shards):
    texts = [f'{i}:' + 'x' * length for i, length in enumerate(lengths)]
    iterator = make_iterator(
        make_corpus(texts),
        sequence_length=sequence_length,
        batch_size=virtual_shards,
        virtual_shards=virtual_shards,
    )
    tokens_needed = 3 * sum(len(text) + 1 for text in texts)
    batches = take(iterator, -(-tokens_needed // sequence_length))
    for batch in batches:
        check_rows(batch)
        assert batch['weights'].all()
    for shard in range(virtual_shards):
        # A shard's rows, joined, are its documents one after the other.
        stream = np.concatenate([batch['inputs'][shard] for batch in batches])
        documents = [
            TOKENIZER.decode(part) for part in np.split(stream, np.flatnonzero(stream == BOS))
        ][1:-1]
        own = texts[shard::virtual_shards]
        for epoch in range(len(documents) // len(own)):
            assert sorted(documents[epoch * len(own) :][: len(own)]) == sorted(own)
        targets = np.concatenate([batch['targets'][shard] for batch in batches])
        np.testing.assert_array_equal(targets[:-1], stream[1:])


def test_first_fit_loses_and_doubles_nothing(make_corpus):
    # Documents of different lengths, up to 2.5 rows; pieces are recognised by their letter.
    texts = [chr(ord('a') + i) * (3 * i) for i in range(14)]
    iterator = make_iterator(
        make_corpus(texts), virtual_shards=1, batch_size=16, packing='first_fit'
    )
    batches = take(iterator, 6)  # A batch is one round of packing: a prefix of the stream.
    for batch in batches:
        check_rows(batch)
    targets = collections.Counter(
        int(target) for _, piece in segments(batches) for target in piece if target != BOS
    )
    passes = {text[0]: targets[ord(text[0])] / len(text) for text in texts[1:]}
    # All have been seen equally often but for the epoch under way.
    assert min(passes.values()) >= 1
    assert max(passes.values()) - min(passes.values()) <= 1
    assert sum(value % 1 > 0 for value in passes.values()) <= 1


def test_epochs_and_seeds_shuffle_anew(make_corpus):
    texts = [f'{i:015d}' for i in range(40)]  # Each fills exactly one row of 16.
    corpus = make_corpus(texts)

    def order(seed):
        batches = take(make_iterator(corpus, virtual_shards=1, batch_size=1, seed=seed), 80)
        return [TOKENIZER.decode(batch['inputs'][0]) for batch in batches]

    first, second = order(0)[:40], order(0)[40:]
    assert sorted(first) == sorted(second) == texts
    assert first != second
    assert first != texts
    assert order(1)[:40] != first


def test_cross_document_attention_makes_a_row_one_segment(corpus):
    batch = next(make_iterator(corpus, cross_document_attention=True))
    separate = next(make_iterator(corpus))
    np.testing.assert_array_equal(batch['inputs'], separate['inputs'])
    np.testing.assert_array_equal(batch['targets'], separate['targets'])
    assert separate['segment_ids'].max() > 1
    np.testing.assert_array_equal(batch['segment_ids'], np.ones((8, 16)))
    np.testing.assert_array_equal(batch['positions'], np.tile(np.arange(16), (8, 1)))


def test_evaluation_limit_and_processes(make_corpus):
    corpus = make_corpus(['x'], validation=['a' * 50, 'b' * 7, 'c' * 30])

    def batches(**options):
        return list(
            pipeline.evaluation_batches(
                corpus, 'validation', TOKENIZER, sequence_length=8, batch_size=4, **options
            )
        )

    whole = batches()
    assert [batch['weights'].sum() for batch in whole] == [32, 32, 26]
    assert_equal(batches(limit=2), whole[:2])
    assert batches(limit=0) == []
    halves = zip(
        *(batches(process_index=index, process_count=2) for index in range(2)), strict=True
    )
    joined = [{k: np.concatenate([a[k], b[k]]) for k in a} for a, b in halves]
    assert_equal(joined, whole)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'process_count': 3}, '3 processes do not divide data.virtual_shards=4'),
        ({'batch_size': 6}, 'data.virtual_shards=4 does not divide the batch of 6 rows'),
        ({'batch_size': 0}, 'batch_size=0; expected a whole number >= 1'),
        ({'sequence_length': 2.5}, 'sequence_length=2.5; expected a whole number'),
        ({'virtual_shards': 24, 'batch_size': 24}, '24 is more than the 23 training documents'),
        ({'process_index': 2, 'process_count': 2}, 'process_index=2 is not one of 2 processes'),
        ({'packing': 'firstfit'}, "data.packing='firstfit'.*Did you mean 'first_fit'"),
    ],
)
def test_errors_of_training(corpus, options, message):
    with pytest.raises(ValueError, match=message):
        make_iterator(corpus, **options)


def test_errors_of_evaluation_come_at_the_call(corpus):
    def call(split='validation', **options):
        pipeline.evaluation_batches(
            corpus, split, TOKENIZER, sequence_length=8, batch_size=4, **options
        )

    with pytest.raises(ValueError, match="no split 'test'; it has train, validation"):
        call(split='test')
    with pytest.raises(ValueError, match='3 processes do not divide batch_size=4'):
        call(process_count=3)
