"""Times reading prompts and decoding beside Hugging Face's transformers on the same weights.

    python -m experiments.generation --model=SmolLM2-135M-Instruct.Q4_1.gguf --workdir=DIR

Both in float32, on the CPU, interleaved: result.json and generation.md. Needs the extra oracle;
three minutes on two cores, and nothing else should run on the machine.
"""

from pathlib import Path

import jax
from absl import app, flags
from tqdm import tqdm

from sa_jax.benchmarks import generation
from sa_jax.models.pretrained import load_pretrained
from sa_jax.training.results import write_result

_MODEL = flags.DEFINE_string('model', None, 'A directory or a GGUF file.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Receives the files.', required=True)
_BATCHES = flags.DEFINE_multi_integer('batch', [1, 8], 'Prompts at a time.', lower_bound=1)
_PROMPT = flags.DEFINE_integer('prompt_tokens', 256, 'Of each prompt.', lower_bound=1)
_NEW = flags.DEFINE_integer('new_tokens', 32, 'Decoded behind each prompt.', lower_bound=1)
_ROUNDS = flags.DEFINE_integer('rounds', 7, 'Measurements of each time.', lower_bound=1)


def main(argv: list[str]) -> None:
    """Measures, writes the result and its table, and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    jax.config.update('jax_platforms', 'cpu')
    path = Path(_MODEL.value).expanduser()
    sizes = {
        'batches': _BATCHES.value,
        'prompt_tokens': _PROMPT.value,
        'new_tokens': _NEW.value,
        'rounds': _ROUNDS.value,
    }
    try:
        model = load_pretrained(path, dtype='float32').model
        with tqdm(total=4 * len(_BATCHES.value) * _ROUNDS.value, disable=None) as bar:
            rows = generation.measure(model, path, on_measured=bar.update, **sizes)
    except (ImportError, ValueError) as error:
        raise SystemExit(str(error)) from None
    workdir = Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    config = {'model': path.name.removesuffix('.gguf')} | sizes
    write_result(workdir / 'result.json', config=config, figures={'times': rows}, seeds={})
    text = generation.table(rows)
    (workdir / 'generation.md').write_text(text)
    print(text, end='')


if __name__ == '__main__':
    app.run(main)
