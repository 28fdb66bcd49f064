"""The adapter inside lm-evaluation-harness, on local tasks made up here."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from sa_jax.evaluation.completions import complete
from sa_jax.evaluation.requests import rolling_requests
from sa_jax.evaluation.scoring import Scorer
from sa_jax.tokenization.tokenizers import ByteTokenizer

pytest.importorskip('lm_eval')

from sa_jax.evaluation.harness import (
    HarnessLM,
    LoadedTasks,
    Truncation,
    evaluate_tasks,
    load_tasks,
)

WORDS = ['ash', 'bay', 'cod', 'dew', 'elm', 'fig', 'gum', 'hay', 'ivy', 'jam', 'kid', 'log']
CLOZE = [{'context': f'{WORDS[i]} {WORDS[-i]} and', 'continuation': WORDS[i - 5]} for i in range(8)]
CHOICES = [
    {
        'query': f'Question: Where is {WORDS[i]}?',
        'choices': [WORDS[i + 1], f'{WORDS[i]} {WORDS[i + 2]}', 'é'],
        'gold': i % 3,
    }
    for i in range(8)
]
OPTIONS = [
    {
        'context_options': [f'{WORDS[i]} or {word} is' for word in WORDS[i : i + 2]],
        'continuation': WORDS[i + 2],
        'gold': i % 2,
    }
    for i in range(8)
]
TEXTS = [{'text': ' '.join(WORDS[i:])} for i in range(4)]
ITEMS = {
    'cloze': CLOZE, 'choices': CHOICES, 'options': OPTIONS, 'texts': TEXTS, 'answers': CHOICES
}  # fmt: skip
# Those that local files can hold as well, and their metrics.
LOCAL = {'cloze': ('acc', 'perplexity'), 'choices': ('acc', 'acc_norm'), 'options': ('acc',)}

YAML = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/{name}.jsonl
    shots: {folder}/{name}_shots.json
  cache_dir: {folder}/cache
test_split: test
"""
FORMS = {
    'cloze': """
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: " {{continuation}}"
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: perplexity
""",
    'choices': """
output_type: multiple_choice
doc_to_text: "{{query}}\\nAnswer:"
doc_to_target: gold
doc_to_choice: choices
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    'options': """
output_type: multiple_choice
doc_to_text: gold
doc_to_target: continuation
doc_to_choice: context_options
metric_list:
  - metric: acc
""",
    'texts': """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
""",
    'answers': """
output_type: generate_until
doc_to_text: "{{query}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["a"]
  max_gen_toks: 4
metric_list:
  - metric: exact_match
""",
}

SHOTS = """
fewshot_split: shots
num_fewshot: 2
fewshot_config:
  sampler: first_n
"""

# Everything in a process of its own, as other tests import torch.
SCRIPT = """
import json, pathlib, sys
from flax import nnx
from sa_jax.evaluation.harness import HarnessLM, evaluate_tasks, load_tasks
from sa_jax.evaluation.scoring import Scorer
from sa_jax.evaluation.tasks import evaluate, load_task
from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder
from sa_jax.tokenization.tokenizers import ByteTokenizer

config = DecoderConfig(
    vocab_size=260, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    intermediate_size=16, attention=('stochastic',),
    attention_options={'stochastic': {'window': 9}},
)
model = Decoder(config, rngs=nnx.Rngs(0))
model.embedding[...] *= 8
folder, tokenizer = pathlib.Path(sys.argv[1]), ByteTokenizer()
scorers = [Scorer(model, max_length=96, draw=draw) for draw in range(2)]
lms = [HarnessLM(scorer, tokenizer, progress=False) for scorer in scorers]
ours = {}
for name in sys.argv[3].split():
    for num_shots, ending in ((0, ''), (2, '_with_shots')):
        task = load_task(folder / f'{name}.jsonl', limit=6, num_shots=num_shots)
        ours[name + ending] = [
            evaluate(task, scorer, tokenizer, progress=False) for scorer in scorers
        ]
loaded = load_tasks(sys.argv[2].split(), task_folder=folder)
found = evaluate_tasks(lms, loaded, limit=6)
# Tasks may be asked again, also those whose examples are drawn.
drawn = load_tasks(['cloze', 'options'], num_shots=3, task_folder=folder)
again = [evaluate_tasks(lms[:1], drawn, limit=6) for _ in range(2)]
print(json.dumps({
    'found': found,
    'ours': {name: [draw.aggregates() for draw in draws] for name, draws in ours.items()},
    'again': again,
    'num_shots': [loaded.num_shots, drawn.num_shots],
    'has_texts': [loaded.has_texts, drawn.has_texts],
    'imported': [name for name in ('torch', 'transformers') if name in sys.modules],
}))
"""


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tasks')
    forms = FORMS | {f'{name}_with_shots': FORMS[name] + SHOTS for name in LOCAL}
    for name, form in forms.items():
        items = ITEMS[name.split('_')[0]]
        (folder / f'{name}.yaml').write_text(YAML.format(name=name, folder=folder) + form)
        (folder / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, items)))
        (folder / f'{name}_shots.json').write_text('\n'.join(map(json.dumps, items[-2:])))
    result = subprocess.run(
        [sys.executable, '-c', SCRIPT, str(folder), ' '.join(forms), ' '.join(LOCAL)],
        capture_output=True,
        text=True,
        env=os.environ | {'HF_HUB_OFFLINE': '1'},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_neither_torch_nor_transformers_is_imported(results):
    assert results['imported'] == []


@pytest.mark.slow
def test_local_tasks_get_the_figures_of_the_harness(results):
    assert len(results['ours']) == 6
    for name in results['ours']:
        assert results['found'][name]['num_items'] == 6
        for metric in LOCAL[name.split('_')[0]]:
            theirs = results['found'][name]['metrics'][metric]
            ours = [draw['metrics'][metric] for draw in results['ours'][name]]
            assert theirs['values'] == pytest.approx([draw['value'] for draw in ours])
            assert theirs['mean'] == pytest.approx(np.mean(theirs['values']))
            assert theirs['std'] == pytest.approx(np.std(theirs['values'], ddof=1))
            # A bootstrap on their side for perplexity.
            tolerance = 0.2 if metric == 'perplexity' else 1e-6
            assert theirs['stderr'] == pytest.approx(ours[0]['stderr'], rel=tolerance)
    assert len(set(results['found']['cloze']['metrics']['perplexity']['values'])) == 2


@pytest.mark.slow
def test_texts_and_generation_run_inside_the_harness(results):
    bits = results['found']['texts']['metrics']['bits_per_byte']
    assert 4 < bits['mean'] < 40
    assert results['found']['texts']['num_items'] == 4
    assert results['found']['answers']['metrics']['exact_match']['mean'] == 0


@pytest.mark.slow
def test_tasks_may_be_asked_again(results):
    assert results['again'][0] == results['again'][1]
    plain, drawn = results['num_shots']
    assert drawn == {'cloze': 3, 'options': 3}
    assert {plain[name] for name in ITEMS} == {0}
    assert plain['cloze_with_shots'] == 2
    assert results['has_texts'] == [True, False]


def instance(*args):
    return SimpleNamespace(args=args)


@pytest.fixture(scope='module')
def scorer(make_model):
    return Scorer(make_model('stochastic'), max_length=32)


def test_pairs_are_encoded_as_the_harness_does(scorer, with_bos):
    lm = HarnessLM(scorer, ByteTokenizer(), progress=False)
    for pair in (('a b', ' c'), ('a ', 'b'), ('a \n', ' b'), ('é', 'è')):
        assert lm._encode_pair(*pair) == super(HarnessLM, lm)._encode_pair(*pair)
    lm_with_bos = HarnessLM(scorer, with_bos, progress=False)
    for pair in (('a b', ' c'), ('a ', 'b')):
        found = lm_with_bos._encode_pair(*pair)
        assert found == super(HarnessLM, lm_with_bos)._encode_pair(*pair)
    assert lm_with_bos._encode_pair('a', ' b') == ([256, 97], [32, 98])
    assert lm_with_bos.tok_encode('a') == [256, 97]
    assert lm_with_bos.tok_encode('a', add_special_tokens=False) == [97]
    assert (lm.eot_token_id, lm.prefix_token_id, lm.max_length) == (256, 256, 32)


def test_loglikelihoods(scorer):
    lm = HarnessLM(scorer, ByteTokenizer(), progress=False)
    pairs = [('', ' a'), ('b c', ' d'), ('x' * 40, ' y')]
    found = lm.loglikelihood([instance(*pair) for pair in pairs], disable_tqdm=True)
    requests = [([256], b' a'), (b'b c', b' d'), (b'x' * 31, b' y')]
    for (total, is_greedy), request in zip(found, requests, strict=True):
        (score,) = scorer.score([tuple(map(list, request))], progress=False)
        assert (total, is_greedy) == (pytest.approx(score.log_probability, abs=1e-4), False)
    # 42 bytes, of which 33 are kept: the last one isn't read.
    assert lm.truncation == Truncation(requests=1, tokens=9)
    assert lm.num_read == [2, 4, 32]


def test_whole_texts(scorer):
    lm = HarnessLM(scorer, ByteTokenizer(), progress=False)
    texts = ['ab', '', 'c' * 50]
    found = lm.loglikelihood_rolling([instance(text) for text in texts], disable_tqdm=True)
    for total, text in zip(found, texts, strict=True):
        windows = rolling_requests(list(text.encode()), prefix=256, max_length=32)
        scores = scorer.score(windows, progress=False)
        assert sum(score.num_scored for score in scores) == len(text)
        assert total == pytest.approx(sum(score.log_probability for score in scores), abs=1e-3)
    assert lm.truncation == Truncation(0, 0)
    decoder = Scorer(scorer.model, max_length=32, continuation='decode')
    with pytest.raises(
        ValueError, match=r"every pattern is full attention. Score it with 'prefill'"
    ):
        HarnessLM(decoder, ByteTokenizer()).loglikelihood_rolling([instance('ab')])


def test_generation(scorer):
    lm = HarnessLM(scorer, ByteTokenizer(), progress=False)
    prompts = ['once upon a', 'x' * 60, 'once upon a', 'twice']
    greedy = {'until': [], 'max_gen_toks': 6, 'do_sample': False, 'temperature': 0.7}
    texts = lm.generate_until([instance(prompt, greedy) for prompt in prompts], disable_tqdm=True)
    alone = complete(scorer, ByteTokenizer(), ['once upon a'], max_new_tokens=6, progress=False)
    assert texts[0] == texts[2] == alone[0].text
    assert lm.truncation == Truncation(requests=1, tokens=60 - 26)
    assert lm.num_read == [11, 26, 11, 5]
    # What stops a text isn't part of it.
    stop = texts[0][2]
    (stopped,) = lm.generate_until(
        [instance('once upon a', greedy | {'until': stop})], disable_tqdm=True
    )
    assert stopped == texts[0][: texts[0].index(stop)]
    drawn = {'max_new_tokens': 6, 'do_sample': True, 'top_p': 0.9}
    first, second = lm.generate_until([instance('once', drawn)] * 2, disable_tqdm=True)
    assert first != second
    for temperature, do_sample in ((0.0, True), (5.0, False)):
        options = {'max_gen_toks': 6, 'temperature': temperature, 'do_sample': do_sample}
        assert lm.generate_until([instance('once upon a', options)]) == texts[:1]


def test_completions_do_not_depend_on_the_batches(make_model, with_bos):
    model = make_model('stochastic', permutation_scope='example')
    prompts = ['once upon a time', 'twice', 'once upon a time', 'x' * 40]
    found = [
        complete(
            Scorer(model, max_length=32, tokens_per_batch=rows * 32),
            with_bos,
            prompts,
            max_new_tokens=8,
            temperature=temperature,
            progress=False,
        )
        for rows in (1, 4)
        for temperature in (0.0, 1.0)
    ]
    assert found[:2] == found[2:]
    assert [x.num_read for x in found[0]] == [17, 6, 17, 24]
    # The same prompt at another place has a permutation of its own.
    assert found[0][0] != found[0][2]


class GivenTask(SimpleNamespace):
    OUTPUT_TYPE = 'multiple_choice'

    def get_config(self, name):
        return getattr(self, name)

    def set_config(self, name, value):
        setattr(self, name, value)


@pytest.fixture
def give(monkeypatch):
    """Has the harness find given tasks."""

    def give(tasks, **more):
        manager = SimpleNamespace(load=lambda names: {'tasks': tasks, **more})
        monkeypatch.setattr('lm_eval.tasks.TaskManager', lambda **_: manager)

    return give


def test_tasks_that_run_programs_are_refused(give):
    give({'some_code': GivenTask(UNSAFE_CODE=True)})
    with pytest.raises(ValueError, match='some_code runs programs that the model writes'):
        load_tasks(['some_code'])


def test_tasks_without_solved_examples_say_so(give, caplog):
    numbers = {'none': 0, 'own': 5, 'unsaid': None}
    children = {'both': ['none', 'own'], 'one': ['own'], 'all': ['both', 'one']}

    def give_tasks():
        tasks = {name: GivenTask(num_fewshot=number) for name, number in numbers.items()}
        give(tasks, group_map=children)

    give_tasks()
    groups = {'both': None, 'one': 5, 'all': None}
    assert load_tasks(['all', 'unsaid']).num_shots == numbers | {'unsaid': 0} | groups
    assert 'no solved examples' not in caplog.text
    give_tasks()
    with caplog.at_level('WARNING'):
        found = load_tasks(['all', 'unsaid'], num_shots=3)
    assert found.num_shots == {'none': 0, 'own': 3, 'unsaid': 3} | groups | {'one': 3}
    assert 'none takes no solved examples, instead of 3.' in caplog.text


def test_tasks_that_cannot_be_loaded_are_named(monkeypatch):
    def load(names):
        raise ConnectionError('no route')

    manager = SimpleNamespace(load=load)
    monkeypatch.setattr('lm_eval.tasks.TaskManager', lambda **_: manager)
    with pytest.raises(ValueError, match=r'cannot load boolq: ConnectionError.*use local files'):
        load_tasks(['boolq'])


def test_the_environment_stays(monkeypatch):
    seen = []

    def evaluate(*args, **options):
        seen.append(os.environ['DISABLE_MULTIPROC'])
        return {'results': {}, 'n-samples': {}}

    monkeypatch.setattr('lm_eval.evaluator.evaluate', evaluate)
    for before in (None, '0'):
        monkeypatch.delenv('DISABLE_MULTIPROC', raising=False)
        if before is not None:
            monkeypatch.setenv('DISABLE_MULTIPROC', before)
        evaluate_tasks([None], LoadedTasks({'tasks': {}}, {}))
        assert os.environ.get('DISABLE_MULTIPROC') == before
    assert seen == ['1', '1']


def test_unknown_options_and_tasks_are_named(scorer):
    lm = HarnessLM(scorer, ByteTokenizer(), progress=False)
    with pytest.raises(ValueError, match='Unknown options of generation: num_beams, top_k'):
        lm.generate_until([instance('a', {'top_k': 3, 'num_beams': 2, 'until': ['b']})])
    with pytest.raises(ValueError, match='max_new_tokens must be from 1 to 31'):
        lm.generate_until([instance('a', {})])
    with pytest.raises(ValueError, match='No model is given'):
        evaluate_tasks([], LoadedTasks({'tasks': {}}, {}))
    with pytest.raises(ValueError, match='No task is given'):
        load_tasks([])
