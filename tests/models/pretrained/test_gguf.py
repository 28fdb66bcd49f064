"""GGUF files: values and slices against what was written, configurations, damaged files."""

import struct
import sys
import time
import tracemalloc

import numpy as np
import pytest

gguf = pytest.importorskip('gguf')

import gguf_files as files  # noqa: E402
from gguf_files import EXPERTS, HEAD_DIM, HEADS, HIDDEN, KINDS, VOCAB, WIDTH  # noqa: E402
from ml_dtypes import bfloat16  # noqa: E402

from sa_jax.models.pretrained import gguf_header  # noqa: E402
from sa_jax.models.pretrained.gguf import GgufFile  # noqa: E402

Q_PROJ = 'model.layers.1.self_attn.q_proj.weight'
DTYPES = {KINDS.F16: np.float16, KINDS.BF16: bfloat16}


def whole(file, name):
    return file.read(name, (slice(None),) * len(file.shapes[name]))


@pytest.mark.parametrize('kind', [KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_1])
@pytest.mark.parametrize(
    ('architecture', 'tied'),
    [('llama', True), ('llama', False), ('qwen3', True), ('qwen3moe', False)],
)
def test_values_are_those_written(tmp_path, architecture, tied, kind):
    arrays = files.arrays_of(architecture, tied)
    tensors = files.stored(architecture, arrays)
    file = GgufFile(files.write(tmp_path / 'a.gguf', architecture, tensors=tensors, kind=kind))
    assert file.shapes == {name: x.shape for name, x in arrays.items()}
    assert file.config['tie_word_embeddings'] == tied
    for name, x in arrays.items():
        found = whole(file, name)
        if x.ndim == 2:
            assert found.dtype == DTYPES.get(kind, np.float32)
            x = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
        np.testing.assert_array_equal(found.astype(np.float32), x, err_msg=name)


@pytest.mark.parametrize('kind', [KINDS.F32, KINDS.BF16, KINDS.Q8_0])
def test_slices_are_those_of_the_whole(tmp_path, monkeypatch, kind):
    # Small pieces, so that slices have several.
    monkeypatch.setattr('sa_jax.models.pretrained.gguf._PIECE', 5 * HIDDEN)
    rng = np.random.default_rng(1)
    for architecture in ('llama', 'qwen3moe'):
        file = GgufFile(files.write(tmp_path / f'{architecture}.gguf', architecture, kind=kind))
        for name in (n for n in file.shapes if 'layers.0' not in n):
            x = whole(file, name)
            for _ in range(4):
                index = tuple(slice(*sorted(rng.integers(0, n + 1, 2))) for n in x.shape)
                np.testing.assert_array_equal(file.read(name, index), x[index], err_msg=name)
    with pytest.raises(ValueError, match='expected slices of step 1'):
        file.read(Q_PROJ, (slice(None, None, 2), slice(None)))


def test_reading_takes_little_more_memory_than_what_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr('sa_jax.models.pretrained.gguf._PIECE', 1 << 14)
    tensors = {
        'token_embd.weight': np.ones((1024, 1024), np.float32),
        'blk.0.attn_norm.weight': np.ones(1024, np.float32),
    }
    keys = files.keys_of('llama', block_count=1)
    path = files.write(tmp_path / 'a.gguf', tensors=tensors, keys=keys, kind=KINDS.Q8_0)
    file = GgufFile(path)
    tracemalloc.start()
    try:
        x = whole(file, 'model.embed_tokens.weight')
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * x.nbytes


def test_k_quants(tmp_path):
    # The package reads them but doesn't write them: bytes at random, with scales that are numbers.
    blocks = np.random.default_rng(0).integers(0, 256, (VOCAB, 144), np.uint8)
    blocks[:, :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)
    keys = files.keys_of('llama', embedding_length=256, block_count=1)
    raw = {'token_embd.weight': (blocks, KINDS.Q4_K)}
    tensors = {'blk.0.attn_norm.weight': np.ones(256, np.float32)}
    file = GgufFile(files.write(tmp_path / 'a.gguf', tensors=tensors, keys=keys, raw=raw))
    x = gguf.quants.dequantize(blocks, KINDS.Q4_K)
    name = 'model.embed_tokens.weight'
    np.testing.assert_array_equal(whole(file, name), x)
    np.testing.assert_array_equal(file.read(name, (slice(3, 9), slice(7, 99))), x[3:9, 7:99])


