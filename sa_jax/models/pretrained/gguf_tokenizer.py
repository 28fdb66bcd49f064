"""The tokenizer in the metadata of a GGUF file, built with the library `tokenizers`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers

from sa_jax.tokenization.tokenizers import HuggingFaceTokenizer

# Types of tokens. Unused ones only fill the vocabulary up to the size of the embedding.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_LONGEST = 1024  # characters; a file may come from anywhere

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
_WORD = r'[^\r\n\p{L}\p{N}]?\p{L}+'
_UPPER, _LOWER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]', r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]'


class _Pre(NamedTuple):
    """What happens to a text before the merges.

    Attributes:
      patterns: The text is split by each in turn; what lies between the matches are pieces too.
      whole_pieces: Whether a piece that is a token isn't merged.
      adds_bos: Whether texts begin with a token where the file doesn't say.
      composed: Whether the text is brought into the form NFC.
    """

    patterns: tuple[str, ...]
    whole_pieces: bool = False
    adds_bos: bool = False
    composed: bool = False


_LLAMA3 = _Pre(
    (f'{_CONTRACTIONS}|{_WORD}|' + r'\p{N}{1,3}|' + _REST,), whole_pieces=True, adds_bos=True
)
# By the value of tokenizer.ggml.pre.
_PRE = {
    'default': _Pre((r'[\p{P}\$\+<=>\^~\|]+', _GPT2, r'\p{N}+', '[0-9][0-9][0-9]')),
    'gpt-2': _Pre((_GPT2,)),
    'llama-bpe': _LLAMA3,
    'llama-v3': _LLAMA3,
    'llama3': _LLAMA3,
    'qwen2': _Pre((f'{_CONTRACTIONS}|{_WORD}|' + r'\p{N}|' + _REST,), composed=True),
    'smollm': _Pre((r'\p{N}', _GPT2)),
    'tekken': _Pre(
        (
            rf'[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*'
            r'|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+',
        ),
        whole_pieces=True,
        adds_bos=True,
    ),
}


class _Vocabulary(NamedTuple):
    """Tokens by what they are for.

    Attributes:
      ids: Of every token but the unused ones.
      special: Names of the control tokens.
      added: Names of the tokens that are found in a text before anything else.
      bos_id: Begins a document.
      eos_id: Ends one.
    """

    ids: dict[str, int]
    special: list[str]
    added: list[str]
    bos_id: int
    eos_id: int


def build_tokenizer(metadata: Mapping[str, Any]) -> HuggingFaceTokenizer:
    """Builds the tokenizer.

    Args:
      metadata: Of the file. `tokenizer.ggml.model` is 'gpt2' (byte-level BPE) or 'llama'
        (SentencePiece's BPE).

    Raises:
      ValueError: The metadata is incomplete, contradicts itself, or describes a tokenizer that
        isn't supported.
    """
    fields = _Fields(metadata)
    model = fields.get('model', str)
    if model not in _BUILDERS:
        raise ValueError(
            f'tokenizer.ggml.model = {model!r} is not supported; expected one of '
            f'{", ".join(_BUILDERS)}.'
        )
    vocabulary = _vocabulary(fields)
    try:
        tokenizer = _BUILDERS[model](fields, vocabulary)
    except ValueError:
        raise
    except Exception as error:  # The library raises plain Exceptions.
        raise ValueError(f'the tokenizer in the metadata is damaged: {error}.') from error
    # Those that a text may hold come first: a special token is never found in one.
    tokenizer.add_tokens([AddedToken(x, normalized=False, special=False) for x in vocabulary.added])
    tokenizer.add_special_tokens(
        [AddedToken(x, normalized=False, special=True) for x in vocabulary.special]
    )
    return HuggingFaceTokenizer(
        tokenizer,
        bos_id=vocabulary.bos_id,
        eos_id=vocabulary.eos_id,
        digest=hashlib.sha256(json.dumps(fields.used, sort_keys=True).encode()).hexdigest(),
        adds_bos=_adds_bos(metadata),
    )


def _adds_bos(metadata):
    """Whether texts begin with a token; where the file is silent, by the rules of llama.cpp."""
    given = metadata.get('tokenizer.ggml.add_bos_token')
    if not isinstance(given, bool | None):
        raise ValueError(f'tokenizer.ggml.add_bos_token = {given!r}; expected true or false.')
    if metadata.get('tokenizer.ggml.bos_token_id') is None:
        return False
    if given is not None:
        return given
    pre = _PRE.get(metadata.get('tokenizer.ggml.pre'))
    return metadata['tokenizer.ggml.model'] == 'llama' or (pre is not None and pre.adds_bos)


class _Fields:
    """The keys of the tokenizer.

    Attributes:
      used: Those that were asked for.
    """

    def __init__(self, metadata):
        self._metadata = metadata
        self.used: dict[str, Any] = {}

    def get(self, name, kind, default=None, of=None):
        """The value of a key, checked; a key without default has to be there."""
        key = f'tokenizer.ggml.{name}'
        value = self._metadata.get(key, default)
        if value is None:
            raise ValueError(f'the metadata lacks {key}.')
        if not isinstance(value, kind) or (of and not all(isinstance(x, of) for x in value)):
            raise ValueError(f'{key} is no {kind.__name__}{f" of {of.__name__}" if of else ""}.')
        self.used[key] = value
        return value


def _vocabulary(fields):
    tokens = fields.get('tokens', list, of=str)
    types = fields.get('token_type', list, [_NORMAL] * len(tokens), of=int)
    if len(types) != len(tokens):
        raise ValueError(f'it has {len(tokens)} tokens, but {len(types)} types of tokens.')
    if max(map(len, tokens), default=0) > _LONGEST:
        raise ValueError(f'it has a token of more than {_LONGEST} characters.')
    ids = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    twice = [x for i, x in enumerate(tokens) if types[i] != _UNUSED and ids[x] != i]
    if twice:
        raise ValueError(f'the tokens {twice[:10]} stand in the vocabulary twice.')
    eos_id = fields.get('eos_token_id', int)
    bos_id = fields.get('bos_token_id', int, eos_id)
    if not 0 <= min(bos_id, eos_id) <= max(bos_id, eos_id) < len(tokens):
        raise ValueError(f'the ids of special tokens, {bos_id} and {eos_id}, are no tokens.')
    kinds = (_UNKNOWN, _CONTROL)
    special = [x for x, i in ids.items() if types[i] in kinds or i in (bos_id, eos_id)]
    added = [x for x, i in ids.items() if types[i] == _USER_DEFINED]
    return _Vocabulary(ids, special, added, bos_id, eos_id)


def _byte_level(fields, vocabulary):
    """Byte-level BPE, as GPT-2's."""
    name = fields.get('pre', str)
    if name not in _PRE:
        raise ValueError(
            f'tokenizer.ggml.pre = {name!r} is not supported; expected one of {", ".join(_PRE)}.'
        )
    pre = _PRE[name]
    merges = [_pair(merge) for merge in fields.get('merges', list, of=str)]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary.ids, merges, ignore_merges=pre.whole_pieces)
    )
    if pre.composed:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(tokenizers.Regex(x), 'isolated') for x in pre.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge):
    left, _, right = merge.partition(' ')
    return left, right


