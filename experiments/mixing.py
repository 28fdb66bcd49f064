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
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from tqdm import tqdm

from sa_jax.analysis import estimator, mixing
from sa_jax.analysis.mixing import Settings, Source
from sa_jax.attention.registry import AttentionContext
from sa_jax.data.sotu import Sotu
from sa_jax.data.sources import read_text
from sa_jax.models.attending import attend_to_sequence
from sa_jax.models.decoder import run_layers
from sa_jax.models.pretrained import load_pretrained
from sa_jax.report import mixing_plot, mixing_tables
from sa_jax.tokenization.tokenizers import Tokenizer
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


def read_tokens(tokenizer: Tokenizer, text: Path | None, settings: Settings) -> np.ndarray:
    """Real text as `[texts, tokens]`: consecutive pieces of a file, or the beginning of speeches.

    Raises:
      ValueError: There isn't enough text, or it can't be read.
      ImportError: There is no default corpus.
    """
    first = [tokenizer.bos_id] if tokenizer.adds_bos else []
    size = settings.tokens - len(first)

    def pieces() -> Iterator[list[int]]:
        if text is None:
            for path in Sotu.find(None)[1]['validation']:
                yield tokenizer.encode(' '.join(read_text(path).split()))[:size]
            return
        ids = tokenizer.encode(read_text(text))
        for start in range(0, len(ids), size):
            yield ids[start : start + size]

    found = [first + ids for ids in pieces() if len(ids) == size]
    if len(found) < settings.texts:
        raise ValueError(
            f'{text or "the default corpus"} has {len(found)} texts of {settings.tokens} tokens, '
            f'but texts={settings.texts}; ask for fewer or shorter ones'
        )
    return np.array(found[: settings.texts], np.int32)


def read_model(model: str, text: Path | None, settings: Settings) -> list[Source]:
    """Queries, keys and values of layers of a published model, as they meet in attention.

    Raises:
      ValueError, ImportError: The model can't be loaded, a layer doesn't exist, or see
        `read_tokens`.
    """
    decoder, tokenizer, context_length = load_pretrained(model, dtype='float32')
    count = decoder.config.num_layers
    layers = settings.layers or tuple(sorted({0, count // 2, count - 1}))
    for layer in layers:
        if not 0 <= layer < count:
            raise ValueError(f'layer {layer} of a model of {count}; expected 0 to {count - 1}')
    if tokenizer is None:
        raise ValueError(f'{model} has no tokenizer; add its tokenizer.json')
    if settings.tokens > context_length:
        raise ValueError(
            f'tokens={settings.tokens}, but the model was made for {context_length} at most'
        )
    tokens = read_tokens(tokenizer, text, settings)
    captured = _capture(*nnx.split(decoder), jnp.asarray(tokens), layers)
    return [
        Source(f'layer {layer}', *(x[place] for x in captured))
        for place, layer in enumerate(layers)
    ]


@functools.partial(jax.jit, static_argnames=('graph', 'layers'))
def _capture(graph, state, tokens, layers):
    """Queries, keys and values of some layers, stacked along `[layers]`."""
    model = nnx.merge(graph, state)
    config = model.config
    batch, length = tokens.shape
    # Layers that are not asked for are written behind the end, that is, dropped.
    place = np.full(config.num_layers, len(layers))
    place[list(layers)] = np.arange(len(layers))

    def attend(query, key, value, layer, memory):
        heads = attend_to_sequence(
            query,
            key,
            value,
            config=config,
            context=AttentionContext(),
            layer=layer,
            example_ids=None,
            mesh=None,
        )
        row = jnp.asarray(place)[layer]
        found = (query, key, value)
        return heads, [
            x.at[row].set(new, mode='drop') for x, new in zip(memory, found, strict=True)
        ]

    nothing = [
        jnp.zeros((len(layers), batch, length, heads, config.head_dim))
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ]
    return run_layers(model, tokens, attend, nothing)[1]


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
            sources += read_model(_MODEL.value, text, settings)
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