def test_config(tmp_path):
    common = {
        'vocab_size': VOCAB,
        'hidden_size': HIDDEN,
        'num_hidden_layers': 2,
        'num_attention_heads': HEADS,
        'num_key_value_heads': 2,
        'head_dim': HEAD_DIM,
        'hidden_act': 'silu',
        'max_position_embeddings': 512,
        'rms_norm_eps': pytest.approx(1e-5),
        'rope_theta': 50_000.0,
        'rope_scaling': None,
        'tie_word_embeddings': True,
    }
    experts = {'num_experts': EXPERTS, 'num_experts_per_tok': 2, 'norm_topk_prob': True}
    expected = {
        'llama': {'architectures': ['LlamaForCausalLM'], 'intermediate_size': WIDTH},
        'qwen3': {'architectures': ['Qwen3ForCausalLM'], 'intermediate_size': WIDTH},
        'qwen3moe': {'architectures': ['Qwen3MoeForCausalLM'], 'moe_intermediate_size': WIDTH}
        | experts,
    }
    for architecture, fields in expected.items():
        path = files.write(tmp_path / f'{architecture}.gguf', architecture)
        assert GgufFile(path).config == common | fields


@pytest.mark.parametrize(
    ('architecture', 'changes', 'expected'),
    [
        ('llama', {'rope.scaling.type': 'none'}, {'rope_scaling': None}),
        (
            'llama',
            {'rope.scaling.type': 'linear', 'rope.scaling.factor': 4.0},
            {'rope_scaling': {'rope_type': 'linear', 'factor': 4.0}},
        ),
        (
            'qwen3',
            {
                'rope.scaling.type': 'yarn',
                'rope.scaling.factor': 4.0,
                'rope.scaling.original_context_length': 128,
                'rope.scaling.yarn_beta_fast': 16.0,
            },
            {
                'rope_scaling': {
                    'rope_type': 'yarn',
                    'factor': 4.0,
                    'original_max_position_embeddings': 128,
                    'beta_fast': 16.0,
                }
            },
        ),
        (
            'llama',
            {'attention.sliding_window': 64},
            {'architectures': ['MistralForCausalLM'], 'sliding_window': 64},
        ),
        (
            'qwen3',
            {'attention.sliding_window': 64},
            {'use_sliding_window': True, 'max_window_layers': 0, 'sliding_window': 64},
        ),
        ('llama', {'attention.head_count_kv': [2, 2]}, {'num_key_value_heads': 2}),
        ('qwen3moe', {'expert_weights_norm': False}, {'norm_topk_prob': False}),
        ('llama', {'rope.freq_base': None}, {'rope_theta': 10_000.0}),
    ],
)
def test_config_of_options(tmp_path, architecture, changes, expected):
    keys = files.keys_of(architecture, **changes)
    config = GgufFile(files.write(tmp_path / 'a.gguf', architecture, keys=keys)).config
    assert config | expected == config


def test_rope_factors(tmp_path):
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    tensors = files.stored('llama', files.arrays_of('llama')) | {'rope_freqs.weight': factors}
    file = GgufFile(files.write(tmp_path / 'a.gguf', tensors=tensors))
    assert file.config['rope_scaling'] == {'rope_type': 'factors', 'factors': factors.tolist()}
    assert not [name for name in file.shapes if 'rope' in name]
    factors[3] = 0
    with pytest.raises(ValueError, match='expected positive numbers'):
        GgufFile(files.write(tmp_path / 'b.gguf', tensors=tensors))
    factors[3] = 1
    keys = files.keys_of('llama', **{'rope.scaling.factor': 2.0})
    with pytest.raises(ValueError, match=r'rope_freqs.weight beside .*linear.* is not supported'):
        GgufFile(files.write(tmp_path / 'c.gguf', tensors=tensors, keys=keys))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'attn_logit_softcapping': 5.0}, r'llama.attn_logit_softcapping are not supported'),
        ({'attention.causal': False}, r'llama.attention.causal = False; only True'),
        ({'expert_count': 8}, r'llama.expert_count = 8; only 0'),
        (
            {'rope.dimension_count': 16},
            r'rope.dimension_count = 16; only the width of the keys, 32',
        ),
        ({'rope.scaling.type': 'longrope'}, r"'longrope'; expected none, linear or yarn"),
        ({'block_count': None}, r'llama.block_count = None; expected a whole number'),
        ({'block_count': 3}, r'block_count = 3, but it has tensors of 2 layers'),
        ({'block_count': 1 << 31}, r'but it has tensors of 2 layers'),
        ({'attention.head_count_kv': [2, 4]}, r'head_count_kv = \[2, 4\]; expected a whole number'),
        ({'vocab_size': 50}, r'llama.vocab_size = 50, but the embedding has 40 rows'),
    ],
)
def test_errors_of_metadata(tmp_path, changes, message):
    path = tmp_path / 'a.gguf'
    keys = files.keys_of('llama', **changes)
    with pytest.raises(ValueError, match=f'{path}: .*{message}'):
        GgufFile(files.write(path, keys=keys))


