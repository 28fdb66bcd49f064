"""Where each parameter of a decoder stands in a Hugging Face checkpoint, slice by slice.

Torch keeps the matrix of a linear layer as `[out, in]`; here it is `[in, out]`, with heads as axes
of their own, all layers stacked. Gates of attention paths, which no published model has, are kept
as they are here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sa_jax.models.config import DecoderConfig

Index = tuple[slice, ...]
Read = Callable[[str, Index], np.ndarray]

_ALIGNMENT = 64  # bytes


@dataclasses.dataclass(frozen=True)
class Source:
    """The tensors that a parameter is read from: one, or one for each layer or expert of it.

    Attributes:
      name: Of the tensors, such as 'model.layers.{layer}.self_attn.q_proj.weight'.
      shape: Of each.
      cut: Maps an index into the parameter, without layers and experts, to one into the tensor.
      arrange: Maps what is read there, and the shape of the index, to the parameter's form.
      undo: Maps the parameter, without layers and experts, to the tensor.
    """

    name: str
    shape: tuple[int, ...]
    cut: Callable[[Index], Index]
    arrange: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]
    undo: Callable[[np.ndarray], np.ndarray]

    def tensors(self, parameter: np.ndarray, config: DecoderConfig) -> dict[str, np.ndarray]:
        """The tensors that hold a parameter, by name."""
        layers, experts = self._each(config)
        # Layers lead, then experts.
        rows = parameter.reshape(len(layers) * len(experts), *parameter.shape[self._leading :])
        return {
            name: self.undo(row).reshape(self.shape)
            for name, row in zip(self.names(config), rows, strict=True)
        }

    @property
    def _leading(self) -> int:
        return ('{layer}' in self.name) + ('{expert}' in self.name)

    def count(self, config: DecoderConfig) -> int:
        """How many tensors there are."""
        layers, experts = self._each(config)
        return len(layers) * len(experts)

    def names(self, config: DecoderConfig) -> Iterator[str]:
        """The names of all its tensors."""
        layers, experts = self._each(config)
        return (self.name.format(layer=layer, expert=e) for layer in layers for e in experts)

    def _each(self, config):
        layers = range(config.num_layers if '{layer}' in self.name else 1)
        return layers, range(config.num_experts if '{expert}' in self.name else 1)

    def pieces(self, index: Index, shape: tuple[int, ...], most: int) -> Iterator[Index]:
        """Parts of a slice of the parameter, of one layer: experts of at most some float32 bytes.

        A tensor is a part by itself.
        """
        if '{expert}' not in self.name:
            yield index
            return
        first, last, _ = index[0].indices(shape[0])
        together = max(1, most // (4 * math.prod(self.shape)))
        for expert in range(first, last, together):
            yield slice(expert, min(expert + together, last)), *index[1:]

    def read(self, read: Read, index: Index, shape: tuple[int, ...], layer: int = 0) -> np.ndarray:
        """Reads a slice of the parameter, of one layer.

        Args:
          read: Reads a slice of a tensor.
          index: Into the parameter without layers.
          shape: Of the parameter without layers.
          layer: The layer.
        """
        if '{expert}' in self.name:
            which, *rest = index
            experts = range(*which.indices(shape[0]))
            size = _size(rest, shape[1:])
            for place, expert in enumerate(experts):
                found = self._read(read, tuple(rest), shape[1:], layer=layer, expert=expert)
                if not place:
                    # Filled in place: a list of them would be a second copy of the layer.
                    stacked = empty_aligned((len(experts), *size), found.dtype)
                stacked[place] = found
            return stacked
        return self._read(read, index, shape, layer=layer)

    def _read(self, read, index, shape, **which):
        found = read(self.name.format(**which), self.cut(index))
        return self.arrange(found, _size(index, shape))


def sources(config: DecoderConfig) -> dict[str, Source]:
    """The source of every parameter, by its path in the decoder."""
    hidden, head_dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    width, vocab = config.intermediate_size, config.vocab_size
    layer = 'model.layers.{layer}.'
    attention, mlp = layer + 'self_attn.', layer + 'mlp.'
    table = {
        'embedding': _as_it_is('model.embed_tokens.weight', vocab, hidden),
        'layers/attention_norm': _as_it_is(layer + 'input_layernorm.weight', hidden),
        'layers/attention/query': _to_heads(attention + 'q_proj.weight', hidden, heads, head_dim),
        'layers/attention/key': _to_heads(attention + 'k_proj.weight', hidden, kv_heads, head_dim),
        'layers/attention/value': _to_heads(
            attention + 'v_proj.weight', hidden, kv_heads, head_dim
        ),
        'layers/attention/output': _from_heads(
            attention + 'o_proj.weight', hidden, heads, head_dim
        ),
        'layers/feed_forward_norm': _as_it_is(layer + 'post_attention_layernorm.weight', hidden),
        'final_norm': _as_it_is('model.norm.weight', hidden),
    }
    if config.num_experts:
        expert = mlp + 'experts.{expert}.'
        table |= {
            'layers/experts/router': _linear(mlp + 'gate.weight', hidden, config.num_experts),
            'layers/experts/gate': _linear(expert + 'gate_proj.weight', hidden, width),
            'layers/experts/up': _linear(expert + 'up_proj.weight', hidden, width),
            'layers/experts/down': _linear(expert + 'down_proj.weight', width, hidden),
        }
    else:
        table |= {
            'layers/feed_forward/gate': _linear(mlp + 'gate_proj.weight', hidden, width),
            'layers/feed_forward/up': _linear(mlp + 'up_proj.weight', hidden, width),
            'layers/feed_forward/down': _linear(mlp + 'down_proj.weight', width, hidden),
        }
    if config.qk_norm:
        table['layers/attention/query_norm'] = _as_it_is(attention + 'q_norm.weight', head_dim)
        table['layers/attention/key_norm'] = _as_it_is(attention + 'k_norm.weight', head_dim)
    if config.has_gates:
        paths = len(config.attention)
        gate = paths, heads, head_dim if config.gate == 'channel' else 1
        table |= {
            'layers/attention/path_gate_kernel': _as_it_is(
                attention + 'path_gate.weight', hidden, *gate
            ),
            'layers/attention/path_gate_bias': _as_it_is(attention + 'path_gate.bias', *gate),
        }
    if not config.tie_embeddings:
        table['unembedding'] = _as_it_is('lm_head.weight', vocab, hidden)
    return table


def empty_aligned(shape: Sequence[int], dtype: np.typing.DTypeLike) -> np.ndarray:
    """An array whose memory JAX takes over on the CPU; another it would copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _size(index, shape):
    return tuple(len(range(*i.indices(n))) for i, n in zip(index, shape, strict=True))


