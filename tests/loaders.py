"""What reads files from elsewhere, each with a small file of its kind."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

TEXT = 'The state of the union, in 1790 and after: peace, war and the treasury.\n'


class Loader(NamedTuple):
    """How files of a kind are made and read.

    Attributes:
      write: whole ones, into a folder.
      read: them from there.
      count: of the damaged ones that are read by default.
      is_slow: whether that takes more than a few seconds.
    """

    write: Callable[[Path], None]
    read: Callable[[Path], None]
    count: int
    is_slow: bool = False


def write_gguf(folder):
    import gguf
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(folder / 'model.gguf', 'llama')
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), 'th', 'the', '<|end|>']
    for key in ('context_length', 'embedding_length', 'feed_forward_length'):
        writer.add_uint32(f'llama.{key}', 32)
    for key, value in {'block_count': 1, 'attention.head_count': 2}.items():
        writer.add_uint32(f'llama.{key}', value)
    writer.add_float32('llama.attention.layer_norm_rms_epsilon', 1e-5)
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre('smollm')
    writer.add_token_list(tokens)
    writer.add_token_merges(['t h', 'th e'])
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_eos_token_id(len(tokens) - 1)
    names = ['attn_q', 'attn_k', 'attn_v', 'attn_output', 'ffn_gate', 'ffn_up', 'ffn_down']
    shapes = {'token_embd': (len(tokens), 32), 'output_norm': (32,)}
    shapes |= {f'blk.0.{name}': (32, 32) for name in names}
    shapes |= {f'blk.0.{name}_norm': (32,) for name in ('attn', 'ffn')}
    for name, shape in shapes.items():
        x, kind = np.ones(shape, np.float32), gguf.GGMLQuantizationType.Q8_0
        quantized = len(shape) > 1 and name != 'token_embd'
        x = gguf.quants.quantize(x, kind) if quantized else x
        writer.add_tensor(f'{name}.weight', x, raw_dtype=kind if quantized else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(folder):
    from sa_jax.models.pretrained.gguf import GgufFile

    file = GgufFile(folder / 'model.gguf')
    file.tokenizer().encode(TEXT)
    for name, shape in file.shapes.items():
        file.read(name, tuple(map(slice, shape)))
    read_pretrained(folder / 'model.gguf')


def write_safetensors(folder):
    from safetensors.numpy import save_file

    from sa_jax.models.pretrained.hf_config import decoder_config
    from sa_jax.models.pretrained.tensors import sources

    sizes = ('vocab_size', 'hidden_size', 'intermediate_size', 'max_position_embeddings')
    yarn = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 8}
    fields = dict.fromkeys(sizes, 32) | {
        'architectures': ['Qwen3MoeForCausalLM'],
        'num_hidden_layers': 2,
        'num_attention_heads': 2,
        'num_key_value_heads': 1,
        'head_dim': 16,
        'num_experts': 2,
        'num_experts_per_tok': 1,
        'moe_intermediate_size': 8,
        'rms_norm_eps': 1e-5,
        'rope_theta': 1e4,
        'rope_scaling': yarn,
        'layer_types': ['full_attention'] * 2,
        'sliding_window': 8,
        'use_sliding_window': False,
    }
    config = decoder_config(fields, compute_dtype='float32')
    tensors = {
        name: np.ones(source.shape, np.float32)
        for source in sources(config).values()
        for name in source.names(config)
    }
    (folder / 'config.json').write_text(json.dumps(fields))
    where = {}
    for part in range(2):
        of_part = sorted(tensors)[part::2]
        save_file({name: tensors[name] for name in of_part}, folder / f'{part}.safetensors')
        where |= dict.fromkeys(of_part, f'{part}.safetensors')
    index = folder / 'model.safetensors.index.json'
    index.write_text(json.dumps({'metadata': {}, 'weight_map': where}))


def read_pretrained(path):
    from sa_jax.models.pretrained import load_pretrained

    load_pretrained(path, dtype='float32')


def write_own(folder):
    from flax import nnx

    from sa_jax.models.config import DecoderConfig
    from sa_jax.models.decoder import Decoder
    from sa_jax.models.pretrained import Pretrained, save_pretrained

    sizes = dict.fromkeys(('vocab_size', 'hidden_size', 'head_dim', 'intermediate_size'), 16)
    config = DecoderConfig(
        **sizes,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        attention_options={'stochastic': {'window': 5}, 'sliding_window': {'window': 3}},
        layer_attention={
            '0': {
                'attention': ['full', 'moba'],
                'attention_options': {'moba': {'block_size': 4, 'top_k': 2}},
            }
        },
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    save_pretrained(Pretrained(model, None, 64), folder / 'model')


def read_own(folder):
    read_pretrained(folder / 'model')


def write_parquet(folder):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({'text': [TEXT, None, TEXT * 3] * 40, 'number': [1, 2, 3] * 40})
    for compression, encoded in (('snappy', True), ('zstd', False), ('none', True)):
        parquet.write_table(
            table,
            folder / f'{compression}.parquet',
            compression=compression,
            use_dictionary=encoded,
            row_group_size=50,
        )


def read_parquet(folder):
    from sa_jax.data import parquet

    for path in folder.glob('*.parquet'):
        for _ in parquet.read_parquet(path):
            pass


def write_jsonl(folder):
    import zstandard

    text = ''.join(json.dumps({'text': TEXT * i, 'meta': {'a': [i]}}) + '\n' for i in range(20))
    (folder / 'a.jsonl').write_text(text)
    (folder / 'b.jsonl.zst').write_bytes(zstandard.compress(text.encode()) * 2)
    (folder / 'c.txt').write_text(TEXT)


def read_jsonl(folder):
    from sa_jax.data import sources

    for path in (folder / 'a.jsonl', folder / 'b.jsonl.zst'):
        for _ in sources.read_jsonl(path):
            pass
    sources.read_text(folder / 'c.txt')


def write_tokenizers(folder):
    import sentencepiece
    import tokenizers

    from sa_jax.tokenization.tokenizers import make_byte_level

    for name in ('json', 'gpt2', 'pieces'):
        (folder / name).mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    make_byte_level(tokenizer)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=['<|endoftext|>'], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.model.save(str(folder / 'gpt2'))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single='<|endoftext|> $A', special_tokens=[('<|endoftext|>', 0)]
    )
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / 'json' / 'tokenizer.json'))
    settings = {'bos_token': {'content': '<|endoftext|>'}, 'eos_token': '<|endoftext|>'}
    (folder / 'json' / 'tokenizer_config.json').write_text(json.dumps(settings))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT]),
        model_prefix=str(folder / 'pieces' / 'tokenizer'),
        vocab_size=30,
        minloglevel=2,
    )
    (folder / 'pieces' / 'tokenizer.vocab').unlink()


def read_tokenizers(folder):
    from sa_jax.tokenization.published import load_published

    for name in ('json', 'gpt2', 'pieces'):
        tokenizer = load_published(folder / name)
        tokenizer.decode(tokenizer.encode(TEXT))


def write_tasks(folder):
    records = {
        'cloze': {'context': 'a b', 'continuation': 'c'},
        'choices': {'query': 'Question: a', 'choices': ['b', 'c'], 'gold': 1},
        'options': {'context_options': ['a', 'b'], 'continuation': 'c', 'gold': 0},
        'programs': dict.fromkeys(('task_id', 'prompt', 'entry_point', 'test'), 'a'),
    }
    for name, record in records.items():
        (folder / f'{name}.jsonl').write_text((json.dumps(record) + '\n') * 3)
    (folder / 'text.txt').write_text(TEXT)


def read_tasks(folder):
    from sa_jax.evaluation import tasks
    from sa_jax.tokenization.tokenizers import ByteTokenizer

    for path in folder.iterdir():
        task = tasks.load_task(path, window=16)
        if isinstance(task, tasks.ItemTask):
            tasks.check(task, ByteTokenizer(), 64)


def run_config(folder):
    from configs.pretrain import demo

    config = demo.get_config('sa_swa')
    sizes = {'vocab_size': 258, 'hidden_size': 16, 'head_dim': 8, 'intermediate_size': 16}
    config.model.update(sizes)
    config.model.attention_options = {x: {'window': 8} for x in config.model.attention}
    config.data.update({'corpus': 'text', 'path': str(folder.parent / 'text')})
    config.data.update({'sequence_length': 32, 'virtual_shards': 2})
    config.data.tokenizer.kind = 'bytes'
    return config


def make_inputs(folder):
    """Of a corpus beside the folder."""
    from sa_jax.training.inputs import load_inputs

    for split in ('train', 'validation'):
        (folder.parent / 'text' / split).mkdir(parents=True, exist_ok=True)
        for number in range(4):
            path = folder.parent / 'text' / split / f'{number}.txt'
            if not path.exists():
                path.write_text(TEXT * (number + 1))
    return load_inputs(run_config(folder), folder.parent / 'data')


def save(folder, state, config):
    """A checkpoint of step 1."""
    from sa_jax.training.checkpoints import Checkpoints
    from sa_jax.training.configuration import to_json

    batches = make_inputs(folder.parent).training_batches()
    next(batches)
    with contextlib.closing(Checkpoints(folder, keep=1)) as checkpoints:
        checkpoints.save(1, state, batches.get_state(), to_json(config))


def small_state():
    import jax

    return {'step': jax.numpy.int32(1), 'x': jax.numpy.ones((8, 4)), 'key': jax.random.key(0)}


def write_checkpoint(folder):
    save(folder / 'checkpoints', small_state(), run_config(folder))


def read_checkpoint(folder):
    from sa_jax.training.checkpoints import Checkpoints

    with contextlib.closing(Checkpoints(folder / 'checkpoints', keep=None)) as checkpoints:
        if damage := checkpoints.find_damage(1):
            raise ValueError(f'{folder}: {damage}')
        _, data = checkpoints.restore(1, small_state())
    batches = make_inputs(folder).training_batches()
    batches.set_state(data)
    next(batches)


def write_run(folder):
    import jax

    from sa_jax.training.program import build_program
    from sa_jax.training.workdir import claim_workdir

    config = run_config(folder)
    whole = folder.parent / 'whole_checkpoints'
    save(whole / 'checkpoints', build_program(config, jax.devices()[:1]).init(), config)
    (folder / 'checkpoints').symlink_to(whole / 'checkpoints')  # only the other files are damaged
    claim_workdir(folder, config)
    (folder / 'metrics.jsonl').write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.0}\n')


def read_run(folder):
    from sa_jax.training.metrics import truncate_metrics
    from sa_jax.training.restore import load_run
    from sa_jax.training.workdir import check_workdir

    truncate_metrics(folder / 'metrics.jsonl', 1)
    with contextlib.suppress(ValueError):
        check_workdir(folder, run_config(folder))
    load_run(folder, folder.parent / 'data')


def write_results(folder):
    from sa_jax.training.configuration import to_json
    from sa_jax.training.results import write_result

    config = to_json(run_config(folder))
    figures = {
        'runs': [
            {
                'variant': 'full',
                'seed': 0,
                'held_out': {'perplexity': 2.5},
                'parameters': 1,
                'tokens': 1,
            }
        ]
    }
    (folder / 'result').mkdir()
    for path in (folder / 'scores.json', folder / 'result' / 'result.json'):
        write_result(path, config=config, figures=figures, seeds={'run': 0})
        result = json.loads(path.read_text()) | {'command': 'python -m experiments.compare'}
        path.write_text(json.dumps(result))


def read_results(folder):
    from sa_jax.report import page
    from sa_jax.training import comparison

    comparison.read(folder, run_config(folder))
    page.to_markdown(*page.collect([folder]), folder)


LOADERS = {
    'gguf': Loader(write_gguf, read_gguf, 40),
    'safetensors': Loader(write_safetensors, read_pretrained, 40),
    'own': Loader(write_own, read_own, 20, is_slow=True),
    'parquet': Loader(write_parquet, read_parquet, 60),
    'jsonl': Loader(write_jsonl, read_jsonl, 150),
    'tokenizers': Loader(write_tokenizers, read_tokenizers, 60),
    'tasks': Loader(write_tasks, read_tasks, 100),
    'checkpoint': Loader(write_checkpoint, read_checkpoint, 12, is_slow=True),
    'run': Loader(write_run, read_run, 6, is_slow=True),
    'results': Loader(write_results, read_results, 60),
}
