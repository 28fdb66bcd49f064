r"""Measures stochastic attention as an estimate of full attention, and how fast its layers mix.

    python -m experiments.mixing --workdir=runs/mixing
    python -m experiments.mixing --workdir=runs/mixing --model=SmolLM2-135M-Instruct.Q4_1.gguf
    python -m experiments.mixing --workdir=runs/quick --quick

Bias and variance over permutations against the window, on Gaussian queries, keys and values, and
with --model on those of layers of a published model; sliding-window attention's error beside them.
Eigenvalues, singular values and total variation of layers of uniform attention against depth. The
workdir receives result.json, mixing.md, and figures as PNG and SVG. See docs/theory.md.
"""

import dataclasses
import json
from pathlib import Path

from absl import app, flags
from tqdm import tqdm

from sa_jax.analysis import estimator, mixing
from sa_jax.analysis.mixing import Settings
from sa_jax.evaluation import attention_inputs
from sa_jax.report import mixing_plot, mixing_tables
from sa_jax.training.results import write_result

_WORKDIR = flags.DEFINE_string('workdir', None, 'Receives the files.', required=True)
_QUICK = flags.DEFINE_boolean('quick', False, 'Fewer and shorter: less than half a minute.')
_MODEL = flags.DEFINE_string(
    'model', None, 'A directory, a GGUF file, or a repository on the hub: real queries and keys.'
)
_TEXT = flags.DEFINE_string(
    'text', None, "A text file for --model; by default the default corpus' held-out speeches."
)
_HELP = {
    'tokens': 'Of a sequence whose output is estimated.',
    'windows': 'Keys that a query sees on average: slots of SA if not causal, else 2·w - 1.',
    'draws': f'Permutations for bias and variance, a multiple of {estimator.GROUPS}.',
    'layers': 'Of --model, from 0; by default the first, the middle and the last.',
    'texts': 'Sequences that --model reads.',
    'spectral_tokens': 'Tokens of the layers whose spectra are computed.',
    'spectral_window': 'Their window, odd.',
    'depth': 'The most layers in a product.',
    'spectral_draws': 'Stacks of layers with permutations of their own.',
    'seed': 'Of permutations and Gaussian inputs.',
}
_SETTINGS = {
    field.name: (flags.DEFINE_integer if isinstance(field.default, int) else flags.DEFINE_list)(
        field.name, None, _HELP[field.name]
    )
    for field in dataclasses.fields(Settings)
}
_QUICK_SETTINGS = Settings(
    tokens=256,
    windows=(8, 16, 32),
    draws=64,
    spectral_tokens=(256, 1024),
    spectral_window=17,
    depth=6,
    spectral_draws=4,
)


def settings_from_flags() -> Settings:
    """The settings that the flags give.

    Raises:
      ValueError: One is out of range, or no number where one is expected.
    """
    given = {name: flag.value for name, flag in _SETTINGS.items() if flag.value is not None}
    for name, value in given.items():
        if isinstance(value, list):
            try:
                given[name] = tuple(map(int, value))
            except ValueError as error:
                raise ValueError(f'--{name}={",".join(value)}; expected whole numbers') from error
    if _MODEL.value is None and (_TEXT.value is not None or 'layers' in given or 'texts' in given):
        raise ValueError('--text, --texts and --layers are of a model: give --model as well')
    return dataclasses.replace(_QUICK_SETTINGS if _QUICK.value else Settings(), **given)


def main(argv: list[str]) -> None:
    """Measures, writes the result, its tables and its figures, and prints the tables."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    try:
        settings = settings_from_flags()
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    text = None if _TEXT.value is None else Path(_TEXT.value).expanduser()
    sources = [mixing.gaussian(settings)]
    if _MODEL.value is not None:
        try:
            sources += attention_inputs.read_model(_MODEL.value, text, settings)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise SystemExit(str(error)) from None
    steps = 4 * len(sources) * len(settings.windows)
    steps += len(settings.spectral_tokens) * settings.spectral_draws
    with tqdm(total=steps, unit='step', disable=None) as progress:
        figures = {
            'errors': [x for s in sources for x in mixing.measure_errors(s, settings, progress)],
            'spectra': [
                mixing.measure_spectra(n, settings, progress) for n in settings.spectral_tokens
            ],
        }
    workdir = Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    config = dataclasses.asdict(settings) | {
        'model': _MODEL.value and Path(_MODEL.value).name.removesuffix('.gguf'),
        'text': text and text.name,
    }
    seeds = {'inputs': settings.seed, 'permutations': settings.seed}
    write_result(workdir / 'result.json', config=config, figures=figures, seeds=seeds)
    result = json.loads((workdir / 'result.json').read_text())
    tables = mixing_tables.tables(result)
    (workdir / 'mixing.md').write_text(tables)
    mixing_plot.plot(result, workdir)
    print(tables)


if __name__ == '__main__':
    app.run(main)
