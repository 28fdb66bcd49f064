"""Published tokenizers, by the path of their file."""

import hashlib
import pathlib

import tokenizers

from sa_jax.extras import optional_import
from sa_jax.tokenization.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    make_byte_level,
)
from sa_jax.untrusted import damage_reported, read_json

_SETTINGS = 'tokenizer_config.json'
# What the usual published vocabularies call the end of a document.
_END_TOKENS = ('<|endoftext|>', '<|end_of_text|>', '</s>', '<eos>', '[SEP]')


def load_published(path: str | pathlib.Path, separator: str | None = None) -> Tokenizer:
    """Returns the tokenizer in a file.

    Args:
      path: a tokenizer.json, GPT-2's vocab.json beside its merges.txt, a SentencePiece .model, or
        a folder with one of these.
      separator: the token that ends documents, where it cannot be told.

    Raises:
      ValueError: if the file is missing, damaged or of unknown format, or no token ends documents.
      ImportError: if it is a SentencePiece model, and the package is not installed.
    """
    path = pathlib.Path(path).expanduser()
    if not path.exists():
        raise ValueError(f'{path} does not exist; expected a tokenizer or a folder with one.')
    if path.is_dir():
        names = ('tokenizer.json', 'vocab.json', 'tokenizer.model')
        found = [path / name for name in names if (path / name).exists()]
        found = found or sorted(path.glob('*.model'))
        if not found:
            raise ValueError(f'{path} holds none of {", ".join(names)}.')
        path = found[0]
    with damage_reported(path.parent):
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
        tokenizer,
        bos_id=bos_id,
        eos_id=eos_id,
        digest=hashlib.sha256(data).hexdigest(),
        adds_bos=_adds_bos(path),
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
    make_byte_level(tokenizer)
    bos_id, eos_id = _special_ids(vocabulary, tokenizer.token_to_id, separator)
    tokenizer.add_special_tokens([tokenizer.id_to_token(i) for i in {bos_id, eos_id}])
    digest = hashlib.sha256(vocabulary.read_bytes() + merges.read_bytes()).hexdigest()
    return HuggingFaceTokenizer(
        tokenizer, bos_id=bos_id, eos_id=eos_id, digest=digest, adds_bos=_adds_bos(vocabulary)
    )


def _load_sentencepiece(path, separator):
    sentencepiece = optional_import('sentencepiece', 'SentencePiece models', 'corpora')
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
    adds_bos = _adds_bos(path)
    if adds_bos is None:  # as Llama 2, which has no other file that says so
        adds_bos = bos_id == processor.bos_id()
    digest = hashlib.sha256(data).hexdigest()
    return SentencePieceTokenizer(
        processor, bos_id=bos_id, eos_id=eos_id, digest=digest, adds_bos=adds_bos
    )


def _special_ids(path, token_to_id, separator) -> tuple[int, int]:
    """Returns the ids of the tokens before and after a document.

    In this order: the configured separator, what a tokenizer_config.json beside the file says, the
    usual names. Where nothing begins a document, what ends the one before it does.
    """
    settings = _settings(path)
    if separator:
        names = [None, separator]
    elif settings is not None:
        names = [_content(path, settings, key) for key in ('bos_token', 'eos_token')]
    else:
        end = next((token for token in _END_TOKENS if token_to_id(token) is not None), None)
        names = ['<s>' if end == '</s>' else None, end]
    bos_id, eos_id = (None if name is None else token_to_id(name) for name in names)
    if eos_id is None:
        raise ValueError(
            f'{path} has no token {separator!r}.'
            if separator
            else f'Cannot tell which token of {path} ends a document; give it as the separator '
            '(in a configuration, set data.tokenizer.separator).'
        )
    return (eos_id if bos_id is None else bos_id), eos_id


def _adds_bos(path) -> bool | None:
    """Whether texts begin with a token, by a tokenizer_config.json; None if none says so."""
    settings = _settings(path) or {}
    adds_bos = settings.get('add_bos_token')
    if not isinstance(adds_bos, bool | None):
        raise ValueError(
            f'{path.parent / _SETTINGS} has add_bos_token = {adds_bos!r}; expected true or false.'
        )
    if adds_bos and settings.get('bos_token') is None:
        return False  # as in transformers
    return adds_bos


def _settings(path) -> dict | None:
    """The tokenizer_config.json beside a file, if there is one."""
    beside = path.parent / _SETTINGS
    if not beside.exists():
        return None
    return read_json(beside)


def _content(path, settings, key) -> str | None:
    token = settings.get(key)
    name = token.get('content') if isinstance(token, dict) else token
    if token is not None and not isinstance(name, str):
        raise ValueError(f'{path.parent / _SETTINGS} has {key} = {token!r:.60}; expected a token.')
    return name
