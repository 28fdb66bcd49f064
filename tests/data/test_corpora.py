"""Corpora: what the builders read, atomic builds, no stale or damaged copies."""

import json
import random
import sys

import ml_collections
import pytest

from sa_jax.data import corpora, plain_text, sotu, sources, tokenizers


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def jsonl(*texts):
    return ''.join(json.dumps({'text': text, 'meta': {}}) + '\n' for text in texts)


@pytest.fixture
def load(tmp_path):
    def load(corpus='text', path=tmp_path / 'source'):
        config = ml_collections.ConfigDict({'corpus': corpus, 'path': path and str(path)})
        return corpora.load_corpus(config, tmp_path / 'built')

    return load


@pytest.fixture
def source(tmp_path):
    files = {'train/a.txt': 'Grüße.', 'train/b.txt': 'Second.', 'validation.txt': 'Held out.'}
    return write(tmp_path / 'source', files)


def texts(corpus, split):
    return [document['text'] for document in corpus.documents(split)]


def test_sotu(tmp_path, monkeypatch):
    config = {'corpus': 'sotu', 'path': None}
    corpus = corpora.load_corpus(config, tmp_path)
    years = {
        split: {int(document['id'][:4]) for document in documents}
        for split, documents in corpus.splits.items()
    }
    assert list(years) == list(sources.SPLITS)
    assert not years['train'] & (years['validation'] | years['test'])
    assert not years['validation'] & years['test']
    for split in ('validation', 'test'):
        assert min(years[split]) < 1820
        assert max(years[split]) > 2000
        assert {sotu.split_of_year(year) for year in years[split]} == {split}
    assert corpus.text_bytes['train'] > 10e6
    document = corpus.documents('train')[0]
    assert document['id'] == '1790-Washington-1'
    assert document['text'].startswith('Fellow-Citizens of the Senate')
    # The same content is the same corpus, wherever it is built.
    assert corpora.load_corpus(config, tmp_path / 'elsewhere').fingerprint == corpus.fingerprint
    assert 'tensorflow' not in sys.modules

    monkeypatch.setattr(tokenizers, '_TRAINING_BYTES', 1 << 20)  # The whole takes seconds.
    tokenizer = tokenizers.load_tokenizer({'kind': 'bpe', 'vocab_size': 300}, corpus, tmp_path)
    text = corpus.documents('validation')[3]['text']
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())


def test_text_by_names(load, source):
    corpus = load()
    assert texts(corpus, 'train') == ['Grüße.', 'Second.']
    assert texts(corpus, 'validation') == ['Held out.']
    assert [document['id'] for document in corpus.documents('train')] == [
        'train/a.txt',
        'train/b.txt',
    ]
    assert corpus.text_bytes == {'train': 15, 'validation': 9}
    assert repr(corpus.documents('train')) == repr(load().documents('train'))
    with pytest.raises(ValueError, match="no split 'test'; it has train, validation"):
        corpus.documents('test')


def test_text_holds_out_whole_files(load, tmp_path):
    names = [f'{i}.md' for i in range(40)]
    write(tmp_path / 'source', {name: f'Text of {name}.' for name in names})
    corpus = load()
    parts = {split: set(texts(corpus, split)) for split in sources.SPLITS}
    assert {split: len(part) for split, part in parts.items()} == {
        'train': 36,
        'validation': 2,
        'test': 2,
    }
    assert set.union(*parts.values()) == {f'Text of {name}.' for name in names}


def test_long_text_is_cut_at_paragraphs(load, tmp_path):
    paragraph = 'A line.\n' * 100 + '\n'
    text = paragraph * 200  # 160,200 characters
    write(tmp_path / 'source', {'train.txt': text, 'validation.txt': 'Held out.'})
    pieces = texts(load(), 'train')
    assert len(pieces) == 3
    assert ''.join(pieces) == text
    assert all(piece.endswith('\n\n') for piece in pieces)


@pytest.mark.parametrize('text', ['x' * 25, 'ab\n' * 9, '', 'a' * 10 + '\n\n' + 'b' * 9])
def test_cut_adds_up(text):
    pieces = list(plain_text.cut(text, 10))
    assert ''.join(pieces) == text
    assert all(len(piece) <= 20 for piece in pieces)


