"""What a tokenizer is; plain bytes, the library `tokenizers`, and SentencePiece."""

import abc
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

_MAX_TOKENS = 1 << 24  # far more than published vocabularies have
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
      adds_bos: whether models with this tokenizer are to read `bos_id` before every text, as its
        files say. `encode` doesn't add it.
    """

    bos_id: int
    eos_id: int
    token_bytes: np.ndarray
    fingerprint: str
    adds_bos: bool = False

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

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos_id: int,
        eos_id: int,
        digest: str,
        adds_bos: bool | None = None,
    ):
        """Wraps a tokenizer; `adds_bos` is what its post-processor does if it is None."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.token_bytes = _token_bytes(tokenizer)
        self.fingerprint = f'{digest[:16]}-{bos_id}-{eos_id}'
        self.adds_bos = adds_bos
        if adds_bos is None:
            self.adds_bos = tokenizer.encode('', add_special_tokens=True).ids[:1] == [bos_id]

    def save(self, folder: pathlib.Path) -> None:
        """Writes tokenizer.json, and what `load_published` needs to know beside it."""
        self._tokenizer.save(str(folder / 'tokenizer.json'), pretty=False)
        settings = {
            'bos_token': self._tokenizer.id_to_token(self.bos_id),
            'eos_token': self._tokenizer.id_to_token(self.eos_id),
            'add_bos_token': self.adds_bos,
        }
        (folder / 'tokenizer_config.json').write_text(json.dumps(settings, indent=2) + '\n')

    def encode(self, text):
        """Returns the token ids, without special tokens."""
        # Unlike `encode`, this computes no offsets and releases the interpreter lock.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids):
        """Returns the text, without special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model."""

    def __init__(self, processor: Any, *, bos_id: int, eos_id: int, digest: str, adds_bos: bool):
        self._processor = processor
        self.adds_bos = adds_bos
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


def make_byte_level(tokenizer: tokenizers.Tokenizer) -> None:
    """Makes a BPE of the library `tokenizers` read and write bytes, split as for GPT-2."""
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()


def _token_bytes(tokenizer):
    """Returns the number of bytes of every token, `[vocab_size]`."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    if size > _MAX_TOKENS:
        raise ValueError(
            f'it has a token of number {size - 1:,}; expected less than {_MAX_TOKENS:,}.'
        )
    count = np.zeros(size, np.int32)
    # Byte-level vocabularies write each byte as one character.
    byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())['decoder'])
    for token, index in vocabulary.items():
        count[index] = len(token) if byte_level else _piece_bytes(token)
    for index, token in tokenizer.get_added_tokens_decoder().items():
        count[index] = 0 if token.special else len(token.content.encode())
    return count


def _piece_bytes(piece: str) -> int:
    return 1 if _BYTE_PIECE.fullmatch(piece) else len(piece.replace('▁', ' ').encode())
