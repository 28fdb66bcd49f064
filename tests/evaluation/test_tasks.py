"""Task files: their forms, metrics and errors; text made up here."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from sa_jax.evaluation import programs
from sa_jax.evaluation.completions import Completion
from sa_jax.evaluation.requests import rolling_requests
from sa_jax.evaluation.scoring import Score, Scorer
from sa_jax.evaluation.tasks import check, evaluate, load_task
from sa_jax.tokenization.tokenizers import ByteTokenizer

CLOZE = [
    {'context': f'The {animal} sat on the', 'continuation': place}
    for animal, place in (('cat', 'mat'), ('dog', 'log'), ('hen', 'pen'), ('fly', 'pie'))
]
CHOICES = [
    {'query': 'Question: What is red?\n', 'choices': ['a very blue sky', 'blood'], 'gold': 1},
    {'query': 'A text that goes', 'choices': ['on', 'off'], 'gold': 0, 'source': 'none'},
    {'query': 'Question: Is it?\nAnswer:', 'choices': ['yes', 'no'], 'gold': 1},
]
OPTIONS = [{'context_options': ['Ann asked Bob, so Ann', 'Ann asked Bob, so Bob'],
            'continuation': 'answered.', 'gold': 1}]  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write(records, name='some.jsonl'):
        path = tmp_path / name
        path.write_text(
            records if isinstance(records, str) else '\n'.join(map(json.dumps, records))
        )
        return path

    return write


class FixedScorer:
    """Gives each continuation the log probability that is written down for it."""

    def __init__(self, log_probabilities, greedy=(), max_length=10_000):
        self.max_length = max_length
        self._log_probabilities, self._greedy = log_probabilities, greedy

    def score(self, requests, *, progress):
        texts = [(bytes(r.context).decode(), bytes(r.continuation).decode()) for r in requests]
        return [
            Score(
                self._log_probabilities[text if text in self._log_probabilities else pair],
                text in self._greedy,
                len(text),
                len(''.join(pair)) - 1,
                2 if text == ' mat' else 0,
            )
            for pair in texts
            for text in pair[1:]
        ]


def run(task, scorer, **options):
    return evaluate(task, scorer, ByteTokenizer(), progress=False, **options)


def test_continuations(write):
    task = load_task(write(CLOZE))
    assert task.name == 'some'
    assert task.items[0].requests == (('The cat sat on the', ' mat'),)
    losses = np.array([1.0, 2.0, 3.0, 5.0])
    scorer = FixedScorer(
        dict(zip((' mat', ' log', ' pen', ' pie'), -losses, strict=True)), greedy=(' mat',)
    )
    result = run(task, scorer, effective_windows=(20, 21, 22))
    assert result.metrics['acc'].value == 0.25
    assert result.metrics['acc'].stderr == pytest.approx(math.sqrt(0.25 * 0.75 / 3))
    perplexity = math.exp(losses.mean())
    assert result.metrics['perplexity'].value == pytest.approx(perplexity)
    assert result.metrics['perplexity'].stderr == pytest.approx(perplexity * losses.std(ddof=1) / 2)
    assert result.per_item['acc'].tolist() == [1, 0, 0, 0]
    # Without the last byte, which isn't read.
    assert result.mean_tokens == len('The cat sat on the ma')
    assert result.share_longer == {20: 1.0, 21: 0.0, 22: 0.0}
    assert (result.num_items, result.num_truncated, result.num_dropped) == (4, 1, 2)
    aggregates = json.loads(json.dumps(result.aggregates()))
    assert aggregates['metrics']['acc']['value'] == 0.25
    assert 'per_item' not in aggregates


def test_choices(write):
    task = load_task(write(CHOICES))
    prompts = [{context for context, _ in item.requests} for item in task.items]
    assert prompts == [
        {'Question: What is red?\nAnswer:'},
        {'A text that goes'},
        {'Question: Is it?\nAnswer:'},
    ]
    assert task.items[0].requests[0][1] == ' a very blue sky'
    # Per character, the first question's longer choice is the likelier one.
    scorer = FixedScorer(
        {' a very blue sky': -6, ' blood': -5, ' on': -1, ' off': -2, ' yes': -1, ' no': -3}
    )
    result = run(task, scorer)
    assert result.per_item['acc'].tolist() == [1, 1, 0]
    assert result.per_item['acc_norm'].tolist() == [0, 1, 0]
    assert set(result.metrics) == {'acc', 'acc_norm'}


def test_context_options(write):
    task = load_task(write(OPTIONS))
    ann, bob = OPTIONS[0]['context_options']
    assert task.items[0].requests == ((ann, ' answered.'), (bob, ' answered.'))
    result = run(task, FixedScorer({(ann, ' answered.'): -1, (bob, ' answered.'): -2}))
    assert result.metrics == {'acc': (0.0, None)}
    result = run(task, FixedScorer({(ann, ' answered.'): -3, (bob, ' answered.'): -2}))
    assert result.metrics['acc'].value == 1.0


def test_shots_come_from_the_end(write):
    path = write(CLOZE)
    shots = 'The hen sat on the pen\n\nThe fly sat on the pie\n\n'
    task = load_task(path, num_shots=2)
    assert [item.requests[0] for item in task.items] == [
        (f'{shots}The cat sat on the', ' mat'),
        (f'{shots}The dog sat on the', ' log'),
    ]
    limited = load_task(path, num_shots=2, limit=1)
    assert list(limited.items) == list(task.items)[:1]
    assert len(load_task(path, limit=9).items) == 4
    options = load_task(write(OPTIONS * 2), num_shots=1)
    assert options.items[0].requests[0][0] == (
        'Ann asked Bob, so Bob answered.\n\nAnn asked Bob, so Ann'
    )
    choices = load_task(write(CHOICES), num_shots=1)
    assert choices.items[1].requests[0][0] == 'Question: Is it?\nAnswer: no\n\nA text that goes'
    with pytest.raises(ValueError, match='has 3 items, which leaves none beside num_shots = 3'):
        load_task(path, num_shots=3)


def test_perplexity_of_a_text(write, make_model):
    tokenizer = ByteTokenizer()
    text = ''.join(chr(97 + i) for i in np.random.default_rng(0).integers(0, 26, 50))
    path = write(text, 'prose.txt')
    scorer = Scorer(make_model('stochastic'), max_length=32)
    result = run(load_task(path, window=16), scorer, effective_windows=(8,))
    losses = []
    for start in (0, 16, 32):
        first, *rest = tokenizer.encode(text[start : start + 16])
        (score,) = scorer.score(rolling_requests(rest, prefix=first, max_length=32))
        losses.append(-score.log_probability / 15)
    assert result.metrics['perplexity'].value == pytest.approx(math.exp(np.mean(losses)))
    assert result.per_item['perplexity'] == pytest.approx(losses)
    assert (result.num_items, result.mean_tokens, result.share_longer) == (3, 15, {8: 1.0})
    first_only = run(load_task(path, window=16, limit=1), scorer)
    assert first_only.metrics['perplexity'] == (pytest.approx(math.exp(losses[0])), None)
    with pytest.raises(ValueError, match='has 50 tokens, less than one window of 99'):
        run(load_task(path, window=99), Scorer(make_model(), max_length=98))
    with pytest.raises(ValueError, match='choose a window of at most 33'):
        run(load_task(path, window=34), scorer)
    with pytest.raises(ValueError, match='no items for num_shots = 1'):
        load_task(path, num_shots=1)


def test_texts_begin_with_a_token_if_the_tokenizer_says_so(write, with_bos):
    seen = []

    class Recorder(FixedScorer):
        def score(self, requests, *, progress):
            seen.extend(requests)
            return [Score(-1.0, True, 1, 1, 0)] * len(requests)

    item = load_task(write([{'context': 'a', 'continuation': 'b'}]))
    text = load_task(write('abcd', 'prose.txt'), window=2)
    for task in (item, text):
        evaluate(task, Recorder({}), with_bos, progress=False)
        run(task, Recorder({}))
    assert seen[:2] == [([256, 97], [32, 98]), ([97], [32, 98])]
    assert seen[2:] == [([256, 97], [98]), ([256, 99], [100]), ([97], [98]), ([99], [100])]


def test_what_a_model_cannot_be_asked_is_found_at_once(write, with_bos):
    bytes_only = ByteTokenizer()
    text = load_task(write('a' * 50, 'prose.txt'), window=34)
    check(text, bytes_only, 33)
    with pytest.raises(ValueError, match='choose a window of at most 33'):
        check(text, with_bos, 33)
    with pytest.raises(ValueError, match='has 50 tokens, less than one window of 99'):
        check(load_task(write('a' * 50, 'prose.txt'), window=99), bytes_only, 200)
    check(load_task(write(CLOZE)), bytes_only, 8)
    merging = ByteTokenizer()
    merging.encode = lambda text: [97]
    with pytest.raises(ValueError, match="' mat' has no token of its own"):
        check(load_task(write(CLOZE)), merging, 8)
    programs_task = load_task(write(PROGRAMS))
    check(programs_task, bytes_only, 2048)
    with pytest.raises(
        ValueError, match='programs of up to 1024 tokens, but the model reads at most'
    ):
        check(programs_task, bytes_only, 1024)


@pytest.mark.parametrize(
    ('lines', 'message'),
    [
        ('{"context": "a", "continuation": "b"}\n\n{"context": "a"', r':3: expected a JSON object'),
        ('[1]', r':1: expected a JSON object, got \[1\]'),
        (
            '{"context": "a", "continuation": "b"}\n{"context": "a"}',
            ":2: 'continuation' is missing",
        ),
        ('{"question": "a", "answer": "b"}', ':1: no form has the fields question, answer'),
        ('{"context": "a", "continuation": 5}', ":1: 'continuation' is 5; expected text"),
        ('{"context": "a", "continuation": " "}', "'continuation' is ' '; expected text"),
        ('{"query": "a", "choices": ["b"], "gold": 0}', 'expected a list of at least two texts'),
        ('{"query": "a", "choices": ["b", "c"], "gold": true}', 'expected an index'),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "'gold' is 2; .* one of 2 options"),
        ('', 'has no lines'),
    ],
)
def test_damaged_lines_are_named(write, lines, message):
    with pytest.raises(ValueError, match=f'some.jsonl.*{message}'):
        load_task(write(lines))


def test_bad_files_and_numbers(write, tmp_path):
    for path in (tmp_path / 'absent.jsonl', write('a', 'some.csv'), tmp_path):
        with pytest.raises(ValueError, match=r'expected a file NAME.jsonl or NAME.txt'):
            load_task(path)
    for numbers in ({'limit': 0}, {'num_shots': -1}, {'window': 1}):
        with pytest.raises(ValueError, match=f'{next(iter(numbers))} must be at least'):
            load_task(write(CLOZE), **numbers)


PROGRAMS = [
    {
        'task_id': f'Made/{name}',
        'prompt': f'def {name}(x):\n    """Returns {name} x."""\n',
        'entry_point': name,
        'test': f'def check(candidate):\n    assert candidate(3) == {value}',
        'canonical_solution': '',
    }
    for name, value in (('twice', 6), ('thrice', 9))
]


def test_programs_are_completed_and_run(write, monkeypatch, make_model):
    asked = []

    def complete(scorer, tokenizer, prompts, **options):
        asked.append(options)
        return [Completion('    return 2 * x\n', len(prompt), 0) for prompt in prompts]

    monkeypatch.setattr(programs, 'complete', complete)
    task = load_task(write(PROGRAMS))
    scorer = Scorer(make_model(), max_length=32)
    result = run(task, scorer, confirm_run_unsafe_code=True, effective_windows=(30, 1000))
    assert result.per_item['pass@1'].tolist() == [1, 0]
    assert result.share_longer == {30: 1.0, 1000: 0.0}
    assert asked[0]['max_new_tokens'] == 1024
    assert '\ndef' in asked[0]['stop']
    assert len(load_task(write(PROGRAMS), limit=1).problems) == 1
    with pytest.raises(ValueError, match='confirm_run_unsafe_code'):
        run(task, scorer)
    assert len(asked) == 1
    with pytest.raises(ValueError, match=r"some.jsonl:2: 'test' is None; expected"):
        load_task(write([PROGRAMS[0], PROGRAMS[1] | {'test': None}]))


def test_humaneval_comes_from_the_hub(monkeypatch):
    def load_dataset(name, split):
        assert (name, split) == ('openai/openai_humaneval', 'test')
        return PROGRAMS

    monkeypatch.setitem(sys.modules, 'datasets', SimpleNamespace(load_dataset=load_dataset))
    task = programs.load_humaneval(limit=1)
    assert task.name == 'humaneval'
    assert [problem.entry_point for problem in task.problems] == ['twice']
