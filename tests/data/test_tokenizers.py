"""Tokenizers: round trips, bytes per token, caching, files of every format."""

import io
import json

import ml_collections
import numpy as np
import pytest
import tokenizers as huggingface

from sa_jax.data import tokenizers

SAMPLES = [
    '',
    'Plain words, 1234 numbers.',
    ' leading and trailing  \n\n\tspaces ',
    'Grüße, Ελληνικά, 日本語, 🙂👩‍👩‍👧, combining e\u0301',
    'the text <|endoftext|> is no separator',
]


@pytest.fixture(scope='module')
def corpus(make_corpus):
    words = ['stochastic', 'attention', 'permutes', 'the', 'tokens', 'Grüße', '日本語']
    rng = np.random.default_rng(0)
    return make_corpus([' '.join(rng.choice(words, 200)) for _ in range(20)])


@pytest.fixture
def load(corpus, tmp_path):
    def load(**config):
        return tokenizers.load_tokenizer(ml_collections.ConfigDict(config), corpus, tmp_path)

    return load


def check(tokenizer, samples=SAMPLES):
    for text in samples:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(np.asarray(ids)) == text
        assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes[[tokenizer.bos_id, tokenizer.eos_id]].tolist() == [0, 0]


def test_bytes(load):
    tokenizer = load(kind='bytes')
    check(tokenizer)
    assert tokenizer.vocab_size == 257
    assert tokenizer.decode([0xE6, 0x97]) == '\ufffd'


def test_trained_bpe(load, tmp_path):
    tokenizer = load(kind='bpe', vocab_size=300)
    check(tokenizer)
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode(' attention')) < len(' attention')
    (cached,) = tmp_path.iterdir()
    assert load(kind='bpe', vocab_size=300).fingerprint == tokenizer.fingerprint
    # Training again gives the same, another size another one.
    cached.unlink()
    assert load(kind='bpe', vocab_size=300).fingerprint == tokenizer.fingerprint
    assert load(kind='bpe', vocab_size=301).fingerprint != tokenizer.fingerprint
    cached.write_text(cached.read_text()[:-100])
    with pytest.raises(ValueError, match=f'{cached} is damaged. Delete it'):
        load(kind='bpe', vocab_size=300)


def test_bpe_sees_the_training_split_only(make_corpus, tmp_path):
    corpus = make_corpus(['abc ' * 50], validation=['xyz ' * 50])
    tokenizer = tokenizers.load_tokenizer({'kind': 'bpe', 'vocab_size': 260}, corpus, tmp_path)
    assert len(tokenizer.encode('abc')) < 3
    assert len(tokenizer.encode('xyz')) == 3


def test_bpe_reads_a_spread_sample_of_a_large_corpus(make_corpus, monkeypatch):
    corpus = make_corpus([f'{i:010d}' for i in range(100)])
    monkeypatch.setattr(tokenizers, '_TRAINING_BYTES', 250)
    texts = list(tokenizers._training_texts(corpus))
    assert texts == [f'{i:010d}' for i in range(0, 100, 4)]


def test_tokenizer_json(load, tmp_path, corpus):
    tokenizer = tokenizers._train_bpe(corpus, 300)
    # Neither truncation, nor padding, nor a prefix token of the file may leak into the ids.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.add_tokens([huggingface.AddedToken('<tool>', special=False)])
    path = tmp_path / 'tokenizer.json'
    tokenizer.save(str(path))
    loaded = load(kind='file', path=str(path))
    check(loaded, [*SAMPLES, 'an added <tool> is text'])
    assert loaded.vocab_size == 301
    assert load(kind='file', path=str(tmp_path)).fingerprint == loaded.fingerprint

    (tmp_path / 'tokenizer_config.json').write_text(
        json.dumps({'bos_token': None, 'eos_token': {'content': '<tool>'}})
    )
    configured = load(kind='file', path=str(path))
    assert (configured.bos_id, configured.eos_id) == (300, 300)
    assert configured.fingerprint != loaded.fingerprint
    assert load(kind='file', path=str(path), separator='<|endoftext|>').eos_id == loaded.eos_id
    with pytest.raises(ValueError, match="has no token '<none>'"):
        load(kind='file', path=str(path), separator='<none>')


def test_gpt2_files(load, tmp_path, corpus):
    reference = tokenizers._train_bpe(corpus, 300)
    reference.model.save(str(tmp_path))  # vocab.json and merges.txt
    for path in (tmp_path, tmp_path / 'vocab.json', tmp_path / 'merges.txt'):
        tokenizer = load(kind='file', path=str(path))
        check(tokenizer)
        assert tokenizer.vocab_size == 300
    text = corpus.documents('train')[0]['text']
    assert tokenizer.encode(text) == reference.encode(text).ids
    (tmp_path / 'merges.txt').unlink()
    with pytest.raises(ValueError, match=r'lacks merges.txt'):
        load(kind='file', path=str(tmp_path / 'vocab.json'))


def test_sentencepiece(load, tmp_path, corpus):
    sentencepiece = pytest.importorskip('sentencepiece')

    def train(name, **options):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(document['text'] for document in corpus.documents('train')),
            model_writer=model,
            vocab_size=310,
            model_type='bpe',
            byte_fallback=True,
            normalization_rule_name='identity',
            minloglevel=2,
            **options,
        )
        (tmp_path / name).write_bytes(model.getvalue())
        return load(kind='file', path=str(tmp_path / name))

    tokenizer = train('tokenizer.model')
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    text = 'stochastic Grüße, 🙂'
    ids = tokenizer.encode(text)
    assert tokenizer.decode([1, *ids, 2]) == text
    # The model puts a space before the text.
    assert tokenizer.token_bytes[ids].sum() == len(text.encode()) + 1
    assert load(kind='file', path=str(tmp_path)).fingerprint == tokenizer.fingerprint

    no_bos = train('other.model', bos_id=-1)
    assert no_bos.bos_id == no_bos.eos_id
    with pytest.raises(ValueError, match=r'set data.tokenizer.separator'):
        train('none.model', eos_id=-1)


def test_check_vocabulary(load):
    tokenizers.check_vocabulary(load(kind='bytes'), 257)
    with pytest.raises(ValueError, match=r'has 257 tokens.*model.vocab_size=256.*at least 257'):
        tokenizers.check_vocabulary(load(kind='bytes'), 256)


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
def test_errors_of_files(load, tmp_path, name, content, message):
    pytest.importorskip('sentencepiece')
    (tmp_path / name).write_text(content)
    if message:
        with pytest.raises(ValueError, match=message):
            load(kind='file', path=str(tmp_path / name))
    else:
        with pytest.raises(ValueError, match=r'holds none of tokenizer.json'):
            load(kind='file', path=str(tmp_path))


def test_errors_of_configuration(load, tmp_path):
    with pytest.raises(ValueError, match=r"data.tokenizer.kind='byte'.*Did you mean 'bytes'"):
        load(kind='byte')
    with pytest.raises(ValueError, match=r'needs data.tokenizer.path'):
        load(kind='file')
    with pytest.raises(ValueError, match='does not exist'):
        load(kind='file', path=str(tmp_path / 'nothing.json'))
    for vocab_size in (None, 256):
        with pytest.raises(ValueError, match=r'vocab_size=.* needs a number >= 257'):
            load(kind='bpe', vocab_size=vocab_size)
