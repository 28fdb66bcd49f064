"""Compiles published models for a described card, without a GPU or weights: what memory they take.

    python -m experiments.model_memory --workdir=runs/model_memory

Of each config.json: reading a prompt of --context tokens under each pattern, and a step of decoding
behind it with attention to the whole cache, as `generate` does it for few and for many tokens; all
in bfloat16 for a single prompt. Writes
result.json and table.md. Needs the extra aot; a minute a model.
"""

from pathlib import Path

import jax
from absl import app, flags
from tqdm import tqdm

from sa_jax.report import model_memory
from sa_jax.report.gpu_compile import CARDS, compile_for, missing
from sa_jax.training.results import write_result

_MODELS = flags.DEFINE_list(
    'models',
    ['configs/pretrained/qwen3_8b.json', 'configs/pretrained/qwen3_30b_a3b.json'],
    'Files: config.json of checkpoints.',
)
_PATTERNS = flags.DEFINE_list('patterns', list(model_memory.PATTERNS), 'Of the prompt.')
_EFFECTIVE_WINDOW = flags.DEFINE_integer(
    'effective_window', 256, 'Keys a query sees, for all patterns but full.', lower_bound=2
)
_CONTEXT = flags.DEFINE_integer('context', 32768, 'Tokens of the prompt.', lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer(
    'new_tokens', 1024, 'Tokens for which the cache has room behind the prompt.', lower_bound=1
)
_CARD = flags.DEFINE_enum('card', 'h200', list(CARDS), 'What to compile for.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Receives result.json and table.md.')


def main(argv: list[str]) -> None:
    """Compiles, prints the table, and writes it with result.json."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    unknown = set(_PATTERNS.value) - set(model_memory.PATTERNS)
    if unknown:
        raise app.UsageError(
            f'--patterns={",".join(_PATTERNS.value)}; expected some of '
            f'{", ".join(model_memory.PATTERNS)}'
        )
    absent = [path for path in _MODELS.value if not Path(path).is_file()]
    if absent:
        raise app.UsageError(f'--models: {", ".join(absent)} do not exist; name config.json files')
    jax.config.update('jax_platforms', 'cpu')  # no GPU is used, and the plugin has no libraries
    lack = missing()
    if lack is not None:
        raise app.UsageError(lack)
    sizes = {
        'effective_window': _EFFECTIVE_WINDOW.value,
        'context': _CONTEXT.value,
        'new_tokens': _NEW_TOKENS.value,
    }
    card = CARDS[_CARD.value]
    work = model_memory.programs(_MODELS.value, _PATTERNS.value, **sizes)
    with tqdm(total=len(work), unit='program', disable=None) as bar:
        compiled = compile_for(card, work, on_compiled=lambda _: bar.update())
    rows = [model_memory.describe(*x, card) for x in zip(work, compiled, strict=True)]
    workdir = Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    write_result(
        workdir / 'result.json',
        config=sizes | {'models': _MODELS.value, 'card': _CARD.value},
        figures={'usable': model_memory.usable_bytes(card), 'programs': rows},
        seeds={},
    )
    text = model_memory.table(rows, card)
    (workdir / 'table.md').write_text(text)
    print(text, end='')
    failed = [f'{row["model"]} {row["program"]}' for row in rows if row['error']]
    if failed:
        raise SystemExit(f'Not compiled: {", ".join(failed)}.')


if __name__ == '__main__':
    flags.mark_flags_as_required(['workdir'])
    app.run(main)
