"""Checkpoints in Hugging Face's format: every value in its place, every fault named."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_files import LLAMA, QWEN3_MOE, make_tensors, write_checkpoint
from flax import nnx
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from sa_jax.models.pretrained import load as load_module
from sa_jax.models.pretrained import load_pretrained
from sa_jax.models.sharding import make_mesh, parameter_shardings

FIELDS = {'llama': LLAMA, 'qwen3_moe': QWEN3_MOE}


@pytest.fixture(params=FIELDS)
def checkpoint(request, tmp_path):
    """A checkpoint's directory and its tensors."""
    fields = FIELDS[request.param]
    tensors = make_tensors(fields)
    write_checkpoint(tmp_path, fields, tensors)
    return tmp_path, tensors


@pytest.fixture
def llama(tmp_path):
    tensors = make_tensors(LLAMA)
    write_checkpoint(tmp_path, LLAMA, tensors)
    return tmp_path, tensors


def _parameters(model):
    flat, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(model)))
    return {jax.tree_util.keystr(path, simple=True, separator='/'): x for path, x in flat}


def test_parameters_are_the_tensors_transposed_and_stacked(checkpoint):
    directory, tensors = checkpoint
    model, tokenizer, context_length = load_pretrained(directory, dtype='float32')
    assert (tokenizer, context_length) == (None, 64)
    found = _parameters(model)
    layer = 'model.layers.1.'
    query = tensors[layer + 'self_attn.q_proj.weight']
    expected = {
        'embedding': tensors['model.embed_tokens.weight'],
        'unembedding': tensors['lm_head.weight'],
        'final_norm': tensors['model.norm.weight'],
        'layers/attention_norm': tensors[layer + 'input_layernorm.weight'],
        'layers/feed_forward_norm': tensors[layer + 'post_attention_layernorm.weight'],
        'layers/attention/query': query.reshape(4, -1, 16).transpose(2, 0, 1),
        'layers/attention/key': tensors[layer + 'self_attn.k_proj.weight']
        .reshape(2, -1, 16)
        .transpose(2, 0, 1),
        'layers/attention/value': tensors[layer + 'self_attn.v_proj.weight']
        .reshape(2, -1, 16)
        .transpose(2, 0, 1),
        'layers/attention/output': tensors[layer + 'self_attn.o_proj.weight'].T.reshape(4, -1, 16),
    }
    if 'layers/experts/router' in found:
        expected |= {
            'layers/attention/query_norm': tensors[layer + 'self_attn.q_norm.weight'],
            'layers/attention/key_norm': tensors[layer + 'self_attn.k_norm.weight'],
            'layers/experts/router': tensors[layer + 'mlp.gate.weight'].T,
        } | {
            f'layers/experts/{name}': np.stack(
                [tensors[f'{layer}mlp.experts.{e}.{name}_proj.weight'].T for e in range(4)]
            )
            for name in ('gate', 'up', 'down')
        }
    else:
        expected |= {
            f'layers/feed_forward/{name}': tensors[f'{layer}mlp.{name}_proj.weight'].T
            for name in ('gate', 'up', 'down')
        }
    assert set(found) == set(expected)
    for name, value in expected.items():
        actual = found[name][1] if name.startswith('layers/') else found[name]
        np.testing.assert_array_equal(actual, value, err_msg=name)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_parameters_are_rounded_to_the_type_asked_for(llama, dtype):
    directory, tensors = llama
    model = load_pretrained(directory, dtype=dtype).model
    assert model.config.compute_dtype == dtype
    assert {x.dtype for x in _parameters(model).values()} == {np.dtype(dtype)}
    expected = tensors['model.embed_tokens.weight'].astype(dtype)
    np.testing.assert_array_equal(model.embedding[...], expected)


def test_a_tensor_larger_than_a_piece_is_converted_whole(llama, monkeypatch):
    directory, tensors = llama
    monkeypatch.setattr(load_module, '_PIECE', 100)
    model = load_pretrained(directory, dtype='float32').model
    np.testing.assert_array_equal(model.embedding[...], tensors['model.embed_tokens.weight'])


