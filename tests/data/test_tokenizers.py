"""Tokenizers by configuration: trained and cached, from files, bytes; the check of their size."""

import ml_collections
import numpy as np
import pytest

from sa_jax.data import tokenizers


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


def test_trained_bpe(load, tmp_path):
    tokenizer = load(kind='bpe', vocab_size=300)
    text = ' Plain words, Grüße 🙂  \n<|endoftext|>'
    ids = tokenizer.encode(text)
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
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


def test_published_file(load, tmp_path):
    load(kind='bpe', vocab_size=300)
    (trained,) = tmp_path.iterdir()
    tokenizer = load(kind='file', path=str(trained))
    assert tokenizer.fingerprint == load(kind='bpe', vocab_size=300).fingerprint
    with pytest.raises(ValueError, match="has no token '<none>'"):
        load(kind='file', path=str(trained), separator='<none>')


def test_check_vocabulary(load):
    tokenizers.check_vocabulary(load(kind='bytes'), 257)
    with pytest.raises(ValueError, match=r'has 257 tokens.*model.vocab_size=256.*at least 257'):
        tokenizers.check_vocabulary(load(kind='bytes'), 256)


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
