r"""A model whose training steps are timed beside transformers': rows of 4096 tokens, w = 128.

    python -m experiments.throughput --config=configs/pretrain/throughput.py --peer \
        --workdir=runs/throughput

Its rows see all that stands before them, also of other documents, as the peer's attention does.
"""

from ml_collections import ConfigDict

from configs.pretrain import demo


def get_config(variant: str = 'sa_swa') -> ConfigDict:
    """Returns the configuration of a variant, one of the demo's."""
    config = demo.get_config(variant)
    config.model.hidden_size = 256  # channels
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.intermediate_size = 768  # channels
    for options in config.model.attention_options.values():
        options.window = 128  # keys
    config.data.sequence_length = 4096  # tokens
    config.data.cross_document_attention = True  # plain causal attention, as the peer's
    config.data.virtual_shards = 1  # packing iterators
    config.training.batch_size = 1  # rows
    return config