def test_several_files_with_an_index_and_bfloat16_are_read(tmp_path):
    tensors = make_tensors(LLAMA, bfloat16)
    write_checkpoint(tmp_path, LLAMA, tensors, num_files=3)
    # The index decides: this one isn't in it.
    save_file({'consolidated': np.ones(3)}, tmp_path / 'consolidated.safetensors')
    model = load_pretrained(tmp_path, dtype='float32').model
    expected = tensors['lm_head.weight'].astype(np.float32)
    np.testing.assert_array_equal(model.unembedding[...], expected)


@pytest.mark.skipif(jax.device_count() < 8, reason='needs 8 devices')
def test_each_device_reads_its_slice_only(checkpoint, monkeypatch):
    directory, _ = checkpoint
    whole = _parameters(load_pretrained(directory, dtype='float32').model)
    read = []

    class Spy(load_module.SafetensorsFiles):
        def read(self, name, index):
            found = super().read(name, index)
            read.append((name, found.size))
            return found

    monkeypatch.setattr(load_module, 'SafetensorsFiles', Spy)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    model = load_pretrained(directory, dtype='float32', mesh=mesh).model
    for name, value in _parameters(model).items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)
    state = nnx.state(model)
    for x, sharding in zip(
        jax.tree.leaves(state), jax.tree.leaves(parameter_shardings(state, mesh)), strict=True
    ):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    # A matrix of 16 × 16 in four shards.
    sizes = {size for name, size in read if name == 'model.layers.0.self_attn.q_proj.weight'}
    assert sizes == {whole['layers/attention/query'][0].size // 4}


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda t: t.pop('model.norm.weight'), 'lacks model.norm.weight'),
        (lambda t: t.update({'model.extra': np.ones(2)}), 'should not have, model.extra'),
        (
            lambda t: t.update({'lm_head.weight': np.ones((3, 16), np.float32)}),
            r'another shape lm_head.weight \(3, 16\) \(expected \(40, 16\)\)',
        ),
        (
            lambda t: t.update({'model.norm.weight': np.ones(16, np.int8)}),
            'types.*model.norm.weight I8',
        ),
    ],
)
def test_wrong_tensors_are_listed(tmp_path, change, message):
    tensors = make_tensors(LLAMA)
    change(tensors)
    write_checkpoint(tmp_path, LLAMA, tensors)
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path)


def test_a_configuration_of_endless_layers_is_refused_at_once(tmp_path):
    tensors = make_tensors(LLAMA)
    for layers, message in (
        (1 << 14, 'has 21 tensors, and the configuration asks for 147459'),
        (1 << 15, 'num_hidden_layers = 32768; expected a whole number from 1 to 16,384'),
    ):
        write_checkpoint(tmp_path, LLAMA | {'num_hidden_layers': layers}, tensors)
        with pytest.raises(ValueError, match=message):
            load_pretrained(tmp_path)


def test_a_configuration_without_a_context_is_refused_before_weights_are_read(tmp_path):
    write_checkpoint(tmp_path, LLAMA | {'max_position_embeddings': 'many'}, {})
    with pytest.raises(ValueError, match="max_position_embeddings = 'many'"):
        load_pretrained(tmp_path)


def test_tied_embeddings_may_be_stored_twice(tmp_path):
    fields = LLAMA | {'tie_word_embeddings': True}
    tensors = make_tensors(LLAMA)
    write_checkpoint(tmp_path, fields, tensors)
    model = load_pretrained(tmp_path, dtype='float32').model
    assert 'unembedding' not in _parameters(model)


def test_truncated_files_are_refused(llama):
    directory, _ = llama
    path = directory / 'model.safetensors'
    whole = path.read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match='is no safetensors file, or is truncated'):
            load_pretrained(directory)


