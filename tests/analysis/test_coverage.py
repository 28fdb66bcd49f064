"""Walks through stacks against dense products of masks, and the closed forms against walks."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sa_jax.analysis import closed_forms, coverage_study
from sa_jax.analysis.adjacency import KINDS, layer_adjacency, layer_permutation, layer_runs
from sa_jax.analysis.coverage import receptive_fields, share_by_distance, share_seen
from sa_jax.analysis.coverage_study import Case, Study

# How many standard errors a mean may be off: once in a million, if they are known.
_CONFIDENCE = 1 - 1e-6


def stack(kind, n, seed, layers, **options):
    """The options of each layer's windows."""
    key = jax.random.key(seed)
    return [
        options | {'permutation': None if kind == 'swa' else layer_permutation(key, layer, n)}
        for layer in range(layers)
    ]


def walk(kind, n, layers, queries):
    return receptive_fields((layer_runs(kind, n, **x) for x in layers), queries)


def dense_fields(kind, n, layers):
    """Boolean `[n, n]` after each layer: what each query sees, the query's own layer first."""
    seen = np.eye(n, dtype=bool)
    for options in layers:
        seen = seen @ layer_adjacency(kind, n, **options).toarray()
        yield seen


def to_dense(bits, count):
    shifts = np.arange(32, dtype=np.uint32)
    return (bits[:, None] >> shifts[:, None] & 1).astype(bool).reshape(-1, bits.shape[1])[:count]


def assert_is_mean(values, expected):
    """Holds independent draws `[draws, ...]` of something against what its mean should be."""
    error = values.std(0, ddof=1) / math.sqrt(len(values))
    limit = stats.t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1)
    assert (np.abs(values.mean(0) - expected) <= limit * error + 1e-12).all()


def two_apart(counts, layers):
    """Of the tokens two apart the share that so many causal layers connect (docs/theory.md)."""
    n = len(counts)
    one, both = (
        closed_forms.miss_probability(counts, np.array([1.0, 2.0])) * n / (n - np.array([1, 2]))
    )
    return 1 - both ** (layers - 1) * (both + layers * (one - both))


@settings(max_examples=80)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(coverage_study.SETTINGS),
    st.sampled_from([1, 5, 40]),
    st.integers(1, 50),
    st.integers(0, 10**6),
    st.data(),
)
def test_walks_are_products_of_masks(kind, setting, n, window, seed, data):
    circular = setting == 'circular' and kind != 'partition'
    options = {'window': window, 'causal': setting == 'causal', 'circular': circular}
    layers = stack(kind, n, seed, 3, **options)
    queries = np.array(data.draw(st.permutations(range(n))))[: data.draw(st.integers(1, n))]
    walked = walk(kind, n, layers, queries)
    for bits, seen in zip(walked, dense_fields(kind, n, layers), strict=True):
        np.testing.assert_array_equal(to_dense(bits, len(queries)), seen[queries])


@pytest.mark.parametrize('causal', [True, False])
def test_shares_are_counted_right(causal):
    n, edges = 100, [0, 1, 2, 4, 50, 99, 100]
    layers = stack('sa', n, 1, 3, window=9, causal=causal)
    queries = np.array([99, 3, 40, 0, 57, *range(60, 95)])
    for bits, seen in zip(
        walk('sa', n, layers, queries), dense_fields('sa', n, layers), strict=True
    ):
        admissible = np.tri(n, dtype=bool) if causal else np.ones((n, n), bool)
        ratios = seen[queries].sum(1) / admissible[queries].sum(1)
        share = share_seen(bits, queries, causal)
        assert share.connected == seen[queries].sum() / admissible[queries].sum()
        assert share.worst == ratios.min()
        assert share.tokens == seen[queries].sum(1).mean()
        pairs = [(i, i - d, d) for i in queries for d in range(i + 1)]
        for low, high, measured in zip(
            edges, edges[1:], share_by_distance(bits, queries, edges), strict=False
        ):
            expected = [seen[i, j] for i, j, d in pairs if low <= d < high]
            np.testing.assert_allclose(measured, np.mean(expected), rtol=1e-12)


