"""The training-free sweep on a tiny model of bytes; text made up here."""

import dataclasses
import json

import jax
import pytest
from flax import nnx

from sa_jax.benchmarks import training_free
from sa_jax.benchmarks.training_free import SweepError, load_tasks, read_figures, run_sweep
from sa_jax.benchmarks.training_free_settings import Sweep
from sa_jax.evaluation.named_tasks import NamedTask
from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder
from sa_jax.models.pretrained import Pretrained
from sa_jax.models.pretrained.fingerprint import fingerprint
from sa_jax.tokenization.tokenizers import ByteTokenizer

ANIMALS = ('heron', 'otter', 'viper', 'moose', 'tapir', 'lemur', 'gecko', 'bison')
CONTEXTS = [f'A {animal} came by and sat with' for animal in ANIMALS]
CLOZE = [{'context': x, 'continuation': 'them'} for x in 5 * CONTEXTS]
CHOICES = [{'query': x, 'choices': ['us', 'them'], 'gold': 1} for x in CONTEXTS[:4]]
SWEEP = Sweep(
    patterns=('full', 'swa', 'sa', 'moba'),
    effective_windows=(4,),
    tasks=('cloze', 'tale'),
    # As many tokens as an item and as many windows as contexts, so that little is compiled.
    text_window=33,
    text_limit=5,
    draws=2,
)


@pytest.fixture(autouse=True, scope='module')
def dense():
    """The reference, which compiles in a fraction of the time."""
    changes = Sweep.changes

    def with_reference(sweep, cell):
        changed = changes(sweep, cell)
        options = {name: {} for name in changed['attention']} | changed.get('attention_options', {})
        options = {name: x | {'implementation': 'reference'} for name, x in options.items()}
        return changed | {'attention_options': options}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sweep, 'changes', with_reference)
        yield


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tasks')
    for name, records in (('cloze', CLOZE), ('choices', CHOICES)):
        (folder / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, records)))
    (folder / 'tale.txt').write_text(' '.join(CONTEXTS))
    return folder


def make_pretrained(seed):
    config = DecoderConfig(
        vocab_size=257,
        hidden_size=8,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=8,
        attention=('full',),
    )
    return Pretrained(Decoder(config, rngs=nnx.Rngs(seed)), ByteTokenizer(), 64)


@pytest.fixture(scope='module')
def pretrained():
    return make_pretrained(0)


class Evaluations:
    """The tasks that are evaluated, in order; with a limit it interrupts the next one."""

    def __init__(self):
        self.names = []
        self.limit = None

    def count(self, evaluate):
        def counting(task, *args, **options):
            if len(self.names) == self.limit:
                raise KeyboardInterrupt
            self.names.append(task.name)
            return evaluate(task, *args, **options)

        return counting


@pytest.fixture
def evaluations(monkeypatch):
    counted = Evaluations()
    monkeypatch.setattr(NamedTask, 'evaluate', counted.count(NamedTask.evaluate))
    return counted


def run(sweep, folder, pretrained, workdir):
    run_sweep(sweep, load_tasks(sweep, str(folder), workdir), pretrained, workdir)
    return read_figures(sweep, workdir)


def assert_same(figures, expected):
    """Cells are the same but for times, and for what busy threads do to a sum."""
    cells = [
        [{k: v for k, v in cell.items() if k != 'seconds'} for cell in x['cells']]
        for x in (figures, expected)
    ]
    assert jax.tree.structure(cells[0]) == jax.tree.structure(cells[1])
    for one, other in zip(*map(jax.tree.leaves, cells), strict=True):
        assert one == (pytest.approx(other, rel=1e-3) if isinstance(other, float) else other)


@pytest.fixture(scope='module')
def undisturbed(folder, pretrained, tmp_path_factory):
    return run(SWEEP, folder, pretrained, tmp_path_factory.mktemp('undisturbed'))


def test_full_attention_is_scored_once_and_permutations_by_draw(undisturbed):
    places = [
        (x['task'], x['pattern'], x['effective_window'], x['draw']) for x in undisturbed['cells']
    ]
    of_task = [
        ('full', None, 0),
        *((pattern, 4, draw) for pattern, draw in (('swa', 0), ('sa', 0), ('sa', 1), ('moba', 0))),
    ]
    assert places == [(task, *place) for task in ('cloze', 'tale') for place in of_task]
    cells = dict(zip(places, undisturbed['cells'], strict=True))
    assert undisturbed['missing'] == 0
    assert undisturbed['model']['dtype'] == 'float32'
    assert cells['cloze', 'full', None, 0]['num_items'] == 40
    assert cells['tale', 'full', None, 0]['num_items'] == 5
    options = cells['cloze', 'moba', 4, 0]['attention_options']
    assert options['moba'].items() >= {'block_size': 2, 'top_k': 2}.items()

    def perplexity(*place):
        return cells[place]['metrics']['perplexity']['value']

    values = {perplexity('tale', *place) for place in of_task}
    assert len(values) == len(of_task)


