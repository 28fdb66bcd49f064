"""Checks and times decoding with a cache: result.json, decoding.md and decoding.png.

    python -m experiments.decoding --workdir=runs/decoding

Of a small decoder with random weights: how far the logits of decoding are from those of the whole
sequence under the same permutations; what a token costs, by its place and by the tokens that the
cache holds; how many keys a token sees, measured over permutations and expected. About two minutes
on two cores; nothing else should run on the machine.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from matplotlib import pyplot as plt

from sa_jax.attention.registry import AttentionContext, get_attention
from sa_jax.benchmarks.timing import interleaved
from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder
from sa_jax.models.decoding import empty_cache, start, step
from sa_jax.report import figures as looks
from sa_jax.training.results import write_result

_WORKDIR = flags.DEFINE_string('workdir', None, 'Receives the files.', required=True)
_VARIANTS = flags.DEFINE_list(
    'variants', ['full', 'swa', 'sa', 'sa_swa', 'partition'], 'What is decoded.'
)
_WINDOW = flags.DEFINE_integer('window', 257, 'Keys a window spans, the query itself included.')
_LENGTHS = flags.DEFINE_multi_integer(
    'length', [1024, 4096, 16384], 'Tokens that the timed caches hold.'
)
_CHECKED = flags.DEFINE_integer('checked', 1024, 'Tokens of the sequence that is checked.')
_COUNTED = flags.DEFINE_integer('counted', 2048, 'Tokens of the sequence whose keys are counted.')
_DRAWS = flags.DEFINE_integer('draws', 64, 'Permutations over which keys are counted.')
_ROUNDS = flags.DEFINE_integer('rounds', 11, 'Measurements of each time.', lower_bound=1)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the weights, tokens and permutations.')

_SIZES = {
    'vocab_size': 256,
    'hidden_size': 256,
    'num_layers': 4,
    'num_heads': 4,
    'num_kv_heads': 4,
    'head_dim': 64,
    'intermediate_size': 704,
}
_VARIANT_PATHS = {
    'full': ('full',),
    'swa': ('sliding_window',),
    'sa': ('stochastic',),
    'sa_swa': ('stochastic', 'sliding_window'),
    'partition': ('stochastic_partition',),
}
_LABELS = {
    'full': 'full',
    'swa': 'SWA',
    'sa': 'SA',
    'sa_swa': 'SA + SWA, gated',
    'partition': 'SA, partition',
}
_BINS = 32
_CALLS = 10
_PAUSE = 0.01  # seconds


def path_options(name: str, window: int) -> dict:
    """The options of a path; a chunk is as wide as a window that is even."""
    if name == 'full':
        return {}
    if name == 'stochastic_partition':
        return {'chunk_size': 2 * (window // 2)}
    return {'window': window}


def make_model(variant: str, window: int, seed: int) -> Decoder:
    """A decoder with random weights, large enough for attention to be far from uniform."""
    names = _VARIANT_PATHS[variant]
    options = {name: path_options(name, window) for name in names}
    config = DecoderConfig(**_SIZES, attention=names, attention_options=options)
    model = Decoder(config, rngs=nnx.Rngs(seed))

    def enlarge(path, leaf):
        return leaf if 'norm' in jax.tree_util.keystr(path) else 3 * leaf

    nnx.update(model, jax.tree_util.tree_map_with_path(enlarge, nnx.state(model)))
    return model


@functools.partial(jax.jit, static_argnames='graph')
def forward(graph, state, tokens, key):
    """The logits `[B, T, V]` of whole sequences."""
    return nnx.merge(graph, state)(tokens, permutation_key=key).logits


def logits_differences(variant: str, length: int, window: int, seed: int) -> dict:
    """Decodes the second half of a sequence; compares each token's logits with the whole one's."""
    model = make_model(variant, window, seed)
    token_key, key = jax.random.split(jax.random.key(seed))
    tokens = jax.random.randint(token_key, (1, length), 0, _SIZES['vocab_size'])
    expected = forward(*nnx.split(model), tokens, key)
    first = length // 2 - 1
    logits, cache = start(model, tokens[:, : first + 1], length=length, permutation_key=key)
    differences = [jnp.abs(logits - expected[:, first]).max()]
    for t in range(first + 1, length):
        logits, cache = step(model, cache, tokens[:, t])
        differences.append(jnp.abs(logits - expected[:, t]).max())
    shown = np.linspace(first, length - 1, 5).astype(int).tolist()
    return {
        'largest': float(max(differences)),
        'by_token': {t: float(differences[t - first]) for t in shown},
        'largest_logit': float(jnp.abs(expected).max()),
    }


@functools.partial(jax.jit, static_argnames='graph', donate_argnames='cache')
def decode_at(graph, state, cache, tokens, t, calls):
    """Decodes token t again and again, greedily, and returns the last choice and the cache."""

    def one(_, carry):
        tokens, cache = carry
        logits, cache = step(nnx.merge(graph, state), cache._replace(count=t), tokens)
        return jnp.argmax(logits, -1), cache

    return jax.lax.fori_loop(0, calls, one, (tokens, cache))


def make_decoder(variant: str, length: int, window: int, seed: int):
    """A function of (t, calls) that decodes token t so many times and waits."""
    model = make_model(variant, window, seed)
    graph, state = nnx.split(model)
    tokens, key = jnp.zeros(1, jnp.int32), jax.random.key(seed)
    held = {'cache': empty_cache(model.config, 1, length=length, permutation_key=key)}

    def decode(t, calls):
        # A Python number has a type of its own, which would compile twice.
        found, held['cache'] = decode_at(graph, state, held['cache'], tokens, jnp.int32(t), calls)
        jax.block_until_ready(found)

    return decode


def time_tokens(variants: list[str], lengths: list[int], window: int, rounds: int, seed: int):
    """Seconds per token by (variant, length of the cache, t), a number for each round.

    Each cache is timed at its last token, the longest also at those of the shorter ones.
    """
    runs, longest = {}, max(lengths)
    for variant in variants:
        for length in lengths:
            decode = make_decoder(variant, length, window, seed)
            for n in lengths if length == longest else [length]:
                runs[variant, length, n - 1] = functools.partial(decode, n - 1)
    for run in runs.values():
        run(2)
    return interleaved(runs, dict.fromkeys(runs, _CALLS), rounds=rounds, pause=_PAUSE)


def count_keys(name: str, length: int, window: int, draws: int, seed: int) -> dict:
    """Keys that each token sees, averaged over permutations, and their expectation.

    Every earlier token is as likely to be in the window of t as any other, so the expectation grows
    linearly: with a mean of v keys over all tokens, t sees 1 + 2·(v - 1)·t / (n - 1).
    """
    kind, options = get_attention(name), path_options(name, window)

    @jax.jit
    def count(key):
        drawn = kind.decoding.prepare(AttentionContext(key=key), length, **options)
        neighbours = kind.decoding.neighbours(drawn, jnp.arange(length), length, **options)
        return (neighbours >= 0).sum((1, 2))

    keys = jax.random.split(jax.random.key(seed), draws)
    counts = np.stack([count(key) for key in keys]).astype(float)
    index = np.arange(length)
    if name == 'sliding_window':
        expected = np.minimum(index + 1, window)
    else:
        mean = kind.visible_keys(length, is_causal=True, **options)
        expected = 1 + 2 * (mean - 1) * index / (length - 1)
    # Of each bin of tokens: its mean over draws, the standard error of that, and the expectation.
    binned = counts.reshape(draws, _BINS, -1).mean(-1)
    return {
        't': index.reshape(_BINS, -1).mean(-1).tolist(),
        'measured': binned.mean(0).tolist(),
        'standard_error': (binned.std(0, ddof=1) / np.sqrt(draws)).tolist(),
        'expected': expected.reshape(_BINS, -1).mean(-1).tolist(),
        'most': int(counts.max()),
        'last_expected': float(expected[-1]),
    }


def describe_times(seconds: dict) -> list[dict]:
    """One row per variant, length and t, beside full attention's time in the same place."""
    medians = {case: float(np.median(x)) for case, x in seconds.items()}
    rows = []
    for (variant, length, t), median in medians.items():
        values = seconds[variant, length, t]
        full = medians.get(('full', length, t))
        rows.append(
            {
                'variant': variant,
                'length': length,
                't': t,
                'ms': 1e3 * median,
                'least_ms': 1e3 * min(values),
                'most_ms': 1e3 * max(values),
                'full_over_this': None if full is None else full / median,
            }
        )
    return rows


