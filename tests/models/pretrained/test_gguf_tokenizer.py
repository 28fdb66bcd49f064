"""Tokenizers in the metadata of GGUF files, against those they were made from."""

import io
import json

import numpy as np
import pytest
import tokenizers as huggingface

pytest.importorskip('gguf')

import gguf_files as files

from sa_jax.models.generation import continuation_text
from sa_jax.models.pretrained.gguf import GgufFile
from sa_jax.models.pretrained.gguf_tokenizer import build_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTES = sorted(huggingface.pre_tokenizers.ByteLevel.alphabet())
SAMPLES = [
    '',
    ' Plain words, 1234 numbers.\n\n  def f(x):\r\n\treturn x**2',
    'Grüße, Ελληνικά, 日本語, 🙂👩‍👩‍👧, combining e\u0301, ½ ४५',
    'the text <|end|> is no separator',
]


@pytest.fixture(scope='module')
def texts():
    words = ['stochastic', 'attention', 'permutes', '2026', "it's", 'Grüße', '日本語']
    rng = np.random.default_rng(0)
    return [' '.join(rng.choice(words, 200)) for _ in range(20)]


@pytest.fixture(scope='module')
def trained(texts):
    tokenizer = huggingface.Tokenizer(huggingface.models.BPE())
    tokenizer.pre_tokenizer = huggingface.pre_tokenizers.Sequence(
        [
            huggingface.pre_tokenizers.Digits(individual_digits=True),
            huggingface.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = huggingface.decoders.ByteLevel()
    trainer = huggingface.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=['<|begin|>', '<|end|>'],
        initial_alphabet=BYTES,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def metadata_of(trained, pre='smollm'):
    model = json.loads(trained.to_str())['model']
    names = sorted(model['vocab'], key=model['vocab'].get)
    return keyed(
        model='gpt2',
        pre=pre,
        tokens=names,
        token_type=[CONTROL, CONTROL] + [NORMAL] * (len(names) - 2),
        merges=[' '.join(pair) for pair in model['merges']],
        bos_token_id=0,
        eos_token_id=1,
    )


def keyed(**fields):
    return {f'tokenizer.ggml.{name}': value for name, value in fields.items()}


def byte_level(pre, merges=(), more=(), types=()):
    """A vocabulary of bytes, what the merges make, and more tokens."""
    made = [merge.replace(' ', '') for merge in merges]
    names = [*BYTES, '<|end|>', *made, *more]
    kinds = [NORMAL] * (len(names) - len(types)) + list(types)
    return keyed(
        model='gpt2', pre=pre, tokens=names, token_type=kinds, merges=list(merges), eos_token_id=256
    )


def test_byte_level_bpe_through_a_file(trained, texts, tmp_path):
    keys = files.keys_of('llama') | metadata_of(trained)
    tokenizer = GgufFile(files.write(tmp_path / 'a.gguf', keys=keys)).tokenizer()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.vocab_size == trained.get_vocab_size()
    for text in [*SAMPLES, *texts]:
        ids = tokenizer.encode(text)
        assert ids == trained.encode(text).ids
        assert tokenizer.decode([0, *ids, 1]) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.token_bytes[:2].tolist() == [0, 0]
    assert tokenizer.fingerprint == build_tokenizer(metadata_of(trained)).fingerprint
    assert tokenizer.fingerprint != build_tokenizer(metadata_of(trained, 'gpt-2')).fingerprint


@pytest.mark.parametrize(
    ('pre', 'expected'),
    [
        ('gpt-2', "1234|!|\n|aB|'|S"),
        ('default', "123|4|!|\n|aB|'|S"),
        ('smollm', "1|2|3|4|!|\n|aB|'|S"),
        ('llama-bpe', "123|4|!\n|aB|'S"),
        ('qwen2', "1|2|3|4|!\n|aB|'S"),
        ('tekken', "1|2|3|4|!\n|a|B|'S"),
    ],
)
def test_merges_stay_within_pieces(pre, expected):
    merges = ['1 2', '12 3', '123 4', '! Ċ', 'a B', "' S"]
    tokenizer = build_tokenizer(byte_level(pre, merges))
    ids = tokenizer.encode("1234!\naB'S")
    assert [tokenizer.decode([i]) for i in ids] == expected.split('|')


def test_pieces_that_are_tokens_and_composed_characters():
    for pre in ('gpt-2', 'qwen2', 'llama-bpe', 'tekken'):
        tokenizer = build_tokenizer(byte_level(pre, more=['xyz']))
        assert len(tokenizer.encode('xyz')) == (1 if pre in ('llama-bpe', 'tekken') else 3)
        composed = tokenizer.encode('e\u0301') == tokenizer.encode('\u00e9')
        assert composed == (pre == 'qwen2')


def test_types_of_tokens():
    more = ['<|tool|>', '<think>', '[PAD259]']
    tokenizer = build_tokenizer(
        byte_level('gpt-2', more=more, types=[CONTROL, USER_DEFINED, UNUSED])
    )
    assert tokenizer.bos_id == tokenizer.eos_id == 256
    # What only fills the embedding is no token.
    assert tokenizer.vocab_size == 259
    text = 'a<think><|end|><|tool|>[PAD259]'
    ids = tokenizer.encode(text)
    assert 258 in ids
    assert not {256, 257, 259} & set(ids)
    assert tokenizer.decode([256, *ids, 257]) == text
    assert tokenizer.token_bytes[256:].tolist() == [0, 0, len('<think>')]
    assert tokenizer.token_bytes[ids].sum() == len(text)


@pytest.mark.parametrize(
    ('changes', 'adds_bos'),
    [
        ({}, False),
        ({'pre': 'llama-bpe'}, True),
        ({'pre': 'tekken'}, True),
        ({'pre': 'llama-bpe', 'add_bos_token': False}, False),
        ({'add_bos_token': True}, True),
        ({'add_bos_token': True, 'bos_token_id': None}, False),
    ],
)
def test_whether_texts_begin_with_a_token_is_what_the_file_says(changes, adds_bos):
    fields = byte_level('gpt-2') | keyed(bos_token_id=256) | keyed(**changes)
    given = {key: value for key, value in fields.items() if value is not None}
    tokenizer = build_tokenizer(given)
    assert tokenizer.adds_bos == adds_bos
    # It is no part of the vocabulary.
    given.pop('tokenizer.ggml.add_bos_token', None)
    assert build_tokenizer(given).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize('add_space_prefix', [True, False])
def test_sentencepiece(texts, add_space_prefix):
    sentencepiece = pytest.importorskip('sentencepiece')
    rng = np.random.default_rng(0)
    repeats = [''.join(rng.choice(list('aab '), 80)) for _ in range(200)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*texts, *repeats]),
        model_writer=model,
        vocab_size=600,
        model_type='bpe',
        byte_fallback=True,
        normalization_rule_name='identity',
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_space_prefix,
        minloglevel=2,
    )
    source = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = range(source.vocab_size())
    tokenizer = build_tokenizer(
        keyed(
            model='llama',
            tokens=[source.id_to_piece(i) for i in pieces],
            scores=[source.get_score(i) for i in pieces],
            token_type=[
                UNKNOWN
                if source.is_unknown(i)
                else CONTROL
                if source.is_control(i)
                else BYTE
                if source.is_byte(i)
                else NORMAL
                for i in pieces
            ],
            bos_token_id=1,
            eos_token_id=2,
            unknown_token_id=0,
            add_space_prefix=add_space_prefix,
        )
    )
    assert tokenizer.token_bytes[:3].tolist() == [0, 0, 0]
    assert tokenizer.adds_bos
    space = source.piece_to_id('▁')
    assert continuation_text(tokenizer, tokenizer.encode('a\n'), [space] * 4) == '    '
    more = ['  leading', 'trailing  ', '</s> <s> <0x41>', *repeats, 'aba' * 50, 'aab' * 50]
    for text in [*SAMPLES, *texts, *more]:
        ids = tokenizer.encode(text)
        assert ids == source.encode(text)
        assert tokenizer.decode([1, *ids, 2]) == text
        prefix = add_space_prefix and bool(text)
        assert tokenizer.token_bytes[ids].sum() == len(text.encode()) + prefix


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'model': 'bert'}, r"ggml.model = 'bert' is not supported; expected one of gpt2, llama"),
        ({'model': None}, r'the metadata lacks tokenizer.ggml.model'),
        ({'add_bos_token': 1}, r'ggml.add_bos_token = 1; expected true or false'),
        (
            {'pre': 'falcon'},
            r"ggml.pre = 'falcon' is not supported; expected one of default, gpt-2",
        ),
        ({'pre': None}, r'the metadata lacks tokenizer.ggml.pre'),
        ({'eos_token_id': 257}, r'257 and 257, are no tokens'),
        ({'eos_token_id': None}, r'the metadata lacks tokenizer.ggml.eos_token_id'),
        ({'token_type': [1]}, r'257 tokens, but 1 types'),
        ({'tokens': ['b', *BYTES]}, r'stand in the vocabulary twice'),
        ({'tokens': ['a' * 2000] * 257}, r'a token of more than 1024 characters'),
        ({'tokens': 'abc'}, r'ggml.tokens is no list of str'),
        ({'merges': ['x yz']}, r'the tokenizer in the metadata is damaged: .*yz'),
        ({'merges': ['x']}, r'the tokenizer in the metadata is damaged'),
        ({'model': 'llama'}, r'the metadata lacks tokenizer.ggml.scores'),
        ({'model': 'llama', 'scores': [0.0]}, r'257 pieces, but 1 scores'),
        ({'model': 'llama', 'precompiled_charsmap': [1]}, r'precompiled_charsmap is not supported'),
        ({'model': 'llama', 'token_type': [4] * 257}, r'the user-defined pieces'),
    ],
)
def test_errors(changes, message):
    fields = byte_level('gpt-2') | keyed(**changes)
    with pytest.raises(ValueError, match=message):
        build_tokenizer({key: value for key, value in fields.items() if value is not None})


def test_a_file_beside_stands_in(trained, tmp_path):
    keys = files.keys_of('llama') | metadata_of(trained, pre='falcon')
    file = GgufFile(files.write(tmp_path / 'a.gguf', keys=keys))
    with pytest.raises(
        ValueError, match=r"a.gguf: .*'falcon'.* Put the tokenizer.json of the model"
    ):
        file.tokenizer()
    trained.save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "<|end|>"}')
    assert file.tokenizer().encode('attention') == trained.encode('attention').ids
