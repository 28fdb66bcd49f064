"""Corpora, tokenizers and batches for training and evaluation."""

from sa_jax.data.corpora import Corpus, Documents, load_corpus
from sa_jax.data.pipeline import (
    Batch,
    TrainingIterator,
    evaluation_batches,
    merge_states,
    training_iterator,
)
from sa_jax.data.tokenizers import check_vocabulary, load_tokenizer
from sa_jax.tokenization.tokenizers import Tokenizer

__all__ = [
    'Batch',
    'Corpus',
    'Documents',
    'Tokenizer',
    'TrainingIterator',
    'check_vocabulary',
    'evaluation_batches',
    'load_corpus',
    'load_tokenizer',
    'merge_states',
    'training_iterator',
]
