"""Tokenizers: trained byte-level BPE, published ones by path, and plain bytes."""

import abc
import hashlib
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from absl import logging

from sa_jax.data import corpora, sources

KINDS = ('bpe', 'file', 'bytes')
SEPARATOR = '<|endoftext|>'

# At most about this much text is read to train a BPE, spread evenly over the training split.
_TRAINING_BYTES = 256 << 20
# What the usual published vocabularies call the end of a document.
_END_TOKENS = (SEPARATOR, '<|end_of_text|>', '</s>', '<eos>', '[SEP]')
_BYTE_PIECE = re.compile(r'<0x[0-9A-Fa-f]{2}>')


class Tokenizer(abc.ABC):
    """Text to token ids and back.

    Attributes:
      bos_id: the token put before each document.
      eos_id: the token that ends each document; often the same as `bos_id`.
      token_bytes: int32 `[vocab_size]`, the bytes of text each token stands for; 0 for the special
        ones. For bytes and byte-level BPE they add up to the length of the encoded text exactly (if
        the tokenizer does not normalise it). For SentencePiece they are those of the piece with a
        space for its mark, and so count a space that the model puts before a text.
      fingerprint: a hash of the vocabulary and the choice of special tokens.
    """

    bos_id: int
    eos_id: int
    token_bytes: np.ndarray
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self.token_bytes)

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the token ids of `text`, without any special token.

        The name of a special token inside `text` is text like any other.
        """

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; special tokens are left out."""


