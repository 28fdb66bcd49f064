r"""What earlier tokens are worth to trained models: perplexity against the context they may see.

    python -m experiments.context --workdir=runs/context \
        --runs=runs/table1_mini/full/seed0,runs/table1_mini/sa_swa/seed0

The same tokens, those at the end of each held-out row, are predicted with less and less of the row
before them. Where more context gains nothing, a longer reach can't either. The workdir receives
result.json, context.md, context.png and .svg.
"""

from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict

from sa_jax.evaluation.context import context_lengths, hide_earlier
from sa_jax.report import context_report
from sa_jax.training.inputs import Inputs
from sa_jax.training.program import Program
from sa_jax.training.restore import open_run
from sa_jax.training.results import write_result
from sa_jax.training.step import TrainState

_RUNS = flags.DEFINE_list('runs', None, 'Workdirs of runs on the same text.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Receives the files.', required=True)
_SCORED = flags.DEFINE_integer('scored', 64, 'Tokens at the end of a row that are predicted.')
_DRAWS = flags.DEFINE_integer('draws', 3, 'Of the permutations.', lower_bound=1)
_DATA_DIR = flags.DEFINE_string(
    'data_dir', '~/.cache/sa_jax', 'Keeps built corpora and trained tokenizers.'
)


def measure(program: Program, state: TrainState, inputs: Inputs, contexts: list[int]) -> list[dict]:
    """The figures of `evaluation.perplexity.evaluate` for each context."""
    return [
        program.evaluate(
            state,
            lambda context=context: hide_earlier(inputs.held_out, context, contexts[0]),
            token_bytes=inputs.tokenizer.token_bytes,
            draws=_DRAWS.value,
        )
        for context in contexts
    ]


def check_same_text(path: Path, data: ConfigDict, others: ConfigDict) -> None:
    """Refuses a run that reads other text than the first, or cuts it otherwise."""
    if data != others:
        differing = sorted(name for name in data if data[name] != others.get(name))
        raise ValueError(
            f'{path} reads its text otherwise than the first of --runs does: data.'
            f'{", data.".join(differing)} differ; compare it apart.'
        )


def main(argv: list[str]) -> None:
    """Measures, and writes the files."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    if not _RUNS.value:
        raise app.UsageError('--runs is empty; expected workdirs of runs, with commas between.')
    # Below warnings, Orbax reports every file it reads.
    logging.set_verbosity(logging.ERROR)
    workdir, data_dir = (Path(x.value).expanduser() for x in (_WORKDIR, _DATA_DIR))
    first, contexts, runs = None, [], []
    try:
        for path in (Path(x).expanduser() for x in _RUNS.value):
            program, state, inputs = open_run(path, data_dir)
            data = program.config.data
            first = first or data
            check_same_text(path, data, first)
            contexts = contexts or context_lengths(data.sequence_length, _SCORED.value)
            found = measure(program, state, inputs, contexts)
            name = '/'.join(path.resolve().parts[-2:])
            perplexity = [x['perplexity'] for x in found]
            print(name, ' '.join(f'{x:.2f}' for x in perplexity), flush=True)
            runs.append(
                {
                    'run': name,
                    'step': int(state.step),
                    'perplexity': perplexity,
                    'perplexity_std': [x['perplexity_std'] for x in found],
                }
            )
    except ValueError as error:
        raise SystemExit(str(error)) from error
    figures = {
        'contexts': contexts,
        'scored': _SCORED.value,
        'tokens': found[-1]['tokens'],
        'runs': runs,
    }
    workdir.mkdir(parents=True, exist_ok=True)
    write_result(
        workdir / 'result.json',
        config={'runs': [run['run'] for run in runs]},
        figures=figures,
        seeds={'permutations': list(range(_DRAWS.value))},
    )
    table = context_report.table(figures)
    (workdir / 'context.md').write_text(table)
    context_report.plot(figures, workdir / 'context')
    print(table)


if __name__ == '__main__':
    app.run(main)