def test_keys_that_do_not_matter_may_be_ignored(tmp_path):
    plain = GgufFile(files.write(tmp_path / 'a.gguf')).config
    keys = files.keys_of('llama', new_thing=5.0)
    path = files.write(tmp_path / 'b.gguf', keys=keys)
    with pytest.raises(ValueError, match=r"pass ignore=\('llama.new_thing',\)"):
        GgufFile(path)
    assert GgufFile(path, ignore=('llama.new_thing',)).config == plain


def test_errors_of_kind(tmp_path):
    tensors = {'token_embd.weight': np.ones((VOCAB, HIDDEN), np.float32)}
    with pytest.raises(ValueError, match=r"'gemma2' is not supported; .* llama, qwen3, qwen3moe"):
        GgufFile(files.write(tmp_path / 'a.gguf', 'gemma2', tensors=tensors, keys={}))
    keys = files.keys_of('llama')
    for extra, message in (
        ({'general.type': 'adapter'}, "general.type = 'adapter'"),
        ({'split.count': 3}, r'one of 3 parts of a model; join them'),
    ):
        with pytest.raises(ValueError, match=message):
            GgufFile(files.write(tmp_path / 'b.gguf', tensors=tensors, keys=keys | extra))


@pytest.mark.parametrize(
    ('name', 'x', 'message'),
    [
        ('blk.0.attn_q.bias', np.ones(4, np.float32), r'should not have: blk.0.attn_q.bias'),
        ('blk.0.attn_q_norm.weight', np.ones(4, np.float32), r'blk.0.attn_q_norm.weight'),
        (
            'extra.weight',
            np.ones(4, np.float32),
            r'architecture llama should not have: extra.weight',
        ),
        ('output.weight', np.ones((2, 2, 2), np.float32), r'unexpected shapes: output.weight'),
        ('output.weight', np.ones((4, 4)), r'not supported: output.weight \(type 28\)'),
        ('blk.0.attn_q.weight', np.ones((40, 4), np.float32), r'blk.0.attn_q.weight \(40, 4\)'),
    ],
)
def test_errors_of_tensors(tmp_path, name, x, message):
    tensors = files.stored('llama', files.arrays_of('llama')) | {name: x}
    with pytest.raises(ValueError, match=message):
        GgufFile(files.write(tmp_path / 'a.gguf', tensors=tensors))


def test_number_of_experts(tmp_path):
    keys = files.keys_of('qwen3moe', expert_count=8)
    with pytest.raises(ValueError, match=r'unexpected shapes: blk.0.ffn_gate_exps.weight'):
        GgufFile(files.write(tmp_path / 'a.gguf', 'qwen3moe', keys=keys))


