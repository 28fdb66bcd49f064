"""Small GGUF files, written as llama.cpp's converter writes them."""

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB, LAYERS, EXPERTS = 64, 4, 2, 32, 96, 40, 2, 4
KINDS = gguf.GGMLQuantizationType
KEYS = {
    'context_length': 512,
    'embedding_length': HIDDEN,
    'block_count': LAYERS,
    'feed_forward_length': WIDTH,
    'attention.head_count': HEADS,
    'attention.head_count_kv': KV_HEADS,
    'attention.key_length': HEAD_DIM,
    'attention.value_length': HEAD_DIM,
    'attention.layer_norm_rms_epsilon': 1e-5,
    'rope.freq_base': 50_000.0,
}
EXPERT_KEYS = {'expert_count': EXPERTS, 'expert_used_count': 2, 'expert_feed_forward_length': WIDTH}


def keys_of(architecture, **changes):
    """The metadata of a model; a change to None leaves a key out."""
    keys = KEYS | (EXPERT_KEYS if architecture == 'qwen3moe' else {}) | changes
    return {f'{architecture}.{k}': v for k, v in keys.items() if v is not None}


def arrays_of(architecture, tied=True):
    """Random weights, by the names that Hugging Face's checkpoints give them."""
    rng = np.random.default_rng(0)
    shapes = {'model.embed_tokens.weight': (VOCAB, HIDDEN), 'model.norm.weight': (HIDDEN,)}
    if not tied:
        shapes['lm_head.weight'] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        of_layer = {
            'input_layernorm': (HIDDEN,),
            'self_attn.q_proj': (HEADS * HEAD_DIM, HIDDEN),
            'self_attn.k_proj': (KV_HEADS * HEAD_DIM, HIDDEN),
            'self_attn.v_proj': (KV_HEADS * HEAD_DIM, HIDDEN),
            'self_attn.o_proj': (HIDDEN, HEADS * HEAD_DIM),
            'post_attention_layernorm': (HIDDEN,),
        }
        if architecture != 'llama':
            of_layer |= {'self_attn.q_norm': (HEAD_DIM,), 'self_attn.k_norm': (HEAD_DIM,)}
        mlps = ['mlp']
        if architecture == 'qwen3moe':
            of_layer['mlp.gate'] = (EXPERTS, HIDDEN)
            mlps = [f'mlp.experts.{e}' for e in range(EXPERTS)]
        for mlp in mlps:
            of_layer |= {
                f'{mlp}.gate_proj': (WIDTH, HIDDEN),
                f'{mlp}.up_proj': (WIDTH, HIDDEN),
                f'{mlp}.down_proj': (HIDDEN, WIDTH),
            }
        shapes |= {f'model.layers.{layer}.{name}.weight': x for name, x in of_layer.items()}
    return {name: rng.normal(size=x).astype(np.float32) for name, x in shapes.items()}


def stored(architecture, arrays):
    """The same weights by the names and in the order of rows that the file has."""
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), LAYERS)
    result, experts = {}, {}
    for name, x in arrays.items():
        if '.experts.' in name:
            before, after = name.split('.experts.')
            stacked = f'{before}.experts.{after.partition(".")[2]}'
            experts.setdefault(stacked, []).append(x)
            continue
        if architecture == 'llama' and ('q_proj' in name or 'k_proj' in name):
            halves = x.reshape(-1, 2, HEAD_DIM // 2, HIDDEN)
            x = halves.swapaxes(1, 2).reshape(x.shape)
        result[names.get_name(name, try_suffixes=('.weight',))] = x
    for name, x in experts.items():
        result[names.get_name(name, try_suffixes=('.weight',))] = np.stack(x)
    return result


def write(path, architecture='llama', *, tensors=None, keys=None, kind=KINDS.F32, raw=None):
    """Writes a file.

    Args:
      path: of the file.
      architecture: of the model.
      tensors: by the names in the file; matrices become of type `kind`.
      keys: all the metadata beside the architecture's name.
      kind: of the matrices.
      raw: pairs of bytes and type of further tensors.
    """
    if tensors is None:
        tensors = stored(architecture, arrays_of(architecture))
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (keys_of(architecture) if keys is None else keys).items():
        _add(writer, key, value)
    for name, x in tensors.items():
        if x.ndim == 1 or kind == KINDS.F32:
            writer.add_tensor(name, x)
        else:
            writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)
    for name, (x, type_) in (raw or {}).items():
        writer.add_tensor(name, x, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
