"""Statistics of graphs against NetworkX, closed forms and definitions written out."""

import jax
import numpy as np
import pytest
from scipy import sparse

from sa_jax.analysis import clustering, graphs, pattern_graphs, random_graphs
from sa_jax.analysis.adjacency import layer_adjacency, layer_permutation
from sa_jax.analysis.graph_distances import Estimate, mean_shortest_path, total_distances
from sa_jax.analysis.graphs import statistics


def random_graph(n, share, seed):
    dense = np.random.default_rng(seed).random((n, n)) < share
    np.fill_diagonal(dense, False)
    return sparse.csr_array(dense)


def ring(n, degree):
    return random_graphs.watts_strogatz(n, degree, 0.0, np.random.default_rng(0))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize('share', [0.02, 0.1, 0.5])
def test_statistics_agree_with_networkx(share, rng):
    nx = pytest.importorskip('networkx')
    graph = random_graph(80, share, seed=1)
    # Some edges get an opposite, as in a connectome.
    back = sparse.tril(graph.multiply(random_graph(80, 0.4, seed=2)), format='csr').T
    graph = (graph + back).tocsr()
    found = statistics(graph, rng, sources=80, wedges=1)
    oracle = nx.from_scipy_sparse_array(graph, create_using=nx.DiGraph)
    strong = oracle.subgraph(max(nx.strongly_connected_components(oracle), key=len))
    view = nx.from_scipy_sparse_array(clustering.undirected_view(graph))
    weak = view.subgraph(max(nx.connected_components(view), key=len))

    assert found.nodes == 80
    assert found.edges == oracle.number_of_edges()
    assert found.connection_probability == pytest.approx(nx.density(oracle))
    assert found.reciprocity == pytest.approx(nx.reciprocity(oracle))
    assert found.strong_nodes == len(strong)
    assert found.weak_nodes == len(weak)
    assert found.clustering.transitivity == (pytest.approx(nx.transitivity(view)), 0)
    assert found.clustering.local == (pytest.approx(nx.average_clustering(view)), 0)
    if len(strong) > 1:
        assert found.path_length.value == pytest.approx(nx.average_shortest_path_length(strong))
    length = nx.average_shortest_path_length(weak)
    assert found.undirected_path_length == (pytest.approx(length), 0)
    assert sum(found.degree['nodes_by_least_total'].values()) == 80
    assert found.degree['total']['largest'] == max(dict(oracle.degree).values())
    assert found.degree['incoming']['mean'] == pytest.approx(graph.nnz / 80)

    # Lin et al.: p and L of Erdős and Rényi's graph, with as many joined pairs.
    pairs = view.number_of_edges()
    random_length = (np.log(80) - 0.57721566) / np.log(2 * pairs / 80) + 0.5
    expected = found.clustering.parallel.value / (pairs / (80 * 79 / 2)) / (length / random_length)
    assert found.small_worldness.value == pytest.approx(expected)


def test_parallel_edges_as_graph_tool_counts_them(rng):
    """Its algorithm written out: a list of neighbours with repeats, marks for the closing edge."""
    graph = random_graph(40, 0.1, seed=3) + random_graph(40, 0.1, seed=3).T
    graph = (graph + random_graph(40, 0.05, seed=4)).tocsr()
    dense = graph.toarray()
    lists = [[*np.flatnonzero(dense[v]), *np.flatnonzero(dense[:, v])] for v in range(40)]
    closed = sum(x in lists[v] for v in range(40) for u in lists[v] for x in lists[u])
    pairs = sum(len(x) * (len(x) - 1) for x in lists)
    found = clustering.clustering(graph, rng, wedges=1)
    assert found.parallel == (pytest.approx(closed / pairs), 0)
    assert found.parallel.value != pytest.approx(found.transitivity.value, rel=0.01)


def test_lin_et_al_small_worldness_of_the_fly():
    """From the figures in their notebooks; two decimals of γ and the error of C aside."""
    found = graphs.small_worldness(
        127_319, 2_432_330, Estimate(0.04632866099163119, 0.0), Estimate(3.906096746643617, 0.0)
    )
    assert found.value == pytest.approx(141.01770106786176, rel=1e-5)
    assert graphs.small_worldness(10, 5, Estimate(0.1, 0), Estimate(1.0, 0)) is None
    assert graphs.small_worldness(10, 20, Estimate(0.1, 0), None) is None