def _sentencepiece(fields, vocabulary):
    """SentencePiece's BPE: of all pairs that make a piece, that of the best score is merged."""
    for name in ('remove_extra_whitespaces', 'precompiled_charsmap'):
        if fields.get(name, object, False):
            raise ValueError(f'tokenizer.ggml.{name} is not supported.')
    if vocabulary.added:
        raise ValueError(f'the user-defined pieces {vocabulary.added[:10]} are not supported.')
    scores = fields.get('scores', list, of=float)
    if len(scores) < len(vocabulary.ids):
        raise ValueError(f'it has {len(vocabulary.ids)} pieces, but {len(scores)} scores.')
    special = set(vocabulary.special)
    pieces = {token: i for token, i in vocabulary.ids.items() if token not in special}
    merges = [
        (-scores[i], token[:cut], token[cut:])
        for token, i in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    unknown = fields.get('unknown_token_id', int, 0)
    names = {i: token for token, i in vocabulary.ids.items()}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocabulary.ids,
            [(left, right) for _, left, right in sorted(merges)],
            unk_token=names.get(unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = fields.get('add_space_prefix', bool, True)
    prepend = [normalizers.Prepend('▁')] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(' ', '▁')])
    strip = [decoders.Strip(' ', 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


_BUILDERS = {'gpt2': _byte_level, 'llama': _sentencepiece}