def test_truncated(tmp_path):
    data = files.write(tmp_path / 'a.gguf').read_bytes()
    path = tmp_path / 'b.gguf'
    path.write_bytes(data[: -4 * 64 * 96 - 100])
    with pytest.raises(ValueError, match=r'is truncated; of (blk.1.\w+.weight(, )?)+ it lacks'):
        GgufFile(path)
    path.write_bytes(data[: len(data) // 3])
    with pytest.raises(
        ValueError, match=r'is truncated; of (blk.[01].\w+.weight(, )?){12} it lacks'
    ):
        GgufFile(path)
    header = data.index(b'output_norm')
    for size in range(0, header, 7):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=f'{path} is (truncated|no GGUF|damaged)'):
            GgufFile(path)


def string(text):
    return struct.pack('<Q', len(text)) + text.encode()


def header(*parts, version=3, tensors=0, keys=1):
    return b'GGUF' + struct.pack('<IQQ', version, tensors, keys) + b''.join(parts) + bytes(100)


HUGE = 1 << 60


@pytest.mark.parametrize(
    ('data', 'message'),
    [
        (b'', 'is no GGUF file'),
        (b'PK\x03\x04' + bytes(100), 'is no GGUF file'),
        (header(version=1), 'of version 1'),
        (b'GGUF' + struct.pack('>IQQ', 3, 0, 0) + bytes(9), 'big-endian'),
        (header(tensors=HUGE, keys=0), f'claims to hold {HUGE} tensors'),
        (header(keys=HUGE), f'claims to hold {HUGE} keys'),
        (header(tensors=1 << 32, keys=0), 'claims to hold'),
        (header(struct.pack('<Q', HUGE)), f'claims a name of {HUGE} bytes'),
        (header(struct.pack('<Q', 1 << 20)), 'goes on beyond the end'),
        (header(string('a'), struct.pack('<IIQ', 9, 8, HUGE)), f"'a' claims to have {HUGE}"),
        (header(string('a'), struct.pack('<IIQ', 9, 0, HUGE)), f"'a' claims to have {HUGE}"),
        (header(string('a'), struct.pack('<IIQ', 9, 12, 1 << 22)), 'goes on beyond the end'),
        (header(string('a'), struct.pack('<IIQ', 9, 8, 1 << 22)), 'goes on beyond the end'),
        (header(string('a'), struct.pack('<IIQ', 9, 9, 4)), 'entries of an unsupported type'),
        (header(string('a'), struct.pack('<I', 77)), 'of an unknown type, 77'),
        (header(struct.pack('<Q', 1), b'\xff'), 'no UTF-8'),
        (header(2 * (string('a') + struct.pack('<IB', 0, 1)), keys=2), "the key 'a' twice"),
        (
            header(string('general.alignment'), struct.pack('<II', 4, 0)),
            'general.alignment = 0; expected a power of two',
        ),
        (header(string('a'), struct.pack('<I', HUGE >> 30), tensors=1, keys=0), 'axes; expected'),
        (
            header(string('a'), struct.pack('<IQQIQ', 2, HUGE, HUGE, 0, 0), tensors=1, keys=0),
            'has the shape',
        ),
        (
            header(string('a'), struct.pack('<IQQIQ', 2, HUGE, 0, 0, 0), tensors=1, keys=0),
            'has the shape',
        ),
        (
            header(string('a'), struct.pack('<IQQIQ', 2, 1 << 30, 1, 0, 0), tensors=1, keys=0),
            'is truncated; of a it lacks',
        ),
        (
            header(string('a'), struct.pack('<IQIQ', 1, 1, 0, HUGE << 3), tensors=1, keys=0),
            'is truncated; of a it lacks',
        ),
        (
            header(string('a'), struct.pack('<IQIQ', 1, 1, 999, 0), tensors=1, keys=0),
            r'not supported: a \(type 999\)',
        ),
        (
            header(string('a'), struct.pack('<IQIQ', 1, 33, 8, 0), tensors=1, keys=0),
            'rows are no whole blocks: a',
        ),
        (
            header(
                *(string(x) + struct.pack('<IQIQ', 1, 20, 0, 0) for x in 'abc'), tensors=3, keys=0
            ),
            'its tensors overlap',
        ),
    ],
)
def test_claims_are_checked_before_anything_is_allocated(tmp_path, data, message):
    path = tmp_path / 'a.gguf'
    path.write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(ValueError, match=rf'{path}.*{message}'):
        GgufFile(path)
    assert time.perf_counter() - start < 5


def test_the_header_is_bounded(tmp_path, monkeypatch):
    path = files.write(tmp_path / 'a.gguf')
    monkeypatch.setattr(gguf_header, '_MAX_HEADER', 500)
    with pytest.raises(ValueError, match=f'{path} has a header of more than 500 bytes'):
        GgufFile(path)


def test_flipped_bytes_give_errors_of_value_only(tmp_path):
    data = files.write(tmp_path / 'a.gguf').read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / 'b.gguf'
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for place in rng.integers(0, data.index(b'output_norm'), 3):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            GgufFile(path)
        except ValueError:
            refused += 1
    assert refused > 200


def test_the_package_is_optional(tmp_path, monkeypatch):
    path = files.write(tmp_path / 'a.gguf')
    monkeypatch.setitem(sys.modules, 'gguf', None)
    with pytest.raises(ImportError, match=r"package gguf: pip install 'sa_jax\[pretrained\]'"):
        GgufFile(path)
