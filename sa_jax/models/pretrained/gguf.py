"""GGUF files, presented as if they were Hugging Face checkpoints."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from sa_jax.extras import optional_import
from sa_jax.models.pretrained.files import listed
from sa_jax.models.pretrained.gguf_config import config_fields
from sa_jax.models.pretrained.gguf_header import Header, TensorInfo, read_header
from sa_jax.models.pretrained.gguf_tokenizer import build_tokenizer
from sa_jax.tokenization.published import load_published
from sa_jax.tokenization.tokenizers import Tokenizer
from sa_jax.untrusted import damage_reported

_ROPE_FACTORS = 'rope_freqs.weight'
_TOP = {
    'output.weight': 'lm_head.weight',
    'output_norm.weight': 'model.norm.weight',
    'token_embd.weight': 'model.embed_tokens.weight',
}
_LAYER = {
    'attn_k.weight': 'self_attn.k_proj.weight',
    'attn_norm.weight': 'input_layernorm.weight',
    'attn_output.weight': 'self_attn.o_proj.weight',
    'attn_q.weight': 'self_attn.q_proj.weight',
    'attn_v.weight': 'self_attn.v_proj.weight',
    'ffn_norm.weight': 'post_attention_layernorm.weight',
}
_HEAD_NORMS = {
    'attn_k_norm.weight': 'self_attn.k_norm.weight',
    'attn_q_norm.weight': 'self_attn.q_norm.weight',
}
_DENSE = {
    'ffn_down.weight': 'mlp.down_proj.weight',
    'ffn_gate.weight': 'mlp.gate_proj.weight',
    'ffn_up.weight': 'mlp.up_proj.weight',
}
_EXPERTS = {
    'ffn_down_exps.weight': 'mlp.experts.{expert}.down_proj.weight',
    'ffn_gate_exps.weight': 'mlp.experts.{expert}.gate_proj.weight',
    'ffn_gate_inp.weight': 'mlp.gate.weight',
    'ffn_up_exps.weight': 'mlp.experts.{expert}.up_proj.weight',
}
_LAYER_NAMES = {
    'llama': _LAYER | _DENSE,
    'qwen3': _LAYER | _HEAD_NORMS | _DENSE,
    'qwen3moe': _LAYER | _HEAD_NORMS | _EXPERTS,
}
_ROTATED = ('self_attn.q_proj.weight', 'self_attn.k_proj.weight')
_LAYER_TENSOR = re.compile(r'blk\.(0|[1-9]\d{0,8})\.(.+)')

_MAX_TENSORS = 1 << 18  # far more than published models have
_PIECE = 1 << 20  # values that are dequantized at a time


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Where the rows of a tensor are.

    Attributes:
      info: Of the tensor in the file.
      expert: Which of its stacked matrices it is; None if it isn't stacked.
      head_dim: If nonzero, the channels of each head of this width alternate between its halves.
    """

    info: TensorInfo
    expert: int | None = None
    head_dim: int = 0

    @property
    def shape(self):
        return self.info.shape if self.expert is None else self.info.shape[1:]