def test_slimpajama_reads_all_formats(load, tmp_path):
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    zstandard = pytest.importorskip('zstandard')
    root = write(
        tmp_path / 'source',
        {
            'train/chunk1/example_train_0.jsonl': jsonl('One.', ' \n ', 'Zwei: Grüße.'),
            # Two frames in one file, and half of a surrogate pair.
            'train/chunk2/example_train_0.jsonl.zst': zstandard.compress(jsonl('Three.').encode())
            + zstandard.compress(b'{"text": "Four\\ud800."}'),
            'val/a.jsonl': jsonl('Held out.'),
            'README.md': 'Not data.',
        },
    )
    table = pyarrow.table({'text': ['Five.', None, 'Six.'], 'meta': [1, 2, 3]})
    (root / 'data').mkdir()
    parquet.write_table(table, root / 'data' / 'train-00000-of-00001.parquet')
    corpus = load('slimpajama')
    assert sorted(texts(corpus, 'train')) == sorted(
        ['One.', 'Zwei: Grüße.', 'Three.', 'Four?.', 'Five.', 'Six.']
    )
    assert texts(corpus, 'validation') == ['Held out.']
    identifiers = {document['id'] for document in corpus.documents('train')}
    assert 'train/chunk1/example_train_0.jsonl:3' in identifiers
    assert 'data/train-00000-of-00001.parquet:2' in identifiers


def test_slimpajama_from_the_hub(load, source, monkeypatch):
    hub = pytest.importorskip('huggingface_hub')
    write(source, {'data/train-0.jsonl': jsonl('One.'), 'data/validation-0.jsonl': jsonl('Two.')})
    monkeypatch.setattr(hub, 'snapshot_download', lambda *_, **__: str(source))
    assert texts(load('slimpajama', path=None), 'train') == ['One.']

    def unreachable(*_, **__):
        raise ConnectionError('no route')

    monkeypatch.setattr(hub, 'snapshot_download', unreachable)
    with pytest.raises(ValueError, match=r'Cannot fetch .* \(no route\); set data.path'):
        load('slimpajama', path=None)


def test_reuses_what_is_built(load, source, monkeypatch):
    first = load()
    monkeypatch.setattr(plain_text.PlainText, 'read', lambda *_: pytest.fail('built again'))
    second = load()
    assert (second.directory, second.fingerprint) == (first.directory, first.fingerprint)


def test_changed_sources_are_built_anew(load, source):
    before = load()
    write(source, {'train/a.txt': 'Changed'})
    after = load()
    assert texts(after, 'train') == ['Changed', 'Second.']
    assert after.fingerprint != before.fingerprint
    write(source, {'train/c.txt': 'Added.'})
    assert texts(load(), 'train') == ['Changed', 'Second.', 'Added.']


def test_an_interrupted_build_leaves_nothing_behind(load, source, monkeypatch):
    read = plain_text.PlainText.read

    def interrupted(self, path):
        if path.name == 'b.txt':
            raise KeyboardInterrupt
        yield from read(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(plain_text.PlainText, 'read', interrupted)
        with pytest.raises(KeyboardInterrupt):
            load()
    assert texts(load(), 'train') == ['Grüße.', 'Second.']


def test_two_processes_may_build_at_once(load, source, monkeypatch):
    read = plain_text.PlainText.read
    inner = []

    def overtaken(self, path):
        if not inner:
            inner.append(None)
            inner[0] = load()  # Another process begins later and ends before.
        yield from read(self, path)

    monkeypatch.setattr(plain_text.PlainText, 'read', overtaken)
    corpus = load()
    assert inner[0].fingerprint == corpus.fingerprint
    assert texts(corpus, 'train') == ['Grüße.', 'Second.']


@pytest.mark.parametrize(
    'damage',
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b''),
        lambda path: path.unlink(),
        lambda path: path.with_name('dataset_info.json').write_text('{"name":'),
        lambda path: path.with_name('dataset_info.json').unlink(),
        lambda path: path.with_name('metadata.json').unlink(),
    ],
)
def test_damaged_dataset(load, source, damage):
    directory = load().directory
    damage(next(directory.glob('**/*train.array_record*')))
    with pytest.raises(ValueError, match=f'{directory} is damaged .* Delete that folder'):
        load()


def test_no_flipped_bit_changes_a_document(load, source):
    corpus = load()
    (path,) = corpus.directory.glob('**/*train.array_record*')
    whole, documents = path.read_bytes(), list(corpus.documents('train'))
    used = [index for index, byte in enumerate(whole) if byte]  # blocks are filled up with zeros
    draw, errors = random.Random(0), []
    for index in draw.sample(used, 60):
        content = bytearray(whole)
        content[index] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        try:
            now = list(load().documents('train'))
        except ValueError as error:
            errors.append(str(error))
        else:
            assert now == documents
    assert len(errors) > 30
    assert all(f'{corpus.directory} is damaged' in error for error in errors)