def test_a_killed_sweep_continues(undisturbed, folder, pretrained, tmp_path, evaluations):
    evaluations.limit = 4
    with pytest.raises(KeyboardInterrupt):
        run(SWEEP, folder, pretrained, tmp_path)
    partial = read_figures(SWEEP, tmp_path)
    assert (len(partial['cells']), partial['missing']) == (4, 6)
    # What a kill during a write leaves.
    (tmp_path / 'cells' / 'cloze-moba-4-draw0.json.tmp').write_text('{"task": "cl')
    evaluations.limit = None
    assert_same(run(SWEEP, folder, pretrained, tmp_path), undisturbed)
    assert len(evaluations.names) == 10
    run(SWEEP, folder, pretrained, tmp_path)
    assert len(evaluations.names) == 10


def test_a_sweep_may_grow(folder, pretrained, tmp_path, evaluations):
    small = dataclasses.replace(SWEEP, tasks=('tale',), patterns=('swa',), draws=1)
    run(small, folder, pretrained, tmp_path)
    grown = dataclasses.replace(
        small, tasks=('tale', 'choices'), patterns=('full', 'swa'), tokens_per_batch=64
    )
    figures = run(grown, folder, pretrained, tmp_path)
    assert evaluations.names == ['tale', 'tale', 'choices', 'choices']
    assert len(figures['cells']) == 4


def test_other_settings_are_refused_with_their_names(folder, pretrained, tmp_path):
    sweep = dataclasses.replace(SWEEP, tasks=('choices',), patterns=('full',))
    with pytest.raises(SweepError, match='no finished cell'):
        read_figures(sweep, tmp_path)
    run(sweep, folder, pretrained, tmp_path)
    other = dataclasses.replace(sweep, limit=3, num_sinks=2, full_layers=('-1:',))
    with pytest.raises(SweepError) as refused:
        run(other, folder, pretrained, tmp_path)
    for difference in ('limit: None -> 3', 'num_sinks: 0 -> 2', "full_layers: [] -> ['-1:']"):
        assert difference in str(refused.value)
    with pytest.raises(SweepError, match='limit: None -> 3'):
        read_figures(other, tmp_path)
    with pytest.raises(SweepError, match=r"model: '\w+' -> '\w+'"):
        run(sweep, folder, make_pretrained(1), tmp_path)
    changed = tmp_path / 'changed'
    changed.mkdir()
    (changed / 'choices.jsonl').write_text('\n'.join(map(json.dumps, CHOICES[1:] + CHOICES[:1])))
    with pytest.raises(SweepError, match=r"task: '\w+' -> '\w+'"):
        run(sweep, changed, pretrained, tmp_path)
    path = tmp_path / 'cells' / 'choices-full-draw0.json'
    path.write_text(path.read_text()[:50])
    with pytest.raises(SweepError, match=r'choices-full-draw0\.json is damaged'):
        run(sweep, folder, pretrained, tmp_path)


def test_files_hold_no_texts_and_no_single_outcomes(folder, pretrained, tmp_path):
    sweep = dataclasses.replace(SWEEP, patterns=('sa',), effective_windows=(4,), draws=1)
    figures = run(sweep, folder, pretrained, tmp_path)
    written = ''.join(path.read_text() for path in (tmp_path / 'cells').iterdir())
    assert not [word for word in (*ANIMALS, 'came', 'them') if word in written]
    cloze, tale = figures['cells']
    assert [len(values) for values in cloze['groups'].values()] == [8, 8]
    mean = sum(cloze['groups']['acc']) / 8
    assert mean == pytest.approx(cloze['metrics']['acc']['value'])
    # Five windows are too few for groups.
    assert tale['groups'] == {}


def test_decoded_continuations_need_a_prompt(folder, tmp_path):
    with pytest.raises(ValueError, match='tale: in a text everything follows the first token'):
        load_tasks(dataclasses.replace(SWEEP, continuation='decode'), str(folder), tmp_path)


def test_decoded_continuations_differ(folder, pretrained, tmp_path):
    sweep = dataclasses.replace(
        SWEEP, patterns=('swa',), effective_windows=(4,), tasks=('cloze',), continuation='decode'
    )
    (decoded,) = run(sweep, folder, pretrained, tmp_path / 'decode')['cells']
    prefill = dataclasses.replace(sweep, continuation='prefill')
    (read,) = run(prefill, folder, pretrained, tmp_path / 'prefill')['cells']
    assert decoded['metrics']['perplexity'] != read['metrics']['perplexity']
    assert decoded['num_items'] == read['num_items']


