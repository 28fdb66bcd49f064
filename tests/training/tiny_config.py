"""A model small enough to train in seconds, on text of bytes."""

from configs.pretrain import demo


def get_config(variant='sa_swa'):
    config = demo.get_config(variant)
    config.model.vocab_size = 258
    config.model.hidden_size = 32
    config.model.num_layers = 2
    config.model.num_heads = 2
    config.model.num_kv_heads = 2
    config.model.head_dim = 16
    config.model.intermediate_size = 64
    config.model.attention_options = {
        # The dense attention compiles in a fraction of the time.
        name: {'implementation': 'reference'} | ({} if name == 'full' else {'window': 8})
        for name in config.model.attention
    }
    config.data.corpus = 'text'
    config.data.sequence_length = 64
    config.data.virtual_shards = 4
    config.data.tokenizer.kind = 'bytes'
    config.training.steps = 20
    config.training.batch_size = 8
    config.training.gradient_accumulation = 2
    config.training.log_every = 1
    config.training.checkpoint_every = 4
    config.optimizer.learning_rate = 1e-2
    config.optimizer.warmup_steps = 2
    config.evaluation.every = 5
    config.evaluation.batches = 2
    config.evaluation.permutation_draws = 2
    return config