def test_an_index_stays_in_its_directory_and_names_what_is_there(tmp_path):
    directory = tmp_path / 'model'
    write_checkpoint(directory, LLAMA, make_tensors(LLAMA), num_files=2)
    index = directory / 'model.safetensors.index.json'
    (directory / 'model-00002-of-00002.safetensors').rename(tmp_path / 'outside.safetensors')
    with pytest.raises(ValueError, match=r'lacks model-00002-of-00002\.safetensors'):
        load_pretrained(directory)
    for name in ('../outside.safetensors', str(tmp_path / 'outside.safetensors')):
        index.write_text(json.dumps({'weight_map': {'model.norm.weight': name}}))
        with pytest.raises(ValueError, match='outside of its directory'):
            load_pretrained(directory)
    for damaged in ('[]', '{"weight_map": 3}', '{'):
        index.write_text(damaged)
        with pytest.raises(ValueError, match='is no index'):
            load_pretrained(directory)


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda d: None, 'lacks config.json'),
        (lambda d: (d / 'config.json').write_text('{'), 'no JSON'),
        (lambda d: (d / 'config.json').write_text('[]'), 'holds list'),
        (lambda d: (d / 'config.json').write_text(json.dumps(LLAMA)), 'no .*safetensors.*pickled'),
    ],
)
def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path, make, message):
    make(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path)


@pytest.mark.parametrize('name', ['../models/x', 'a/b/c', 'a\\b/c', 'plain', 'x.gguf'])
def test_what_cannot_be_found_is_named(name):
    with pytest.raises(ValueError, match=r'neither a directory|does not exist'):
        load_pretrained(name)


def test_an_unknown_type_is_named(llama):
    with pytest.raises(ValueError, match="dtype = 'float16'; expected one of 'bfloat16'"):
        load_pretrained(llama[0], dtype='float16')


def test_the_hub_is_asked_for_whole_repositories_without_pickles(llama, monkeypatch):
    import huggingface_hub

    asked = {}

    def snapshot_download(name, *, allow_patterns):
        asked[name] = allow_patterns
        return str(llama[0])

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    load_pretrained('Some-Org/some-model.1')
    ((name, patterns),) = asked.items()
    assert name == 'Some-Org/some-model.1'
    assert 'config.json' in patterns
    assert not any(pattern.endswith(('*', 'bin', 'pth', 'pt')) for pattern in patterns[:1])


@pytest.mark.slow
def test_without_a_network_it_says_what_to_download():
    script = (
        'from sa_jax.models.pretrained import load_pretrained\n'
        "try: load_pretrained('some-org/some-model')\n"
        'except ValueError as error: print(error)\n'
    )
    environment = {'HF_HUB_OFFLINE': '1', 'HF_HOME': '/nonexistent', 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run(
        [sys.executable, '-c', script],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 'hf download some-org/some-model --local-dir DIR' in done.stdout


_MEASURE = """
import sys, threading, time
import jax
from flax import nnx
from sa_jax.models.pretrained import load_pretrained

def resident():
    # Not the pages of the mapped file, which the kernel takes back at will.
    lines = open('/proc/self/status')
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith('RssAnon'))

directory, small, dtype = sys.argv[1:]
load_pretrained(small, dtype=dtype)  # imports, compilers
before = most = resident()
is_done = threading.Event()

def watch():
    global most
    while not is_done.wait(0.0005):
        most = max(most, resident())

thread = threading.Thread(target=watch)
thread.start()
model = load_pretrained(directory, dtype=dtype).model
is_done.set()
thread.join()
held = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
print(held, most - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='reads /proc')
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('family', FIELDS)
def test_loading_needs_about_one_tensor_beside_the_parameters(tmp_path, family, dtype):
    fields = FIELDS[family] | {
        'vocab_size': 80_000,
        'hidden_size': 512,
        'intermediate_size': 1536,
        'num_hidden_layers': 4,
        'tie_word_embeddings': True,
    }
    if family == 'qwen3_moe':
        # A layer's experts are two thirds of the embedding, as in Qwen3-30B-A3B.
        fields |= {'num_experts': 64, 'moe_intermediate_size': 800}
    tensors = make_tensors(fields)
    write_checkpoint(tmp_path / 'large', fields, tensors)
    write_checkpoint(tmp_path / 'small', FIELDS[family], make_tensors(FIELDS[family]))
    done = subprocess.run(
        [sys.executable, '-c', _MEASURE, tmp_path / 'large', tmp_path / 'small', dtype],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    held, most = map(int, done.stdout.split())
    assert held == sum(x.size for x in tensors.values()) * np.dtype(dtype).itemsize
    assert held <= most < held + 1.3 * max(x.nbytes for x in tensors.values())