class ByteTokenizer(Tokenizer):
    """Bytes of UTF-8 as tokens 0 to 255, and 256 between documents."""

    bos_id = eos_id = 256
    fingerprint = 'bytes'

    def __init__(self):
        self.token_bytes = np.array([1] * 256 + [0], np.int32)

    def encode(self, text):
        """Returns the bytes."""
        return list(text.encode())

    def decode(self, ids):
        """Returns the text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in map(int, ids) if i < 256).decode(errors='replace')


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, bos_id: int, eos_id: int, digest: str):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.token_bytes = _token_bytes(tokenizer)
        self.fingerprint = f'{digest[:16]}-{bos_id}-{eos_id}'

    def encode(self, text):
        """Returns the token ids, without special tokens."""
        # Unlike `encode`, this computes no offsets and releases the interpreter lock.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids):
        """Returns the text, without special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model."""

    def __init__(self, processor: Any, *, bos_id: int, eos_id: int, digest: str):
        self._processor = processor
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.token_bytes = np.array(
            [
                0
                if processor.is_control(i) or processor.is_unknown(i)
                else _piece_bytes(processor.id_to_piece(i))
                for i in range(processor.vocab_size())
            ],
            np.int32,
        )
        self.fingerprint = f'{digest[:16]}-{bos_id}-{eos_id}'

    def encode(self, text):
        """Returns the piece ids, without control pieces."""
        return self._processor.encode(text)

    def decode(self, ids):
        """Returns the text, without control pieces."""
        return self._processor.decode([int(i) for i in ids])


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
        return _from_file(pathlib.Path(config['path']).expanduser(), config.get('separator'))
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
        return _load_json(path, SEPARATOR)
    except ValueError as error:
        raise ValueError(
            f'The trained tokenizer {path} is damaged. Delete it; the next run trains it again.'
        ) from error


def _train_bpe(corpus, vocab_size):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    _make_byte_level(tokenizer)
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


def _make_byte_level(tokenizer):
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()


def _write_atomically(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        'w', encoding='utf-8', dir=path.parent, prefix=f'.{path.name}.', delete=False
    ) as file:
        file.write(text)
    os.replace(file.name, path)


def _from_file(path, separator):
    if not path.exists():
        raise ValueError(f'data.tokenizer.path={str(path)!r} does not exist.')
    if path.is_dir():
        names = ('tokenizer.json', 'vocab.json', 'tokenizer.model')
        found = [path / name for name in names if (path / name).exists()]
        found = found or sorted(path.glob('*.model'))
        if not found:
            raise ValueError(f'{path} holds none of {", ".join(names)}.')
        path = found[0]
    if path.name in ('vocab.json', 'merges.txt'):
        return _load_gpt2(path.parent, separator)
    if path.suffix == '.json':
        return _load_json(path, separator)
    if path.suffix == '.model':
        return _load_sentencepiece(path, separator)
    raise ValueError(
        f'{path}: unknown tokenizer format; expected a tokenizer.json, a vocab.json beside a '
        'merges.txt, or a SentencePiece .model.'
    )


def _load_json(path, separator):
    data = path.read_bytes()
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # The library raises plain Exceptions.
        raise ValueError(
            f'{path} is no tokenizer of the library tokenizers, or is damaged: {error}. '
            'If it is a vocabulary of GPT-2, name it vocab.json, beside its merges.txt.'
        ) from error
    bos_id, eos_id = _special_ids(path, tokenizer.token_to_id, separator)
    return HuggingFaceTokenizer(
        tokenizer, bos_id=bos_id, eos_id=eos_id, digest=hashlib.sha256(data).hexdigest()
    )


def _load_gpt2(folder, separator):
    vocabulary, merges = folder / 'vocab.json', folder / 'merges.txt'
    for path in (vocabulary, merges):
        if not path.exists():
            raise ValueError(f'{folder} lacks {path.name}; vocab.json and merges.txt go together.')
    try:
        tokenizer = tokenizers.Tokenizer(
            tokenizers.models.BPE.from_file(str(vocabulary), str(merges))
        )
    except Exception as error:  # The library raises plain Exceptions.
        raise ValueError(
            f'{vocabulary} and {merges.name} are no BPE vocabulary, or are damaged: {error}.'
        ) from error
    _make_byte_level(tokenizer)
    bos_id, eos_id = _special_ids(vocabulary, tokenizer.token_to_id, separator)
    tokenizer.add_special_tokens([tokenizer.id_to_token(i) for i in {bos_id, eos_id}])
    digest = hashlib.sha256(vocabulary.read_bytes() + merges.read_bytes()).hexdigest()
    return HuggingFaceTokenizer(tokenizer, bos_id=bos_id, eos_id=eos_id, digest=digest)


def _load_sentencepiece(path, separator):
    sentencepiece = sources.optional_import('sentencepiece', 'SentencePiece models')
    data = path.read_bytes()
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise ValueError(f'{path} is no SentencePiece model, or is damaged: {error}.') from error

    def token_to_id(token):
        index = processor.piece_to_id(token)
        return None if processor.is_unknown(index) else index

    bos_id, eos_id = processor.bos_id(), processor.eos_id()
    if separator or eos_id < 0:
        bos_id, eos_id = _special_ids(path, token_to_id, separator)
    elif bos_id < 0:
        bos_id = eos_id
    digest = hashlib.sha256(data).hexdigest()
    return SentencePieceTokenizer(processor, bos_id=bos_id, eos_id=eos_id, digest=digest)


def _special_ids(path, token_to_id, separator) -> tuple[int, int]:
    """Returns the ids of the tokens before and after a document.

    In this order: the configured separator, what a tokenizer_config.json beside the file says, the
    usual names. Where nothing begins a document, what ends the one before it does.
    """
    beside = path.parent / 'tokenizer_config.json'
    if separator:
        names = [None, separator]
    elif beside.exists():
        settings = json.loads(beside.read_text(encoding='utf-8'))
        names = [_content(settings.get(key)) for key in ('bos_token', 'eos_token')]
    else:
        end = next((token for token in _END_TOKENS if token_to_id(token) is not None), None)
        names = ['<s>' if end == '</s>' else None, end]
    bos_id, eos_id = (None if name is None else token_to_id(name) for name in names)
    if eos_id is None:
        raise ValueError(
            f'{path} has no token {separator!r}.'
            if separator
            else f'Cannot tell which token of {path} ends a document; set data.tokenizer.separator.'
        )
    return (eos_id if bos_id is None else bos_id), eos_id


def _content(token):
    return token['content'] if isinstance(token, dict) else token


def _token_bytes(tokenizer):
    """Returns the number of bytes of every token, `[vocab_size]`."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    # Byte-level vocabularies write each byte as one character.
    byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())['decoder'])
    count = np.zeros(max(vocabulary.values()) + 1, np.int32)
    for token, index in vocabulary.items():
        count[index] = len(token) if byte_level else _piece_bytes(token)
    for index, token in tokenizer.get_added_tokens_decoder().items():
        count[index] = 0 if token.special else len(token.content.encode())
    return count


def _piece_bytes(piece: str) -> int:
    return 1 if _BYTE_PIECE.fullmatch(piece) else len(piece.replace('▁', ' ').encode())