@pytest.mark.parametrize(
    ('files', 'message'),
    [
        ({'train.jsonl': jsonl('a') + '{"text": \n'}, r'train.jsonl:2: not a line of JSON'),
        ({'train.jsonl': '{"txt": "a"}\n'}, r"train.jsonl:1: expected .* string field 'text'"),
        ({'train.jsonl': jsonl(' ', '')}, r"Split 'train' of 'slimpajama' is empty"),
        ({'train.jsonl.zst': 'not zstd'}, r'train.jsonl.zst is not a zstd file'),
        ({'train.parquet': 'not parquet'}, r'train.parquet is not a whole parquet file'),
        ({'other.jsonl': jsonl('a')}, r"Cannot tell the split of 'other.jsonl'"),
        ({}, r"Split 'train' is empty: no file or folder"),
    ],
)
def test_errors_of_slimpajama(load, tmp_path, files, message):
    pytest.importorskip('pyarrow')
    pytest.importorskip('zstandard')
    write(tmp_path / 'source', {'validation.jsonl': jsonl('Held out.'), **files})
    with pytest.raises(ValueError, match=message):
        load('slimpajama')


def test_truncated_zst_and_parquet_without_text(load, tmp_path):
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    zstandard = pytest.importorskip('zstandard')
    root = write(tmp_path / 'source', {'validation.jsonl': jsonl('Held out.')})
    whole = zstandard.compress(jsonl('One.', 'Two.').encode())
    write(root, {'train.jsonl.zst': whole[:-4]})
    with pytest.raises(ValueError, match=r'train.jsonl.zst'):
        load('slimpajama')
    (root / 'train.jsonl.zst').unlink()
    parquet.write_table(pyarrow.table({'content': ['a']}), root / 'train.parquet')
    with pytest.raises(ValueError, match=r"no column 'text'; it has \['content'\]"):
        load('slimpajama')
    parquet.write_table(pyarrow.table({'text': [1]}), root / 'train.parquet')
    with pytest.raises(ValueError, match="column 'text' of strings, not int64"):
        load('slimpajama')
    parquet.write_table(
        pyarrow.table({'text': ['a']}),
        root / 'train.parquet',
        use_dictionary=False,
        column_encoding={'text': 'DELTA_BYTE_ARRAY'},
    )
    with pytest.raises(ValueError, match=r'is encoded as .*DELTA_BYTE_ARRAY; only PLAIN and'):
        load('slimpajama')


@pytest.mark.parametrize(
    ('files', 'message'),
    [
        ({'train.txt': b'\xff\xfe', 'validation.txt': 'a'}, 'train.txt is not UTF-8 text'),
        ({'train.txt': '\n', 'validation.txt': 'a'}, "Split 'train' of 'text' is empty"),
        ({'train.txt': 'a'}, "Split 'validation' is empty"),
        ({'a.txt': 'a', 'b.txt': 'b'}, 'holds 2 text files whose names tell no split'),
        ({'a.pdf': 'a'}, 'holds no .txt or .md file'),
    ],
)
def test_errors_of_text(load, tmp_path, files, message):
    write(tmp_path / 'source', files)
    with pytest.raises(ValueError, match=message):
        load()


def test_errors_of_configuration(load, tmp_path):
    with pytest.raises(ValueError, match=r"data.corpus='slimpyjama'.*mean 'slimpajama'"):
        load('slimpyjama')
    with pytest.raises(ValueError, match=r'data.corpus=text needs data.path'):
        load('text', path=None)
    with pytest.raises(ValueError, match=r'source.* does not exist'):
        load('text')
    with pytest.raises(ValueError, match='has no meaning for the corpus sotu'):
        load('sotu')
    write(tmp_path, {'source': 'a'})
    with pytest.raises(ValueError, match='is a file; expected the folder'):
        load('text')


def test_sotu_verifies_checksums(tmp_path):
    root, files = sotu.Sotu.find(None)
    builder = sotu.Sotu(root=root, files=files, data_dir=str(tmp_path / 'built'))
    builder._split_generators(None)
    damaged = write(tmp_path, {'1790-Washington-1.txt': 'Fellow'}) / '1790-Washington-1.txt'
    with pytest.raises(ValueError, match=r'1790-Washington-1.txt is damaged'):
        list(builder.read(damaged))
