"""A real model against transformers' reading of the same file, `SMOLLM2=….gguf`."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sa_jax.models import generate, load_pretrained

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        'SMOLLM2' not in os.environ,
        reason='needs SMOLLM2=….gguf, of scripts/fetch_smollm2.py',
    ),
]
PROMPTS = (
    'The capital of France is',
    'Once upon a time, in a small village,',
    'def fibonacci(n):\n',
    'Water boils at',
    'The three laws of motion are',
    'Dear Sir or Madam,',
    'In 1969, the first humans',
    'To bake bread you need',
    'The meaning of life is',
    'Q: What is 12 times 12?\nA:',
)
NEW_TOKENS = 64


@pytest.fixture(scope='module')
def ours():
    return load_pretrained(os.environ['SMOLLM2'], dtype='float32')


@pytest.fixture(scope='module')
def theirs():
    path = Path(os.environ['SMOLLM2'])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


def test_logits_equal(ours, theirs):
    tokens = ours.tokenizer.encode('\n'.join(PROMPTS) * 4)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits.numpy()
    found = ours.model(jnp.array([tokens])).logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


def test_greedy_continuations_equal(ours, theirs):
    prompts = [ours.tokenizer.encode(prompt) for prompt in PROMPTS]
    found = generate(ours.model, prompts, max_new_tokens=NEW_TOKENS)
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        assert tokens == expected[0, len(prompt) :].tolist()