def to_markdown(figures: dict) -> str:
    """The figures as Markdown tables."""
    lines = ['| variant | largest difference of logits | largest logit |', '|---|---|---|']
    for variant, x in figures['logits'].items():
        lines.append(f'| {_LABELS[variant]} | {x["largest"]:.1e} | {x["largest_logit"]:.2f} |')
    lines += ['', '| variant | cache, tokens | t | ms per token (least … most) | full / this |']
    lines.append('|---|---|---|---|---|')
    for x in figures['times']:
        ratio = 'not measured' if x['full_over_this'] is None else f'{x["full_over_this"]:.1f}'
        lines.append(
            f'| {_LABELS[x["variant"]]} | {x["length"]:,} | {x["t"]:,} '
            f'| {x["ms"]:.2f} ({x["least_ms"]:.2f} … {x["most_ms"]:.2f}) | {ratio} |'
        )
    lines += [
        '',
        '| variant | keys in the last bin, measured | expected | most |',
        '|---|---|---|---|',
    ]
    for variant, x in figures['visible_keys'].items():
        lines.append(
            f'| {_LABELS[variant]} | {x["measured"][-1]:.1f} ± {x["standard_error"][-1]:.1f} '
            f'| {x["expected"][-1]:.1f} | {x["most"]} |'
        )
    return '\n'.join(lines) + '\n'


