r"""Table 1 on one data-centre GPU in ten minutes (`scripts/gpu_table1.sh`).

    python -m experiments.compare --config=configs/pretrain/table1_gpu.py --workdir=runs/table1_gpu

As in the paper, the window is an eighth of the sequence. The text limits the size, not the GPU: the
default corpus has 2.6M tokens, and more than four passes over it add little.
"""

from ml_collections import ConfigDict

from configs.pretrain import table1_mini

_WINDOW = 256  # keys that a window spans, its query included

VARIANTS = {
    'main': {
        'full': table1_mini.windows('full'),
        'swa': table1_mini.windows('sliding_window', window=_WINDOW),
        'sa': table1_mini.windows('stochastic', window=_WINDOW),
        'sa_swa': table1_mini.windows('stochastic', 'sliding_window', window=_WINDOW),
    }
}
SEEDS = {'main': 3}
# What is larger than in the small experiment: 24M parameters, 10.5M tokens.
_SIZE = {
    'model.vocab_size': 4096,  # tokens
    'model.hidden_size': 384,  # channels of the residual stream
    'model.num_layers': 12,
    'model.num_heads': 6,  # query heads
    'model.num_kv_heads': 6,  # key and value heads
    'model.head_dim': 64,  # channels
    'model.intermediate_size': 1024,  # channels of the SwiGLU
    'model.compute_dtype': 'bfloat16',  # of activations; parameters are float32
    'data.sequence_length': 2048,  # tokens
    'data.tokenizer.vocab_size': 4096,  # tokens
    'training.steps': 640,  # optimizer steps
    'training.batch_size': 8,  # rows
    'training.checkpoint_every': 320,  # steps
    'optimizer.learning_rate': 1e-3,  # at the peak
    'optimizer.warmup_steps': 60,  # steps
    'evaluation.every': 0,  # steps; at the end only
}


def get_config(variant: str = 'sa_swa') -> ConfigDict:
    """Returns the configuration of a variant: that of the small experiment, but for its size."""
    if variant not in VARIANTS['main']:
        raise ValueError(
            f'The variant is {variant!r}; expected one of {", ".join(VARIANTS["main"])}.'
        )
    config = table1_mini.get_config(variant)
    for name, value in (VARIANTS['main'][variant] | _SIZE).items():
        *sections, field = name.split('.')
        part = config
        for section in sections:
            part = part[section]
        part[field] = value
    return config