def test_sampled_clustering_is_within_its_error(rng, monkeypatch):
    graph = (ring(300, 8) + random_graph(300, 0.01, seed=5)).tocsr()
    graph, _ = graphs.simple_graph(graph)
    counted = clustering.clustering(graph, rng, wedges=1)
    monkeypatch.setattr(clustering, '_COUNTED_PAIRS', 0)
    sampled = clustering.clustering(graph, rng, wedges=200_000)
    for exact, estimate in zip(counted, sampled, strict=True):
        assert exact.error == 0
        assert 0 < estimate.error < 0.002
        assert abs(estimate.value - exact.value) < 4 * estimate.error


def test_sampled_clustering_passes_over_nodes_without_pairs(rng, monkeypatch):
    """A triangle with a tail and a node alone: local (1 + 1 + 1/3) / 5, transitivity 3 / 5."""
    edges = np.array([[0, 1], [1, 2], [2, 0], [2, 3]])
    graph = random_graphs.from_edges(*edges.T, 5)
    counted = clustering.clustering(graph, rng, wedges=1)
    assert counted.transitivity.value == pytest.approx(3 / 5)
    assert counted.local.value == pytest.approx((1 + 1 + 1 / 3) / 5)
    monkeypatch.setattr(clustering, '_COUNTED_PAIRS', 0)
    sampled = clustering.clustering(graph, rng, wedges=100_000)
    assert sampled.transitivity.value == pytest.approx(3 / 5, abs=0.01)
    assert sampled.local.value == pytest.approx((1 + 1 + 1 / 3) / 5, abs=0.01)
    star = random_graphs.from_edges(np.array([0]), np.array([1]), 3)
    assert clustering.clustering(star, rng, wedges=10).local == (0, 0)


