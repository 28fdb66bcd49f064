"""The paper's 360M models, pre-trained from scratch on SlimPajama (Table 1).

    python -m experiments.pretrain --config=configs/pretrain/paper_360m.py:sa_swa \
        --config.data.path=DIR_WITH_SLIMPAJAMA --config.data.tokenizer.path=DIR_WITH_GPT2_FILES \
        --workdir=WORKDIR

The variants are `full`, `swa`, `sa` and `sa_swa`. The paper's zero-shot WikiText perplexities
after 15B tokens are 51.34 (full), 57.05 (swa), 75.83 (sa) and 51.98 (sa_swa); not measured here.
The model has 359.8M parameters, to which the gates of `sa_swa` add 0.8M.

"our choice" marks what the paper leaves open.
"""

from ml_collections import ConfigDict

_WINDOW = 256  # Keys per query and path, the query's own included.

_ATTENTION = {
    'full': ('full',),
    'swa': ('sliding_window',),
    'sa': ('stochastic',),
    'sa_swa': ('stochastic', 'sliding_window'),
}


def get_config(variant: str = 'sa_swa') -> ConfigDict:
    """The configuration of one of the paper's four models.

    Args:
      variant: 'full', 'swa', 'sa' or 'sa_swa'.

    Returns:
      The configuration.

    Raises:
      ValueError: The variant is unknown.
    """
    if variant not in _ATTENTION:
        raise ValueError(f'variant {variant!r} is unknown; choose one of {", ".join(_ATTENTION)}.')
    attention = _ATTENTION[variant]

    config = ConfigDict()
    config.seed = 0  # Of initialisation, data order and permutations; our choice.

    model = config.model = ConfigDict()
    model.vocab_size = 50_257  # Tokens; GPT-2's, inferred from the parameter count.
    model.num_layers = 24
    model.hidden_size = 1024  # Channels of the residual stream.
    model.num_heads = 16  # Query heads.
    model.num_kv_heads = 16  # Key/value heads; as many, so no grouping.
    model.head_dim = 64  # Channels.
    model.intermediate_size = 2816  # Channels of the SwiGLU, inferred from the parameter count.
    model.rope_theta = 10_000.0  # Base of the wavelengths; our choice.
    model.norm_eps = 1e-6  # Added to the mean square; our choice.
    model.tie_embeddings = True  # Inferred from the parameter count.
    model.qk_norm = False  # Whether queries and keys are normalised; our choice.
    model.attention = attention  # Paths; several are joined by gates.
    model.attention_options = ConfigDict(
        {name: {} if name == 'full' else {'window': _WINDOW} for name in attention}
    )
    model.gate = 'head'  # A gate per head and path, inferred from "negligible parameters".
    model.permutation_scope = 'layer'  # A permutation per layer and step, shared by the batch.
    model.compute_dtype = 'bfloat16'  # Of activations; our choice. Parameters are float32.
    model.remat = 'dots'  # Keep the products with weights, recompute the rest; our choice.

    data = config.data = ConfigDict()
    data.corpus = 'slimpajama'  # The 6B-token subset.
    data.path = ''  # Folder with its parquet or jsonl(.zst) files.
    data.sequence_length = 2048  # Tokens per row.
    data.cross_document_attention = False  # Whether packed documents see each other; our choice.
    data.packing = 'concat'  # Documents end to end, cut at the row length; our choice.
    data.virtual_shards = 8  # Independent data streams, divided among processes; our choice.
    data.tokenizer = ConfigDict()
    data.tokenizer.kind = 'file'
    data.tokenizer.vocab_size = model.vocab_size  # Tokens.
    data.tokenizer.path = ''  # Folder with GPT-2's vocab.json and merges.txt.

    training = config.training = ConfigDict()
    training.batch_size = 256  # Rows per step: 0.5M tokens; our choice.
    training.steps = round(15e9 / (training.batch_size * data.sequence_length))  # 15B tokens.
    training.gradient_accumulation = 8  # Parts a batch is cut into, to fit memory; our choice.
    training.fresh_permutations = True  # Drawn anew for each step; our choice.
    training.log_every = 20  # Steps.
    training.checkpoint_every = 1000  # Steps.
    training.keep_checkpoints = 3  # Latest checkpoints kept.

    optimizer = config.optimizer = ConfigDict()
    optimizer.learning_rate = 3e-4  # Peak.
    optimizer.schedule = 'cosine'  # Our choice.
    optimizer.warmup_steps = 1000  # Steps; our choice.
    optimizer.final_fraction = 0.1  # Of the peak, at the last step; our choice.
    optimizer.beta1 = 0.9
    optimizer.beta2 = 0.95
    optimizer.eps = 1e-8  # Our choice.
    optimizer.weight_decay = 0.1  # Not on norms and gates; our choice.
    optimizer.clip_norm = 1.0  # Largest global gradient norm; our choice.

    mesh = config.mesh = ConfigDict()
    mesh.data = -1  # Copies of the model; -1 takes the devices the others leave.
    mesh.fsdp = 1  # Ways the parameters' hidden axis is split.
    mesh.tensor = 1  # Ways heads and feed-forward are split; the odd vocabulary allows 1 only.
    mesh.sequence = 1  # Ways the tokens of each row are split.

    evaluation = config.evaluation = ConfigDict()
    evaluation.every = 1000  # Steps.
    evaluation.batches = 16  # Batches of held-out text per evaluation.
    evaluation.permutation_draws = 4  # Sets of permutations evaluated, for the spread.

    config.logging = ConfigDict()
    config.logging.wandb_project = ''  # Weights & Biases project; empty for none.
    return config