def plot(figures: dict, window: int, path: Path) -> None:
    """Draws visible keys against t, and time per token against the cache's length."""
    figure, (keys, times) = plt.subplots(1, 2, figsize=(11, 4.2), layout='constrained')
    for variant, x in figures['visible_keys'].items():
        keys.plot(x['t'], x['expected'], color=looks.COLORS[variant], lw=1.5)
        keys.errorbar(
            x['t'],
            x['measured'],
            yerr=x['standard_error'],
            fmt='o',
            ms=4,
            color=looks.COLORS[variant],
            label=_LABELS[variant],
        )
    keys.set(xlabel='token t', ylabel='keys seen, itself included', ylim=(0, 1.08 * window))
    keys.set_title('Visible keys: measured (dots), expected (lines)', loc='left')
    for variant in dict.fromkeys(x['variant'] for x in figures['times']):
        last = [
            x for x in figures['times'] if x['variant'] == variant and x['t'] == x['length'] - 1
        ]
        lengths, ms = [x['length'] for x in last], np.array([x['ms'] for x in last])
        ends = np.array([[x['least_ms'] for x in last], [x['most_ms'] for x in last]])
        times.errorbar(
            lengths,
            ms,
            yerr=np.abs(ends - ms),
            marker='o',
            ms=5,
            capsize=3,
            color=looks.COLORS[variant],
            label=_LABELS[variant],
        )
    times.set(xscale='log', yscale='log', xlabel='tokens in the cache', ylabel='ms per token')
    times.set_xticks(lengths, [f'{n:,}' for n in lengths])
    times.minorticks_off()
    times.set_title('Time of the last token (median, least, most)', loc='left')
    for axes in (keys, times):
        looks.tidy(axes)
        axes.legend(frameon=False)
    looks.save(figure, path)


def main(argv: list[str]) -> None:
    """Measures, prints the tables and writes the files."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    unknown = set(_VARIANTS.value) - set(_VARIANT_PATHS)
    if unknown:
        raise app.UsageError(f'Unknown variants {sorted(unknown)}; known: {list(_VARIANT_PATHS)}')
    if _COUNTED.value % _BINS:
        raise app.UsageError(f'--counted={_COUNTED.value} must be a multiple of {_BINS}')
    window, seed, lengths = _WINDOW.value, _SEED.value, sorted(_LENGTHS.value)
    one_path = [x for x in _VARIANTS.value if x != 'full' and len(_VARIANT_PATHS[x]) == 1]
    figures = {
        'logits': {x: logits_differences(x, _CHECKED.value, window, seed) for x in _VARIANTS.value},
        'visible_keys': {
            x: count_keys(_VARIANT_PATHS[x][0], _COUNTED.value, window, _DRAWS.value, seed)
            for x in one_path
        },
        'times': describe_times(time_tokens(_VARIANTS.value, lengths, window, _ROUNDS.value, seed)),
    }
    workdir = Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    config = {x.name: x.value for x in flags.FLAGS.flags_by_module_dict()[argv[0]]}
    config.pop('workdir')
    config['model'] = _SIZES
    write_result(workdir / 'result.json', config=config, figures=figures, seeds={'all': seed})
    table = to_markdown(figures)
    (workdir / 'decoding.md').write_text(table)
    plot(figures, window, workdir / 'decoding.png')
    print(table)


if __name__ == '__main__':
    app.run(main)
