"""Checkpoints of published models as decoders, their weights read straight into shards."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from tqdm import tqdm

from sa_jax.extras import optional_import
from sa_jax.models.decoder import Decoder, abstract_decoder
from sa_jax.models.pretrained.files import SafetensorsFiles, listed
from sa_jax.models.pretrained.gguf import GgufFile
from sa_jax.models.pretrained.hf_config import context_length, decoder_config
from sa_jax.models.pretrained.tensors import Source, empty_aligned, sources
from sa_jax.models.sharding import parameter_shardings
from sa_jax.tokenization.published import load_published
from sa_jax.tokenization.tokenizers import Tokenizer
from sa_jax.untrusted import damage_reported, read_json

DTYPES = ('bfloat16', 'float32')
# Read from the hub; weights in formats that can hold code are not.
_HUB_FILES = (
    'config.json',
    'merges.txt',
    'model*.safetensors',
    'model.safetensors.index.json',
    'tokenizer*',
    'vocab.json',
)
_TOKENIZERS = ('tokenizer.json', 'vocab.json', 'tokenizer.model')
_PIECE = 32 << 20  # bytes that are converted at a time
_MISSING = 100  # tensors that may be missing, beside as many as there are, and are still named


class Pretrained(NamedTuple):
    """A published model.

    Attributes:
      model: The decoder.
      tokenizer: Its tokenizer; None if the directory has none.
      context_length: The tokens it was made for.
    """

    model: Decoder
    tokenizer: Tokenizer | None
    context_length: int


class _Tensors(Protocol):
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray: ...


def load_pretrained(
    source: str | os.PathLike,
    *,
    dtype: str = 'bfloat16',
    mesh: Mesh | None = None,
    ignore: Collection[str] = (),
) -> Pretrained:
    """Loads a Llama, Mistral, Qwen3 or Qwen3-MoE checkpoint.

    Each device reads its own slice of each tensor, one layer at a time: the host needs memory for
    about one tensor, or two copies of a layer's experts, beside what its devices hold.

    Args:
      source: A directory with config.json, *.safetensors (with or without an index) and a
        tokenizer; a GGUF file; or the name of a repository on the Hugging Face hub.
      dtype: Of the parameters and of the computation, 'bfloat16' or 'float32'.
      mesh: Of `make_mesh`; None for a single device.
      ignore: Fields of config.json, or keys of a GGUF file's metadata, that are unknown to this
        package and known not to matter.

    Returns:
      The model, whose attention is the checkpoint's own (`Decoder.with_config` gives it another),
      its tokenizer and context length.

    Raises:
      ValueError: The checkpoint isn't supported, is damaged, or can't be found; tensors are
        missing, surplus or misshapen, the first twenty of each named; or the mesh can't split it.
    """
    if dtype not in DTYPES:
        raise ValueError(f'dtype = {dtype!r}; expected one of {", ".join(map(repr, DTYPES))}.')
    path = Path(source).expanduser()
    if path.suffix == '.gguf':
        if not path.is_file():
            raise ValueError(f'{path} does not exist; expected a GGUF file.')
    elif not path.is_dir():
        path = _download(source)
    with damage_reported(path):
        tensors, fields, tokenizer = _open(path, ignore)
        config = decoder_config(fields, compute_dtype=dtype, ignore=ignore)
        length = context_length(fields)
        table = sources(config)
        _check_tensors(path, tensors.shapes, table, config)
        graph, abstract = nnx.split(abstract_decoder(config, dtype))
    shardings = _shardings(abstract, mesh)
    with tqdm(
        total=len(table), desc='Loading', unit='parameter', leave=False, disable=None
    ) as progress:

        def load(key_path, x, sharding):
            name = jax.tree_util.keystr(key_path, simple=True, separator='/')
            progress.update()
            return _load(table[name.removesuffix('/value')], tensors, x, sharding)

        state = jax.tree_util.tree_map_with_path(load, abstract, shardings)
    return Pretrained(nnx.merge(graph, state), tokenizer, length)


def _open(path: Path, ignore: Collection[str]) -> tuple[_Tensors, dict, Tokenizer | None]:
    """The tensors, the fields of config.json and the tokenizer."""
    if path.suffix == '.gguf':
        file = GgufFile(path, ignore=ignore)
        return file, file.config, file.tokenizer()
    if not (path / 'config.json').exists():
        raise ValueError(
            f'{path} lacks config.json; expected a checkpoint in the format of Hugging Face.'
        )
    fields, tensors = read_json(path / 'config.json'), SafetensorsFiles(path)
    has_tokenizer = any((path / name).exists() for name in _TOKENIZERS)
    return tensors, fields, load_published(path) if has_tokenizer else None


def _load(source: Source, tensors: _Tensors, x: jax.ShapeDtypeStruct, sharding: Sharding) -> Array:
    """A parameter in its shards."""
    read = functools.partial(_read_in_pieces, tensors, x.dtype)
    shards = [
        _load_shard(source, read, x.shape, index, device)
        for device, index in sharding.addressable_devices_indices_map(x.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


def _load_shard(source, read, shape, index, device):
    if '{layer}' not in source.name:
        return jax.device_put(source.read(read, index, shape), device)
    stacked = None
    for layer in range(shape[0]):
        row = 0
        for piece in source.pieces(index[1:], shape[1:], _PIECE):
            values = jax.device_put(source.read(read, piece, shape[1:], layer), device)
            if stacked is None:
                size = [len(range(*i.indices(n))) for i, n in zip(index, shape, strict=True)]
                stacked = jnp.zeros(size, values.dtype, device=device)
            # Waiting keeps a fast disk from filling the memory with layers.
            stacked = jax.block_until_ready(_fill(stacked, values, layer, row))
            row += len(values)
            del values  # or it would stay while the next one is read
    return stacked


@functools.partial(jax.jit, donate_argnums=0)
def _fill(stacked, values, layer, row):
    start = (layer, row) + (0,) * (values.ndim - 1)
    return jax.lax.dynamic_update_slice(stacked, values[None], start)


def _read_in_pieces(tensors, dtype, name, index):
    """A slice of a tensor in another type; only a piece of it is in memory in both."""
    shape = tensors.shapes[name]
    starts, size = [], []
    for i, n in zip(index, shape, strict=True):
        start, stop, _ = i.indices(n)
        starts.append(start)
        size.append(stop - start)
    result = empty_aligned(size, dtype)
    rows = max(1, _PIECE // max(1, 4 * int(np.prod(size[1:]))))
    for row in range(0, size[0], rows):
        piece = slice(starts[0] + row, starts[0] + min(row + rows, size[0]))
        result[row : row + rows] = tensors.read(name, (piece, *index[1:]))
    return result


def _shardings(abstract, mesh):
    if mesh is not None:
        return parameter_shardings(abstract, mesh)
    device = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda _: device, abstract)


def _check_tensors(path, shapes, table, config):
    # Counted first: a damaged config.json may ask for more names than fit into memory.
    count = sum(x.count(config) for x in table.values())
    if count > 2 * len(shapes) + _MISSING:
        raise ValueError(
            f'{path} does not fit its configuration: it has {len(shapes)} tensors, and the '
            f'configuration asks for {count}; download both anew, from one place.'
        )
    expected = {name: x.shape for x in table.values() for name in x.names(config)}
    # Left in some files by older programs; the model doesn't use them.
    surplus = {x for x in shapes if x not in expected and not x.endswith('.rotary_emb.inv_freq')}
    if config.tie_embeddings:
        surplus.discard('lm_head.weight')
    problems = {
        'lacks': sorted(set(expected) - set(shapes)),
        'has, but should not have,': sorted(surplus),
        'has in another shape': [
            f'{name} {shapes[name]} (expected {shape})'
            for name, shape in expected.items()
            if shapes.get(name, shape) != shape
        ],
    }
    lines = [f'{what} {listed(names)}' for what, names in problems.items() if names]
    if lines:
        raise ValueError(
            f'{path} does not fit its configuration: it {"; it ".join(lines)}. Download weights '
            'and config.json anew, from one place.'
        )


def _download(source) -> Path:
    """The directory of a repository of the hub, from its cache where that has it."""
    name = str(source)
    if not _is_repository(name):
        raise ValueError(
            f'{name} is neither a directory, nor a GGUF file, nor the name of a repository such as '
            "'Qwen/Qwen3-8B'."
        )
    hub = optional_import('huggingface_hub', 'repositories of the hub', 'pretrained')
    download: Callable = hub.snapshot_download
    try:
        return Path(download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # Of the network, of the hub, or of its cache.
        raise ValueError(
            f'The hub gave no {name}: {error}. Where the hub cannot be reached, run `hf download '
            f'{name} --local-dir DIR` where it can, copy DIR here and load that directory.'
        ) from error


def _is_repository(name: str) -> bool:
    parts = name.split('/')
    return len(parts) == 2 and all(x and x.strip('.') and '\\' not in x for x in parts)