def _as_it_is(name, *shape):
    return Source(name, shape, lambda index: index, lambda x, size: x, lambda x: x)


def _linear(name, inputs, outputs):
    return Source(
        name, (outputs, inputs), lambda index: index[::-1], lambda x, size: x.T, lambda x: x.T
    )


def _to_heads(name, hidden, heads, head_dim):
    """`[N·H, D]` as `[D, N, H]`."""

    def cut(index):
        inputs, outputs, _ = index
        return _rows(outputs, heads, head_dim), inputs

    return Source(
        name,
        (heads * head_dim, hidden),
        cut,
        lambda x, size: x.T.reshape(size),
        lambda x: x.reshape(hidden, -1).T,
    )


def _from_heads(name, hidden, heads, head_dim):
    """`[D, N·H]` as `[N, H, D]`."""

    def cut(index):
        inputs, _, outputs = index
        return outputs, _rows(inputs, heads, head_dim)

    return Source(
        name,
        (hidden, heads * head_dim),
        cut,
        lambda x, size: x.T.reshape(size),
        lambda x: x.reshape(-1, hidden).T,
    )


def _rows(of_heads, heads, head_dim):
    # No mesh splits the width of a head.
    start, stop, _ = of_heads.indices(heads)
    return slice(start * head_dim, stop * head_dim)
