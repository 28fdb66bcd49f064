"""Small checkpoints in Hugging Face's format, written tensor by tensor."""

import json

import numpy as np
from safetensors.numpy import save_file

from sa_jax.models.pretrained.hf_config import decoder_config
from sa_jax.models.pretrained.tensors import sources

LLAMA = {
    'architectures': ['LlamaForCausalLM'],
    'vocab_size': 40,
    'hidden_size': 16,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'intermediate_size': 24,
    'max_position_embeddings': 64,
    'rms_norm_eps': 1e-5,
    'rope_theta': 1e4,
    'tie_word_embeddings': False,
    'hidden_act': 'silu',
}
QWEN3_MOE = LLAMA | {
    'architectures': ['Qwen3MoeForCausalLM'],
    'head_dim': 8,
    'num_experts': 4,
    'num_experts_per_tok': 2,
    'moe_intermediate_size': 12,
    'norm_topk_prob': True,
}


def make_tensors(fields, dtype=np.float32):
    """Random values for every tensor that the configuration asks for."""
    generator = np.random.default_rng(0)
    config = decoder_config(fields, compute_dtype='float32')
    return {
        name: generator.normal(size=source.shape).astype(dtype)
        for source in sources(config).values()
        for name in source.names(config)
    }


def write_checkpoint(directory, fields, tensors, num_files=1):
    """Writes config.json and the tensors, with an index if they are in several files."""
    directory.mkdir(exist_ok=True)
    (directory / 'config.json').write_text(json.dumps(fields))
    if num_files == 1:
        save_file(tensors, directory / 'model.safetensors')
        return
    where = {}
    names = sorted(tensors)
    for part in range(num_files):
        file = f'model-{part + 1:05}-of-{num_files:05}.safetensors'
        of_part = names[part::num_files]
        save_file({name: tensors[name] for name in of_part}, directory / file)
        where |= dict.fromkeys(of_part, file)
    index = {'metadata': {}, 'weight_map': where}
    (directory / 'model.safetensors.index.json').write_text(json.dumps(index))