def test_what_cannot_be_asked_is_found_before_the_first_cell(
    folder, pretrained, tmp_path, evaluations
):
    # The windows of the last task are longer than the model.
    sweep = dataclasses.replace(SWEEP, text_window=66)
    with pytest.raises(SweepError, match='choose a window of at most 65'):
        run(sweep, folder, pretrained, tmp_path)
    with pytest.raises(SweepError, match='layer'):
        run(dataclasses.replace(SWEEP, full_layers=('40',)), folder, pretrained, tmp_path)
    assert evaluations.names == []


def test_damaged_cells_are_named(folder, pretrained, tmp_path):
    sweep = dataclasses.replace(SWEEP, tasks=('choices',), patterns=('full',))
    (cell,) = run(sweep, folder, pretrained, tmp_path)['cells']
    assert cell['num_shots'] == 0
    for name in ('seconds', 'metrics', 'settings', 'task'):
        path = tmp_path / 'cells' / 'choices-full-draw0.json'
        path.write_text(json.dumps(cell | {name: None}))
        with pytest.raises(SweepError, match=r'is damaged .* delete it to score it anew'):
            run(sweep, folder, pretrained, tmp_path)


def test_a_model_is_told_by_what_it_reads_first(pretrained):
    # What cells of models without such a token were kept under.
    assert fingerprint(pretrained) == fingerprint(make_pretrained(0))
    tokenizer = ByteTokenizer()
    tokenizer.adds_bos = True
    assert fingerprint(pretrained._replace(tokenizer=tokenizer)) != fingerprint(pretrained)


def test_tasks_made_from_the_default_corpus(tmp_path):
    sweep = Sweep(tasks=('speeches_last_word', 'speeches_text'))
    tasks = load_tasks(sweep, training_free.SPEECHES, tmp_path)
    assert [task.is_text for task in tasks.values()] == [False, True]


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match='effective_window = 5 for moba'):
        dataclasses.replace(SWEEP, effective_windows=(5,))
    with pytest.raises(ValueError, match=r'effective_windows = \(8, 4\); expected ascending'):
        dataclasses.replace(SWEEP, effective_windows=(8, 4))
    with pytest.raises(ValueError, match="unknown pattern 'sb'"):
        dataclasses.replace(SWEEP, patterns=('sb',))
    with pytest.raises(ValueError, match=r'tasks = \(\); expected at least one'):
        dataclasses.replace(SWEEP, tasks=())
    with pytest.raises(ValueError, match='draws = 0; expected at least 1'):
        dataclasses.replace(SWEEP, draws=0)
    with pytest.raises(ValueError, match="continuation = 'both'"):
        dataclasses.replace(SWEEP, continuation='both')
    for name, least in (('num_sinks', 0), ('num_shots', 0), ('text_window', 2)):
        with pytest.raises(ValueError, match=f'{name} = {least - 1}; expected at least {least}'):
            dataclasses.replace(SWEEP, **{name: least - 1})


@pytest.mark.slow
def test_the_experiment(run_experiment, byte_model, folder, tmp_path):
    out = tmp_path / 'out'
    flags = [f'--model={byte_model}', f'--task_data={folder}', f'--workdir={out}']
    flags += ['--tasks=cloze', '--patterns=full,sa', '--dtype=float32', '--draws=2']
    done = run_experiment('training_free', *flags, '--effective_windows=4')
    assert done.returncode == 0, done.stderr
    assert '3 of 3: cloze, sa, w_eff 4, draw 1: acc' in done.stdout
    assert (out / 'training_free.md').read_text() in done.stdout
    assert (out / 'training_free.png').stat().st_size > 1000
    result = json.loads((out / 'result.json').read_text())
    assert result['config']['model'] == 'tiny'
    assert len(result['figures']['cells']) == 3

    more = [*flags, '--effective_windows=4,8']
    report = run_experiment(
        'training_free', *more, '--report_only', f'--beside={out / "result.json"}'
    )
    assert report.returncode == 0, report.stderr
    assert 'Unfinished: 2 cells are not measured.' in report.stdout
    other = run_experiment('training_free', *more, '--num_sinks=1')
    assert other.returncode == 1
    assert 'num_sinks: 0 -> 1' in other.stderr
    assert 'Traceback' not in other.stderr
    layers = run_experiment('training_free', *more, '--full_layers=40')
    assert (layers.returncode, 'Traceback' in layers.stderr) == (1, False)
    assert '40' in layers.stderr


def test_bad_flags_are_named_before_anything_is_loaded(run_experiment, tmp_path):
    flags = ['--model=none', f'--workdir={tmp_path}', '--tasks=cloze']
    found = run_experiment('training_free', *flags, '--effective_windows=4,a')
    assert '--effective_windows=4,a; expected whole numbers' in found.stdout + found.stderr
    beside = run_experiment('training_free', *flags, f'--beside={tmp_path / "absent.json"}')
    assert 'absent.json is no result.json of a sweep' in beside.stderr
    assert 'Traceback' not in beside.stderr