def test_the_sampling_error_is_what_samples_scatter_by():
    n, count, causal = 300, 60, True
    layers = stack('swa', n, 0, 4, window=20, causal=causal)
    everyone = np.arange(n)
    truth = share_seen(list(walk('swa', n, layers, everyone))[-1], everyone, causal)
    assert truth.sampling_error == 0
    rng = np.random.default_rng(0)
    scores = []
    for _ in range(200):
        queries = rng.choice(n, count, replace=False)
        share = share_seen(list(walk('swa', n, layers, queries))[-1], queries, causal)
        scores.append((share.connected - truth.connected) / share.sampling_error)
    # Were they normal, 200 scores' variance would be within these with this confidence.
    low, high = stats.chi2.ppf([(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2], 199) / 199
    assert low < np.var(scores, ddof=1) < high


@pytest.mark.parametrize('setting', coverage_study.SETTINGS)
@pytest.mark.parametrize('window', [2, 5, 8])
def test_sliding_windows_follow_their_formula(window, setting):
    n, queries = 41, np.arange(41)
    case = Case('swa', setting, n, window)
    layers = itertools.repeat(case.layer(queries), 45)
    shares = [
        share_seen(bits, queries, case.is_causal).connected
        for bits in receptive_fields(layers, queries)
    ]
    np.testing.assert_allclose(shares, coverage_study.expected_shares(case, 45), rtol=1e-12)
    first = [next((k for k, x in enumerate(shares, 1) if x >= share), None) for share in (0.5, 1)]
    expected = coverage_study.expected_layers(case)
    assert [expected[0], expected[2]] == first


def test_a_sliding_window_reaches_layers_times_its_other_keys():
    n, window = 100, 7
    layers = stack('swa', n, 0, 5, window=window, causal=True)
    for layer, bits in enumerate(walk('swa', n, layers, np.array([n - 1])), start=1):
        assert np.count_nonzero(bits) == closed_forms.sliding_window_reach(window, layer)


def test_the_probability_to_miss_counts_sets_of_slots():
    counts = np.array([2, 3, 3, 3, 3, 3, 3, 2, 8, 1])
    for seen in range(11):
        ways = [math.comb(10 - v, seen) / math.comb(10, seen) for v in counts]
        probability = closed_forms.miss_probability(counts, np.array([float(seen)]))
        np.testing.assert_allclose(probability, np.mean(ways), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ('kind', 'setting', 'n', 'window'),
    [
        ('sa', 'circular', 300, 11),
        ('sa', 'bidirectional', 300, 12),
        # The last chunk has a single token.
        ('partition', 'bidirectional', 301, 12),
    ],
)
def test_bidirectional_coverage_follows_its_formula(kind, setting, n, window):
    case, queries = Case(kind, setting, n, window), np.arange(n)
    shares, increments = [], []
    for seed in range(30):
        sizes = [np.ones(n)]
        layers = (case.layer(x['permutation']) for x in stack(kind, n, seed, 4, window=1))
        for bits in receptive_fields(layers, queries):
            sizes.append(to_dense(bits, n).sum(1).astype(float))
        shares.append([x.mean() / n for x in sizes[1:]])
        # Given what is seen, what a layer more shows is exact at any depth.
        known = [n * (1 - closed_forms.miss_probability(case.counts(), x)) for x in sizes[:-1]]
        increments.append([(x - y).mean() for x, y in zip(sizes[1:], known, strict=True)])
    shares, expected = np.array(shares), np.array(coverage_study.expected_shares(case, 4))
    assert_is_mean(np.array(increments)[:, 1:], 0)
    assert_is_mean(shares[:, :2], expected[:2])
    error = shares.std(0, ddof=1) / math.sqrt(len(shares))
    assert (expected + 6 * error + 1e-12 >= shares.mean(0)).all()  # too high, if anything
    # By less than a draw scatters (docs/theory.md).
    assert (expected - shares.mean(0) <= shares.std(0, ddof=1) + 1e-12).all()


@pytest.mark.parametrize('kind', ['sa', 'partition'])
def test_causal_coverage_follows_its_formula(kind):
    n, depth, draws = 160, 8, 40
    case, queries = Case(kind, 'causal', n, 9), np.arange(n)
    earlier, distance = np.tri(n, k=-1, dtype=bool), queries[:, None] - queries
    by_distance, surprises = [], []
    for seed in range(draws):
        layers = (case.layer(x['permutation']) for x in stack(kind, n, seed, depth, window=1))
        seen, rows = np.eye(n, dtype=bool), []
        for bits in receptive_fields(layers, queries):
            # Seen tokens of (j, i]: a token's own and those behind it, less its own.
            between = np.cumsum(seen[:, ::-1], axis=1)[:, ::-1] - seen
            missed = closed_forms.miss_probability(case.counts(), np.arange(n, dtype=float))
            missed = missed[between] * n / (n - between)
            is_open = earlier & ~seen
            seen = to_dense(bits, n)
            surprises.append((seen[is_open] - (1 - missed[is_open])).mean())
            rows.append([seen[earlier & (distance == d)].mean() for d in (1, 2, n // 2)])
        by_distance.append(rows)
    assert_is_mean(np.array(surprises).reshape(draws, depth), 0)
    by_distance = np.array(by_distance)
    assert_is_mean(by_distance[:, 0], closed_forms.link_probability(case.counts()))
    p = closed_forms.link_probability(case.counts())
    layers = np.arange(1, depth + 1)
    assert_is_mean(by_distance[:, :, 0], 1 - (1 - p) ** layers)
    assert_is_mean(by_distance[:, :, 1], two_apart(case.counts(), layers))
    formula = itertools.islice(closed_forms.causal_share_by_distance(case.counts()), depth)
    formula = np.array([x[[1, 2, n // 2]] for x in formula])
    np.testing.assert_allclose(formula[:, 0], 1 - (1 - p) ** layers, rtol=1e-9)
    np.testing.assert_allclose(formula[0], p, rtol=1e-9)


def test_causal_stacks_of_the_trial():
    """1,024 tokens, windows of 33: SA leaves pairs out for long, SA + SWA connects all in three."""
    study = Study(kinds=('sa', 'sa_swa'), focus_length=1024, focus_window=33, seeds=4)
    cases = {x.kind: x for x in study.focus() if x.is_causal}
    draw = coverage_study.drawer(1024)
    sa, both = (
        coverage_study.focus_case(study, cases[kind], draw, lambda case: None)
        for kind in ('sa', 'sa_swa')
    )
    # The trial was a draw of its own, and its figures are rounded.
    connected = np.array([x['connected'] for x in sa['runs']])[:, [3, 23]]
    neighbours = np.array([x['by_distance']['24'][:1] for x in sa['runs']])
    for values, trial, rounding in ((connected, [0.865, 0.996], 5e-4), (neighbours, 0.54, 5e-3)):
        error = values.std(0, ddof=1) * math.sqrt(1 + 1 / len(values))
        assert (np.abs(values.mean(0) - trial) <= 4 * error + rounding).all()
    assert {x['layers_to'][2] for x in both['runs']} == {3}


@pytest.mark.parametrize('causal', [True, False])
def test_expected_layers_are_the_first_to_reach_a_share(causal):
    counts = Case('sa', 'causal', 500, 20).counts()
    shares = list(itertools.islice(closed_forms.stochastic_share(counts, causal), 200))
    half, most, every = closed_forms.stochastic_layers(counts, (0.5, 0.99, 1.0), causal=causal)
    assert shares[half - 1] >= 0.5 > shares[half - 2]
    assert shares[most - 1] >= 0.99 > shares[most - 2]
    unconnected = 500 * 500 * (1 - np.array(shares))
    if causal:
        p = closed_forms.link_probability(counts)
        unconnected = 499 * (1 - p) ** np.arange(1, 201)
    assert unconnected[every - 1] < 0.5 <= unconnected[every - 2]


def test_windows_of_one_connect_nothing_and_of_all_everything():
    one, every = np.ones(9, int), np.full(9, 9)
    for causal in (True, False):
        options = {'causal': causal}
        assert closed_forms.stochastic_layers(one, (0.1, 0.99, 1), **options)[1:] == (None, None)
        assert closed_forms.stochastic_layers(every, (0.5, 0.99, 1), **options) == (1, 1, 1)
        assert closed_forms.sliding_window_layers(9, 1, 0.5, **options) is None
        assert closed_forms.stochastic_layers(np.ones(1, int), (1,), **options) == (1,)


@pytest.mark.parametrize(
    ('flag', 'value', 'message'),
    [
        ('kinds', ('moba',), "--kinds: 'moba'; expected some of swa,sa,sa_swa,partition"),
        ('lengths', (0, 2048), '--lengths: 0; expected at least 1'),
        ('windows', (1,), '--windows: 1; expected at least 2'),
        ('windows', (16, 2048), '--windows: 2048 is wider than 1024 of --lengths'),
        ('windows', (), '--windows=; expected some, each once'),
        ('lengths', (4096, 4096), '--lengths=4096,4096; expected some, each once'),
        ('seeds', 0, '--seeds: 0; expected at least 1'),
        ('focus_window', 200_000, '--focus_window: 200000 is wider than 130000 of --focus_length'),
    ],
)
def test_bad_settings_are_named(flag, value, message):
    with pytest.raises(ValueError, match=message):
        Study(**{flag: value})
