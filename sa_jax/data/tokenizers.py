"""The tokenizer a configuration asks for: trained byte-level BPE, a published one, or bytes."""

import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from absl import logging

from sa_jax.data import corpora
from sa_jax.tokenization.published import load_published
from sa_jax.tokenization.tokenizers import ByteTokenizer, Tokenizer, make_byte_level

KINDS = ('bpe', 'file', 'bytes')
SEPARATOR = '<|endoftext|>'

# At most about this much text is read to train a BPE, spread evenly over the training split.
_TRAINING_BYTES = 256 << 20


def load_tokenizer(
    config: Mapping[str, Any], corpus: corpora.Corpus, cache_dir: str | pathlib.Path
) -> Tokenizer:
    """Returns a tokenizer, training it first if it has to be.

    Args:
      config: the section `data.tokenizer` of a configuration. `kind` is 'bpe' (trained on the
        corpus' training split, of `vocab_size` tokens at most, the special one included), 'file'
        (at `path`: a tokenizer.json, GPT-2's vocab.json beside its merges.txt, a SentencePiece
        .model, or a folder with one of these; `separator` names the token that ends documents
        where it cannot be told), or 'bytes'.
      corpus: what a BPE is trained on.
      cache_dir: where trained ones are kept, by corpus and size.

    Raises:
      ValueError: if the kind is unknown, a file is missing, damaged or of unknown format, or no
        token ends documents.
    """
    kind = config['kind']
    if kind == 'bytes':
        return ByteTokenizer()
    if kind == 'bpe':
        return _trained_bpe(corpus, config.get('vocab_size'), pathlib.Path(cache_dir))
    if kind == 'file':
        if not config.get('path'):
            raise ValueError("data.tokenizer.kind='file' needs data.tokenizer.path.")
        path = pathlib.Path(config['path']).expanduser()
        if not path.exists():
            raise ValueError(f'data.tokenizer.path={str(path)!r} does not exist.')
        return load_published(path, config.get('separator'))
    raise ValueError(corpora.did_you_mean('data.tokenizer.kind', kind, KINDS))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Checks that a model has a logit for every token.

    Raises:
      ValueError: if the tokenizer has more tokens than the model.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f'The tokenizer has {tokenizer.vocab_size} tokens, more than the model with '
            f'model.vocab_size={vocab_size}; set that to at least {tokenizer.vocab_size}, or '
            'choose a smaller vocabulary.'
        )


def _trained_bpe(corpus, vocab_size, cache_dir):
    # 256 bytes and the separator.
    if not isinstance(vocab_size, int) or vocab_size < 257:
        raise ValueError(
            f'data.tokenizer.vocab_size={vocab_size!r}; byte-level BPE needs a number >= 257.'
        )
    path = cache_dir.expanduser() / f'bpe-{vocab_size}-{corpus.fingerprint}.json'
    if not path.exists():
        logging.info('Training a BPE of %d tokens, kept in %s.', vocab_size, path)
        _write_atomically(path, _train_bpe(corpus, vocab_size).to_str())
    try:
        return load_published(path, SEPARATOR)
    except ValueError as error:
        raise ValueError(
            f'The trained tokenizer {path} is damaged. Delete it; the next run trains it again.'
        ) from error


def _train_bpe(corpus, vocab_size):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    make_byte_level(tokenizer)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(corpus), trainer)
    return tokenizer


def _training_texts(corpus) -> Iterator[str]:
    documents = corpus.documents('train')
    stride = -(-corpus.text_bytes['train'] // _TRAINING_BYTES)
    for index in range(0, len(documents), stride):
        yield documents[index]['text']


def _write_atomically(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        'w', encoding='utf-8', dir=path.parent, prefix=f'.{path.name}.', delete=False
    ) as file:
        file.write(text)
    os.replace(file.name, path)
