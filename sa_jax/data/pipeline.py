"""From documents to batches: tokenize, pack, and share out among processes.

The training documents are dealt to V virtual shards once and for all: shard v owns the documents
v, V + v, 2V + v, ..., shuffles them anew each epoch, and packs them into rows by itself. Row r of
a global batch of B rows comes from shard r // (B / V), whichever process makes it. So the global
batch, and a saved state, do not depend on the number of processes.

A document becomes `inputs = [bos] + ids` and `targets = ids + [eos]`. Packing puts several into a
row of T tokens, each a segment with a number and positions of its own, and continues a document
that does not fit as a new segment of the next row. Where a row changes segments no target crosses.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from sa_jax.data import corpora
from sa_jax.tokenization.tokenizers import Tokenizer
from sa_jax.untrusted import damage_reported

PACKINGS = ('concat', 'first_fit')

# Rows that first-fit packing fills at a time: more of them leave less padding.
_FIRST_FIT_ROWS = 16
# Far more than a document fills.
_MAX_DOCUMENT_ROWS = 1 << 17
# Documents that a tokenizing thread may be ahead of the packing.
_DOCUMENTS_AHEAD = 4

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Encode(grain.transforms.Map):
    """Turns a document into its input and target tokens."""

    tokenizer: Tokenizer

    def map(self, document: Mapping[str, str]) -> dict[str, np.ndarray]:
        tokens = [
            self.tokenizer.bos_id,
            *self.tokenizer.encode(document['text']),
            self.tokenizer.eos_id,
        ]
        tokens = np.asarray(tokens, np.int32)
        return {'inputs': tokens[:-1], 'targets': tokens[1:]}


@dataclasses.dataclass(frozen=True)
class _Split(grain.experimental.FlatMapTransform):
    """Splits a document into pieces that fit into a row."""

    length: int

    def flat_map(self, element: Mapping[str, np.ndarray]) -> Sequence[dict[str, np.ndarray]]:
        return [
            {name: tokens[start : start + self.length] for name, tokens in element.items()}
            for start in range(0, len(element['inputs']), self.length)
        ]


class TrainingIterator(Iterator[Batch]):
    """Endless batches, with a state from which they continue exactly.

    Made by `training_iterator`.
    """

    def __init__(
        self,
        shards: Mapping[int, grain.IterDataset],
        *,
        rows_per_shard: int,
        sequence_length: int,
        cross_document_attention: bool,
        identity: Mapping[str, Any],
    ):
        self._shards = {shard: iter(dataset) for shard, dataset in shards.items()}
        self._rows_per_shard = rows_per_shard
        self._sequence_length = sequence_length
        self._cross_document_attention = cross_document_attention
        self._identity = dict(identity)

    def __next__(self) -> Batch:
        rows = [next(rows) for rows in self._shards.values() for _ in range(self._rows_per_shard)]
        return _stack(rows, len(rows), self._sequence_length, self._cross_document_attention)

    def get_state(self) -> dict[str, Any]:
        """Returns what `set_state` needs to continue after the batches yielded so far.

        It can be written as JSON. It holds this process' virtual shards; see `merge_states`.
        """
        shards = {str(shard): rows.get_state() for shard, rows in self._shards.items()}
        # Through JSON, since Grain's states hold references and tuples.
        return json.loads(json.dumps({'identity': self._identity, 'shards': shards}))

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state saved by any process count.

        Raises:
          ValueError: if the state is from another corpus, tokenizer, number of virtual shards, or
            way of packing, lacks some of this process' shards, or is damaged.
        """
        with damage_reported('The saved state of the data', Exception):
            self._set_state(state)

    def _set_state(self, state):
        if differences := [
            f'{name} was {state["identity"].get(name)!r} and is {value!r}'
            for name, value in self._identity.items()
            if state['identity'].get(name) != value
        ]:
            raise ValueError(
                f'The saved state of the data is from another pipeline: {"; ".join(differences)}.'
            )
        if missing := [shard for shard in self._shards if str(shard) not in state['shards']]:
            raise ValueError(
                f'The saved state of the data lacks the virtual shards {missing} of this process; '
                'with another number of processes, merge_states joins those saved.'
            )
        for shard, rows in self._shards.items():
            own = _tuples(state['shards'][str(shard)])
            # Grain makes these anew, however many they are.
            if not 0 <= own.get('elements_from_buffer_after_checkpoint', 0) <= _MAX_DOCUMENT_ROWS:
                raise ValueError(f'no document fills as many rows as it says of shard {shard}.')
            rows.set_state(own)
            next(rows)  # Grain looks at what it says only now.
            rows.set_state(own)