class GgufFile:
    """A GGUF file of architecture llama, qwen3 or qwen3moe.

    Attributes:
      config: The fields of `config.json` that say the same as its metadata.
      shapes: Of each tensor, by the name it has in a Hugging Face checkpoint. Stacked experts are a
        tensor each; matrices are `[out, in]`.
    """

    def __init__(self, path: str | os.PathLike, *, ignore: Collection[str] = ()):
        """Reads the header.

        Args:
          path: Of the file.
          ignore: Keys of its metadata, unknown to this package, that are known not to matter.

        Raises:
          ValueError: The file is no GGUF file, is damaged or truncated, or holds an architecture,
            metadata, tensors or quantizations that aren't supported.
          ImportError: The package gguf is missing.
        """
        self._gguf = optional_import('gguf', 'GGUF files', 'pretrained')
        self._path = Path(path)
        with damage_reported(self._path):
            self._header: Header = read_header(self._path)
            self._check_types()
            self._check_sizes()
            self.config: dict[str, Any] = self._config(ignore)
            self._tensors = self._by_published_name()
        self.shapes = {name: rows.shape for name, rows in self._tensors.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor; little more than it is in memory at any time.

        Args:
          name: As in `shapes`.
          index: A slice of step 1 for each axis.

        Returns:
          The values: float32, or the file's own type where that is float16 or bfloat16. Rows of
          queries and keys are in Hugging Face's order, halves of heads one after the other.
        """
        tensor = self._tensors[name]
        *rows, columns = (
            range(*i.indices(size)) for i, size in zip(index, tensor.shape, strict=True)
        )
        if any(axis.step != 1 for axis in (*rows, columns)):
            raise ValueError(f'{name}: index = {index}; expected slices of step 1.')
        if not rows:
            return self._read(tensor, range(1), columns)[0]
        return self._read(tensor, rows[0], columns)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the metadata.

        Where that can't be built, a tokenizer.json beside the file stands in for it.

        Raises:
          ValueError: It can't be built, and there is no tokenizer.json.
        """
        beside = self._path.with_name('tokenizer.json')
        try:
            return build_tokenizer(self._header.metadata)
        except ValueError as error:
            if beside.exists():
                return load_published(beside)
            raise ValueError(
                f'{self._path}: {error} Put the tokenizer.json of the model beside it.'
            ) from error

    def _check_types(self):
        """Checks that the values of every tensor can be read."""
        tensors = self._header.tensors
        kinds = {info.kind for info in tensors.values()}
        unsupported = {kind for kind in kinds if not self._is_supported(kind)}
        bad = [f'{n} (type {i.kind})' for n, i in tensors.items() if i.kind in unsupported]
        if bad:
            raise ValueError(f'tensors of types that are not supported: {listed(bad)}.')

    def _is_supported(self, kind):
        try:
            _, size = self._block(kind)
            block = np.zeros((1, size), np.uint8)
            self._gguf.quants.dequantize(block, self._gguf.GGMLQuantizationType(kind))
        except (ValueError, KeyError, NotImplementedError):
            return False
        return True

    def _check_sizes(self):
        """Checks that the rows are whole blocks, and the tensors within the file."""
        tensors = self._header.tensors
        ragged = [n for n, i in tensors.items() if i.shape[-1] % self._block(i.kind)[0]]
        if ragged:
            raise ValueError(f'tensors whose rows are no whole blocks: {listed(ragged)}.')
        size = len(self._header.data)
        cut = [n for n, i in tensors.items() if i.offset + self._bytes(i) > size]
        if cut:
            raise ValueError(
                f'the file is truncated; of {listed(cut)} it lacks all or a part. Download it '
                'again.'
            )
        # Else a small file could ask for any amount of memory.
        if sum(map(self._bytes, tensors.values())) > size:
            raise ValueError('it is damaged: its tensors overlap.')

    def _block(self, kind):
        """Values in a block, and its bytes."""
        return self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(kind)]

    def _bytes(self, info):
        values, size = self._block(info.kind)
        return math.prod(info.shape) // values * size

    def _config(self, ignore):
        tensors, factors = self._header.tensors, None
        if 'token_embd.weight' not in tensors:
            raise ValueError('it has no tensor token_embd.weight.')
        if _ROPE_FACTORS in tensors:
            rows = _Rows(tensors[_ROPE_FACTORS])
            if len(rows.shape) != 1 or rows.shape[0] > 1 << 16:
                raise ValueError(f'{_ROPE_FACTORS} has the shape {rows.shape}; expected a vector.')
            factors = self._read(rows, range(1), range(*rows.shape))[0].astype(float).tolist()
            if not all(0 < factor < math.inf for factor in factors):
                raise ValueError(f'{_ROPE_FACTORS} holds {factors}; expected positive numbers.')
        return config_fields(
            self._header.metadata,
            vocab_size=tensors['token_embd.weight'].shape[0],
            tied='output.weight' not in tensors,
            rope_factors=factors,
            ignore=ignore,
        )

    def _by_published_name(self):
        """The tensors by the names that Hugging Face's checkpoints give them."""
        architecture = self._header.metadata['general.architecture']
        found, unknown, misshapen, layers = {}, [], [], set()
        for name, info in self._header.tensors.items():
            if name == _ROPE_FACTORS:
                continue
            published = _TOP.get(name)
            if match := _LAYER_TENSOR.fullmatch(name):
                published = _LAYER_NAMES[architecture].get(match[2])
                layers.add(int(match[1]))
            if published is None:
                unknown.append(name)
                continue
            if match:
                published = f'model.layers.{match[1]}.{published}'
            tensors = self._split(published, info, architecture)
            if tensors is None:
                misshapen.append(f'{name} {info.shape}')
            else:
                found |= tensors
            if len(found) > _MAX_TENSORS:
                raise ValueError(f'it has more than {_MAX_TENSORS:,} tensors, experts counted.')
        if unknown:
            raise ValueError(
                f'tensors that a model of architecture {architecture} should not have: '
                f'{listed(unknown)}.'
            )
        if misshapen:
            raise ValueError(f'tensors of unexpected shapes: {listed(misshapen)}.')
        count = self.config['num_hidden_layers']
        if len(layers) != count or max(layers) != count - 1:
            raise ValueError(
                f'{architecture}.block_count = {count}, but it has tensors of {len(layers)} layers.'
            )
        return found

    def _split(self, name, info, architecture):
        """The tensors that one in the file holds, by name; None if its shape isn't right."""
        if '{expert}' in name:
            count = self.config['num_experts']
            if len(info.shape) != 3 or info.shape[0] != count or count > _MAX_TENSORS:
                return None
            return {name.format(expert=e): _Rows(info, expert=e) for e in range(count)}
        if len(info.shape) > 2:
            return None
        head_dim = 0
        if architecture == 'llama' and name.endswith(_ROTATED):
            head_dim = self.config['head_dim']
            if head_dim % 2 or info.shape[0] % head_dim:
                return None
        return {name: _Rows(info, head_dim=head_dim)}

    def _read(self, tensor, rows, columns):
        """The values `[rows, columns]`; a vector is a single row."""
        info = tensor.info
        values, size = self._block(info.kind)
        # Whole blocks only.
        first, last = columns.start // values, -(-columns.stop // values)
        cut = slice(columns.start - first * values, columns.stop - first * values)
        stored = self._header.data[info.offset : info.offset + self._bytes(info)]
        stored = stored.reshape(-1, info.shape[-1] // values * size)
        if tensor.expert is not None:
            stored = stored[tensor.expert * info.shape[1] :]
        stored = stored[:, first * size : last * size]
        result = np.empty((len(rows), len(columns)), self._dtype(info.kind))
        step = max(1, _PIECE // max(1, (last - first) * values))
        for start in range(0, len(rows), step):
            piece = rows[start : start + step]
            if tensor.head_dim:
                piece = stored[_interleaved(piece, tensor.head_dim)]
            else:
                piece = stored[piece.start : piece.stop]
            result[start : start + step] = self._values(piece, info.kind)[:, cut]
        return result

    def _dtype(self, kind):
        name = self._gguf.GGMLQuantizationType(kind).name
        return {'F16': np.float16, 'BF16': bfloat16}.get(name, np.float32)

    def _values(self, stored, kind):
        if self._block(kind)[0] == 1:
            return np.ascontiguousarray(stored).view(self._dtype(kind))
        return self._gguf.quants.dequantize(stored, self._gguf.GGMLQuantizationType(kind))


def _interleaved(rows: range, head_dim: int) -> np.ndarray:
    """Where rows are in a file that alternates between the halves of each head."""
    rows = np.asarray(rows)
    half, channel = np.divmod(rows % head_dim, head_dim // 2)
    return rows - rows % head_dim + 2 * channel + half
