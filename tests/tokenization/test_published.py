"""Bytes, and tokenizers in files of every format: round trips, bytes per token, special tokens."""

import io
import json
import sys

import numpy as np
import pytest
import tokenizers as huggingface

from sa_jax.tokenization.published import load_published
from sa_jax.tokenization.tokenizers import ByteTokenizer

SAMPLES = [
    '',
    'Plain words, 1234 numbers.',
    ' leading and trailing  \n\n\tspaces ',
    'Grüße, Ελληνικά, 日本語, 🙂👩‍👩‍👧, combining e\u0301',
    'the text <|endoftext|> is no separator',
]


@pytest.fixture(scope='module')
def texts():
    words = ['stochastic', 'attention', 'permutes', 'the', 'tokens', 'Grüße', '日本語']
    rng = np.random.default_rng(0)
    return [' '.join(rng.choice(words, 200)) for _ in range(20)]


@pytest.fixture
def trained(texts):
    """A byte-level BPE of the library `tokenizers`."""
    tokenizer = huggingface.Tokenizer(huggingface.models.BPE())
    tokenizer.pre_tokenizer = huggingface.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = huggingface.decoders.ByteLevel()
    trainer = huggingface.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=['<|endoftext|>'],
        initial_alphabet=sorted(huggingface.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def check(tokenizer, samples=SAMPLES):
    for text in samples:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(np.asarray(ids)) == text
        assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes[[tokenizer.bos_id, tokenizer.eos_id]].tolist() == [0, 0]


def test_bytes():
    tokenizer = ByteTokenizer()
    check(tokenizer)
    assert tokenizer.vocab_size == 257
    assert tokenizer.decode([0xE6, 0x97]) == '\ufffd'


def test_tokenizer_json(trained, tmp_path):
    # Neither truncation, nor padding, nor a prefix token of the file may leak into the ids.
    trained.enable_truncation(4)
    trained.enable_padding(length=8)
    trained.add_tokens([huggingface.AddedToken('<tool>', special=False)])
    path = tmp_path / 'tokenizer.json'
    trained.save(str(path))
    loaded = load_published(path)
    check(loaded, [*SAMPLES, 'an added <tool> is text'])
    assert loaded.vocab_size == 301
    assert load_published(tmp_path).fingerprint == loaded.fingerprint

    (tmp_path / 'tokenizer_config.json').write_text(
        json.dumps({'bos_token': None, 'eos_token': {'content': '<tool>'}})
    )
    configured = load_published(path)
    assert (configured.bos_id, configured.eos_id) == (300, 300)
    assert configured.fingerprint != loaded.fingerprint
    assert load_published(path, separator='<|endoftext|>').eos_id == loaded.eos_id
    with pytest.raises(ValueError, match="has no token '<none>'"):
        load_published(path, separator='<none>')


def test_whether_texts_begin_with_a_token_is_what_the_files_say(trained, tmp_path):
    folder, beside = tmp_path, tmp_path / 'tokenizer_config.json'

    def adds_bos(**settings):
        beside.write_text(json.dumps({'eos_token': '<|endoftext|>'} | settings))
        return load_published(folder).adds_bos

    trained.save(str(tmp_path / 'tokenizer.json'))
    assert not load_published(folder).adds_bos
    assert adds_bos(add_bos_token=True, bos_token='<|endoftext|>')
    assert not adds_bos(add_bos_token=True)
    trained.post_processor = huggingface.processors.TemplateProcessing(
        single='<|endoftext|> $A', special_tokens=[('<|endoftext|>', 0)]
    )
    trained.save(str(tmp_path / 'tokenizer.json'))
    assert adds_bos()
    assert not adds_bos(add_bos_token=False)
    assert load_published(folder).encode('attention') == trained.encode('attention').ids[1:]
    with pytest.raises(ValueError, match=r"tokenizer_config.json has add_bos_token = 'yes'"):
        adds_bos(add_bos_token='yes')
    beside.write_text('{"eos_token"')
    with pytest.raises(ValueError, match=r'tokenizer_config.json is no JSON'):
        load_published(folder)
    beside.write_text('[]')
    with pytest.raises(ValueError, match=r'tokenizer_config.json holds list'):
        load_published(folder)


def test_fingerprints_are_the_files(trained, tmp_path):
    # Checkpoints keep them: the same file has to give the same one for ever.
    model = {'type': 'BPE', 'vocab': {'a': 0, '</s>': 1}, 'merges': []}
    (tmp_path / 'tokenizer.json').write_text(json.dumps({'version': '1.0', 'model': model}))
    assert load_published(tmp_path).fingerprint == '50bfd2306a4e73a7-1-1'
    (tmp_path / 'tokenizer.json').unlink()
    (tmp_path / 'vocab.json').write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    (tmp_path / 'merges.txt').write_text('#version: 0.2\na b\n')
    assert load_published(tmp_path).fingerprint == '649ff683010b41b7-3-3'


def test_gpt2_files(trained, texts, tmp_path):
    trained.model.save(str(tmp_path))  # vocab.json and merges.txt
    for path in (tmp_path, tmp_path / 'vocab.json', tmp_path / 'merges.txt'):
        tokenizer = load_published(path)
        check(tokenizer)
        assert tokenizer.vocab_size == 300
    assert tokenizer.encode(texts[0]) == trained.encode(texts[0]).ids
    (tmp_path / 'merges.txt').unlink()
    with pytest.raises(ValueError, match=r'lacks merges.txt'):
        load_published(tmp_path / 'vocab.json')


def test_sentencepiece(texts, tmp_path):
    sentencepiece = pytest.importorskip('sentencepiece')

    def train(name, **options):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=310,
            model_type='bpe',
            byte_fallback=True,
            normalization_rule_name='identity',
            minloglevel=2,
            **options,
        )
        (tmp_path / name).write_bytes(model.getvalue())
        return load_published(tmp_path / name)

    tokenizer = train('tokenizer.model')
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    text = 'stochastic Grüße, 🙂'
    ids = tokenizer.encode(text)
    assert tokenizer.decode([1, *ids, 2]) == text
    # The model puts a space before the text.
    assert tokenizer.token_bytes[ids].sum() == len(text.encode()) + 1
    assert load_published(tmp_path).fingerprint == tokenizer.fingerprint
    assert tokenizer.adds_bos

    no_bos = train('other.model', bos_id=-1)
    assert no_bos.bos_id == no_bos.eos_id
    assert not no_bos.adds_bos
    with pytest.raises(ValueError, match=r'set data.tokenizer.separator'):
        train('none.model', eos_id=-1)


def test_sentencepiece_is_optional(tmp_path, monkeypatch):
    (tmp_path / 'tokenizer.model').write_text('a')
    monkeypatch.setitem(sys.modules, 'sentencepiece', None)
    with pytest.raises(ImportError, match=r"needs the package sentencepiece: .*sa_jax\[corpora\]'"):
        load_published(tmp_path)


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('tokenizer.txt', 'a', 'unknown tokenizer format; expected a tokenizer.json'),
        ('tokenizer.json', '{"a": 1}', 'is no tokenizer .* or is damaged'),
        ('tokenizer.model', 'a', 'is no SentencePiece model, or is damaged'),
        ('vocab.json', '{"a": 0}', 'lacks merges.txt'),
        ('config.yaml', 'a', None),
    ],
)
def test_errors_of_files(tmp_path, name, content, message):
    pytest.importorskip('sentencepiece')
    (tmp_path / name).write_text(content)
    if message:
        with pytest.raises(ValueError, match=message):
            load_published(tmp_path / name)
    else:
        with pytest.raises(ValueError, match=r'holds none of tokenizer.json'):
            load_published(tmp_path)
    with pytest.raises(ValueError, match='does not exist'):
        load_published(tmp_path / 'nothing.json')