def training_iterator(
    corpus: corpora.Corpus,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    batch_size: int,
    virtual_shards: int = 8,
    seed: int = 0,
    packing: str = 'concat',
    cross_document_attention: bool = False,
    threads: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> TrainingIterator:
    """Returns this process' part of endless global batches of the training split.

    A batch is a dictionary of arrays `[batch_size / process_count, sequence_length]`: int32
    `inputs`, `targets`, `segment_ids` (0 is padding, else counted from 1 in each row) and
    `positions` (counted from 0 in each segment), and float32 `weights` (1 where there is a target).
    Process p makes the rows from `p * batch_size / process_count` on.

    Args:
      corpus: where the documents come from.
      tokenizer: what encodes them.
      sequence_length: tokens per row, T.
      batch_size: rows of the global batch, B.
      virtual_shards: V. Each draws from a fixed part of the documents.
      seed: of the shuffling.
      packing: 'concat' fills every row, splitting documents wherever a row ends; 'first_fit'
        splits those longer than a row only, and pads rows.
      cross_document_attention: whether a row is one segment, with positions 0 to T - 1.
      threads: threads per virtual shard that tokenize ahead, for hosts with cores to spare; 0
        tokenizes when a batch is asked for. The batches are the same.
      process_index: this process' number.
      process_count: number of processes, P.

    Raises:
      ValueError: unless P divides V and V divides B, or if a virtual shard would have no document.
    """
    _check_sizes(sequence_length=sequence_length, batch_size=batch_size)
    documents = corpus.documents('train')
    _check_shards(len(documents), virtual_shards, batch_size, process_index, process_count)
    own = virtual_shards // process_count
    shards = {
        shard: _pack(
            _shuffled(documents, shard, virtual_shards, seed)
            .map(_Encode(tokenizer))
            .to_iter_dataset(_read_options(threads)),
            sequence_length,
            packing,
        )
        for shard in range(process_index * own, (process_index + 1) * own)
    }
    return TrainingIterator(
        shards,
        rows_per_shard=batch_size // virtual_shards,
        sequence_length=sequence_length,
        cross_document_attention=cross_document_attention,
        identity={
            'corpus': corpus.fingerprint,
            'tokenizer': tokenizer.fingerprint,
            'virtual_shards': virtual_shards,
            'sequence_length': sequence_length,
            'packing': packing,
            'seed': seed,
        },
    )


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the states that the processes saved at one step into one that suits any number of them.

    Raises:
      ValueError: if they are from different pipelines.
    """
    identity = states[0]['identity']
    if any(state['identity'] != identity for state in states):
        raise ValueError('The states of the data are from different pipelines: cannot merge them.')
    shards = {shard: value for state in states for shard, value in state['shards'].items()}
    return {'identity': dict(identity), 'shards': shards}


def evaluation_batches(
    corpus: corpora.Corpus,
    split: str,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    batch_size: int,
    limit: int | None = None,
    cross_document_attention: bool = False,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """Yields this process' part of the global batches that cover a split once, in order.

    Documents are packed as with 'concat'. The last batch is filled up with rows of padding. The
    arrays are those of `training_iterator`.

    Args:
      corpus: where the documents come from.
      split: which documents.
      tokenizer: what encodes them.
      sequence_length: tokens per row, T.
      batch_size: rows of the global batch.
      limit: the number of batches after which to stop; None covers the whole split.
      cross_document_attention: whether a row is one segment, with positions 0 to T - 1.
      process_index: this process' number.
      process_count: number of processes; divides `batch_size`.

    Raises:
      ValueError: if there is no such split, or `process_count` does not divide `batch_size`.
    """
    _check_sizes(sequence_length=sequence_length, batch_size=batch_size)
    _check_process(process_index, process_count)
    if batch_size % process_count:
        raise ValueError(f'{process_count} processes do not divide batch_size={batch_size}.')
    dataset = grain.MapDataset.source(corpus.documents(split)).map(_Encode(tokenizer))
    rows = iter(_pack(dataset.to_iter_dataset(_read_options(0)), sequence_length, 'concat'))
    own = batch_size // process_count

    def batches():
        for _ in itertools.count() if limit is None else range(limit):
            chunk = list(itertools.islice(rows, batch_size))
            if not chunk:
                return
            mine = chunk[process_index * own : (process_index + 1) * own]
            yield _stack(mine, own, sequence_length, cross_document_attention)

    return batches()


def _shuffled(documents, shard, virtual_shards, seed) -> grain.MapDataset:
    """Returns the documents of a virtual shard, endlessly, in a new order each epoch."""
    # Grain adds the epoch to the seed: spread the shards' seeds far apart.
    own_seed = int(np.random.SeedSequence([seed, shard]).generate_state(1)[0])
    return grain.MapDataset.source(documents)[shard::virtual_shards].shuffle(seed=own_seed).repeat()


def _read_options(threads) -> grain.ReadOptions:
    return grain.ReadOptions(
        num_threads=threads, prefetch_buffer_size=threads and _DOCUMENTS_AHEAD * threads
    )


def _pack(dataset, length, packing) -> grain.IterDataset:
    """Packs variable-length `inputs` and `targets` into rows of `length` tokens."""
    lengths = {'inputs': length, 'targets': length}
    if packing == 'concat':
        return grain.experimental.ConcatThenSplitIterDataset(dataset, length_struct=lengths)
    if packing == 'first_fit':
        return grain.experimental.FirstFitPackIterDataset(
            grain.experimental.FlatMapIterDataset(dataset, _Split(length)),
            length_struct=lengths,
            num_packing_bins=_FIRST_FIT_ROWS,
            shuffle_bins=False,
        )
    raise ValueError(corpora.did_you_mean('data.packing', packing, PACKINGS))


def _stack(rows, count, length, cross_document_attention) -> Batch:
    """Stacks packed rows into a batch of `count` rows, those missing being padding."""
    names = {
        'inputs': 'inputs',
        'targets': 'targets',
        'segment_ids': 'inputs_segment_ids',
        'positions': 'inputs_positions',
    }
    batch = {name: np.zeros((count, length), np.int32) for name in names}
    for name, packed_name in names.items():
        for index, row in enumerate(rows):
            batch[name][index] = row[packed_name]
    valid = batch['segment_ids'] > 0
    if cross_document_attention:
        batch['segment_ids'] = valid.astype(np.int32)
        batch['positions'] = np.arange(length, dtype=np.int32) * valid
    batch['weights'] = valid.astype(np.float32)
    return batch


def _tuples(value):
    """Undoes what JSON does to the tuples in Grain's states, which are compared as such."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _check_sizes(**sizes):
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f'{name}={size!r}; expected a whole number >= 1.')


def _check_process(process_index, process_count):
    if not 0 <= process_index < process_count:
        raise ValueError(f'process_index={process_index} is not one of {process_count} processes.')


def _check_shards(num_documents, virtual_shards, batch_size, process_index, process_count):
    _check_sizes(virtual_shards=virtual_shards)
    _check_process(process_index, process_count)
    if virtual_shards % process_count:
        raise ValueError(
            f'{process_count} processes do not divide data.virtual_shards={virtual_shards}; choose '
            'a multiple of the number of processes.'
        )
    if batch_size % virtual_shards:
        raise ValueError(
            f'data.virtual_shards={virtual_shards} does not divide the batch of {batch_size} rows; '
            'choose a batch size that is a multiple of it.'
        )
    if num_documents < virtual_shards:
        raise ValueError(
            f'data.virtual_shards={virtual_shards} is more than the {num_documents} training '
            'documents, so that some would have none; choose fewer.'
        )
