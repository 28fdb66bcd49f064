"""The text a run reads: its corpus, tokenizer, training batches and held-out batches."""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path

import jax
from ml_collections import ConfigDict

from sa_jax.data.corpora import Corpus, load_corpus
from sa_jax.data.pipeline import TrainingIterator, evaluation_batches, training_iterator
from sa_jax.data.tokenizers import check_vocabulary, load_tokenizer
from sa_jax.tokenization.tokenizers import Tokenizer

_HELD_OUT_SPLIT = 'validation'


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A corpus with its tokenizer, cut into batches as a configuration says.

    Attributes:
      config: the run's configuration.
      corpus: documents by split.
      tokenizer: fits the model's vocabulary.
    """

    config: ConfigDict
    corpus: Corpus
    tokenizer: Tokenizer

    def training_batches(self) -> TrainingIterator:
        """Returns the endless iterator over this process' rows."""
        data = self.config.data
        return training_iterator(
            self.corpus,
            self.tokenizer,
            sequence_length=data.sequence_length,
            batch_size=self.config.training.batch_size,
            virtual_shards=data.virtual_shards,
            seed=self.config.seed,
            packing=data.packing,
            cross_document_attention=data.cross_document_attention,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )

    @functools.cached_property
    def held_out(self) -> list[dict]:
        """The global batches evaluated during and after training."""
        return list(self._in_order(_HELD_OUT_SPLIT, self.config.evaluation.batches or None))

    def counted(self, tokens: int) -> Iterable[dict]:
        """Returns batches over the training split in order, about `tokens` of them at most."""
        batch_tokens = self._rows * self.config.data.sequence_length
        return self._in_order('train', -(-tokens // batch_tokens))

    @property
    def _rows(self) -> int:
        training = self.config.training
        return training.batch_size // training.gradient_accumulation

    def _in_order(self, split: str, limit: int | None) -> Iterable[dict]:
        return evaluation_batches(
            self.corpus,
            split,
            self.tokenizer,
            sequence_length=self.config.data.sequence_length,
            batch_size=self._rows,
            limit=limit,
            cross_document_attention=self.config.data.cross_document_attention,
        )


def load_inputs(config: ConfigDict, data_dir: Path) -> Inputs:
    """Loads the corpus and the tokenizer, building what is not there yet.

    Args:
      config: the run's configuration.
      data_dir: where built corpora and trained tokenizers are kept.

    Raises:
      ValueError: if data are missing or damaged, or the tokenizer knows more tokens than the
        model.
    """
    corpus = load_corpus(config.data, data_dir)
    tokenizer = load_tokenizer(config.data.tokenizer, corpus, data_dir)
    check_vocabulary(tokenizer, config.model.vocab_size)
    return Inputs(config, corpus, tokenizer)