@pytest.mark.parametrize(('n', 'degree'), [(200, 4), (2000, 2)])
def test_distances_of_a_ring(n, degree):
    """Both ways of searching: few hops go by sweeps, many by queues."""
    sources = np.array([0, 17, n - 1])
    hops = np.ceil(np.minimum(np.arange(n), n - np.arange(n)) / (degree // 2))
    np.testing.assert_array_equal(total_distances(ring(n, degree), sources), hops.sum())


def test_distances_from_more_sources_than_a_word_has_bits():
    nx = pytest.importorskip('networkx')
    graph = graphs.largest_component(random_graph(150, 0.03, seed=6), 'strong')
    oracle = nx.from_scipy_sparse_array(graph, create_using=nx.DiGraph)
    lengths = dict(nx.all_pairs_shortest_path_length(oracle))
    expected = [sum(lengths[v].values()) for v in range(graph.shape[0])]
    sources = np.arange(graph.shape[0])
    np.testing.assert_array_equal(total_distances(graph, sources), expected)


def test_sampled_path_length_is_within_its_error(rng):
    graph = graphs.largest_component(random_graph(400, 0.01, seed=7), 'strong')
    exact = mean_shortest_path(graph, rng, sources=400)
    assert exact.error == 0
    estimates = [mean_shortest_path(graph, rng, sources=50) for _ in range(200)]
    errors = np.array([x.value - exact.value for x in estimates])
    stated = np.mean([x.error for x in estimates])
    assert errors.std() == pytest.approx(stated, rel=0.15)
    inside = [low <= exact.value <= high for low, high in (x.interval() for x in estimates)]
    assert np.mean(inside) > 0.88


def test_distances_need_a_connected_graph(rng):
    path = random_graphs.from_edges(np.arange(4), np.arange(1, 5), 5)
    with pytest.raises(ValueError, match='largest strongly connected component first'):
        mean_shortest_path(path, rng, sources=5)
    two_rings = sparse.block_diag([ring(6, 2), ring(6, 2)], format='csr')
    with pytest.raises(ValueError, match='not every node'):
        total_distances(sparse.csr_array(two_rings), np.array([0, 7]))
    with pytest.raises(ValueError, match='sources=1'):
        mean_shortest_path(ring(5, 2), rng, sources=1)
    assert mean_shortest_path(sparse.csr_array((1, 1), dtype=bool), rng, sources=2) is None


def test_matched_graphs_keep_all_degrees(rng):
    graph = random_graph(300, 0.03, seed=8)
    # A hub in either direction, for whose edges shuffles collide.
    hub = np.full(250, 0), np.arange(1, 251)
    graph = (graph + random_graphs.from_edges(*hub, 300)).tocsr()
    graph = (graph + random_graphs.from_edges(*hub[::-1], 300)).tocsr()
    random = random_graphs.degree_matched(graph, rng)
    assert random.diagonal().sum() == 0
    np.testing.assert_array_equal(np.diff(random.indptr), np.diff(graph.indptr))
    np.testing.assert_array_equal(random.sum(axis=0), graph.sum(axis=0))
    assert random.multiply(graph).nnz < 0.4 * graph.nnz
    complete = sparse.csr_array(~np.eye(30, dtype=bool))
    with pytest.raises(ValueError, match='lower the degree'):
        random_graphs.degree_matched(complete, rng)


def test_matched_graph_of_a_ring_is_like_a_random_one(rng):
    """Clustering k / n, reciprocity p, and paths as short as Erdős and Rényi's."""
    n, degree = 3000, 10
    found = statistics(ring(n, degree), rng, sources=200, wedges=1)
    matched = found.matched
    assert found.clustering.transitivity.value == pytest.approx(3 / 4 * (10 - 2) / (10 - 1))
    assert matched['clustering'].value == pytest.approx(20 / n, rel=0.15)
    assert matched['reciprocity'] == pytest.approx(degree / n, rel=0.4)
    expected = (np.log(n) - 0.5772) / np.log(degree) + 0.5
    assert matched['path_length'].value == pytest.approx(expected, rel=0.05)
    closed = found.clustering.parallel.value / matched['clustering'].value
    length = found.path_length.value / matched['path_length'].value
    assert found.matched_small_worldness.value == pytest.approx(closed / length)
    assert found.to_json()['matched']['path_length'] == {
        'value': matched['path_length'].value,
        'error': matched['path_length'].error,
    }


@pytest.mark.parametrize('degree', [1, 6, 7])
def test_watts_strogatz(degree, rng):
    n = 500
    # Without rewiring, the sliding window on a circle.
    window = layer_adjacency('swa', n, window=degree + 1, causal=False, circular=True)
    difference = ring(n, degree) != graphs.simple_graph(window.T)[0]
    assert difference.nnz == 0
    for share in (0.3, 1.0):
        graph = random_graphs.watts_strogatz(n, degree, share, rng)
        assert graph.diagonal().sum() == 0
        assert set(np.diff(graph.indptr)) == {degree}
        kept = graph.multiply(ring(n, degree)).nnz / graph.nnz
        assert kept == pytest.approx(1 - share + share * degree / n, abs=0.07)


@pytest.mark.parametrize(
    ('n', 'degree', 'share', 'message'),
    [(0, 0, 0, 'n=0'), (5, 5, 0, 'degree=5; expected 0 to n - 1 = 4'), (5, 2, 1.5, 'rewired=1.5')],
)
def test_watts_strogatz_names_bad_values(n, degree, share, message, rng):
    with pytest.raises(ValueError, match=message):
        random_graphs.watts_strogatz(n, degree, share, rng)


def test_simple_graph_counts_self_loops():
    dense = np.array([[1, 1, 0], [0, 0, 1], [0, 0, 1]])
    stored = sparse.csr_array(dense)
    stored.data[0] = 0  # a stored zero is no edge
    simple, loops = graphs.simple_graph(stored)
    assert loops == 1
    assert simple.dtype == bool
    np.testing.assert_array_equal(simple.toarray(), [[0, 1, 0], [0, 0, 1], [0, 0, 0]])


def test_graphs_without_statistics_are_refused(rng):
    with pytest.raises(ValueError, match='no edges'):
        statistics(sparse.csr_array((3, 3), dtype=bool), rng, sources=2, wedges=1)
    with pytest.raises(ValueError, match='self-loops'):
        statistics(sparse.csr_array(np.eye(3, dtype=bool)), rng, sources=2, wedges=1)
    with pytest.raises(ValueError, match='wedges=0'):
        clustering.clustering(ring(5, 2), rng, wedges=0)


@pytest.mark.parametrize(
    ('kind', 'layers', 'windows'),
    [('swa', 3, [12]), ('sa', 1, [12]), ('sa', 3, [5, 5, 4]), ('sa_swa', 2, [5, 5, 4])],
)
def test_union_graph_is_the_union_of_the_layers_masks(kind, layers, windows):
    n, key = 200, jax.random.key(3)
    union = pattern_graphs.union_graph(kind, n, degree=11, layers=layers, key=key)
    expected = np.zeros((n, n), bool)
    if kind != 'sa':
        expected |= layer_adjacency('swa', n, window=windows.pop(0), causal=False).toarray()
    for layer, window in enumerate(windows if kind != 'swa' else []):
        order = layer_permutation(key, layer, n)
        mask = layer_adjacency('sa', n, window=window, causal=False, permutation=order)
        expected |= mask.toarray()
    np.fill_diagonal(expected, False)
    np.testing.assert_array_equal(union.toarray(), expected)
    assert 11 > union.nnz / n > 10.2


def test_one_layer_of_sa_is_swa_relabelled(rng):
    swa, sa = (
        statistics(
            pattern_graphs.union_graph(kind, 500, degree=6, layers=1, key=jax.random.key(0)),
            rng,
            sources=500,
            wedges=1,
        )
        for kind in ('swa', 'sa')
    )
    assert sa.edges == swa.edges
    assert sa.clustering == swa.clustering
    assert sa.path_length.value == pytest.approx(swa.path_length.value)
    assert sa.reciprocity == swa.reciprocity == 1


@pytest.mark.parametrize(('kind', 'layers'), [('sa', 3), ('sa_swa', 2), ('sa', 1), ('swa', 1)])
def test_clustering_of_a_union_of_rings(kind, layers, rng):
    """3 (k/r - 2) / (4 (k - 1)) for r rings, and chance; SWA is but one more ring for SA."""
    n, degree = 4000, 24
    rings = layers + (kind == 'sa_swa')
    key = jax.random.key(5)
    union = pattern_graphs.union_graph(kind, n, degree=degree, layers=layers, key=key)
    within = (degree / rings - 1) / (degree - 1)
    expected = 3 * (degree / rings - 2) / (4 * (degree - 1)) + (1 - within) * degree / n
    found = clustering.clustering(union, rng, wedges=1)
    assert found.transitivity == (pytest.approx(expected, rel=0.03), 0)


@pytest.mark.parametrize('kind', ['swa', 'sa'])
def test_undirected_view_of_causal_masks(kind):
    """SA's is that of the bidirectional window as wide, SWA's of one of 2w - 1."""
    n, window = 300, 7
    order = None if kind == 'swa' else layer_permutation(jax.random.key(1), 0, n)
    wide = 2 * window - 1 if kind == 'swa' else window
    masks = [
        layer_adjacency(kind, n, window=w, causal=causal, permutation=order)
        for w, causal in ((window, True), (wide, False))
    ]
    causal, both = (clustering.undirected_view(x) for x in masks)
    assert (causal != both).nnz == 0
    simple, _ = graphs.simple_graph(masks[0])
    assert graphs.largest_component(simple, 'strong').shape == (1, 1)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'kind': 'full'}, "kind='full'; expected one of swa, sa, sa_swa"),
        ({'n': 0}, 'n=0'),
        ({'degree': 10}, 'w=11 among n=10 tokens, w > n'),
        ({'layers': 6}, 'degree=6 among 7 windows'),
    ],
)
def test_union_graph_names_bad_values(changes, message):
    arguments = {'kind': 'sa_swa', 'n': 10, 'degree': 6, 'layers': 2, 'key': jax.random.key(0)}
    with pytest.raises(ValueError, match=message):
        pattern_graphs.union_graph(**arguments | changes)
