"""Errors of kernels, real and made up, against the reference."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sa_jax.benchmarks import kernel_errors
from sa_jax.benchmarks.kernel_errors import FORMS, OUTPUTS, Case, build, cases, check

ROOT = Path(__file__).parents[2]
CASE = Case('stochastic', 'float32', 64, 200, 'capped')


@pytest.fixture(scope='module')
def reference():
    return build(CASE, 'reference')


def spoiled(reference, name, spoil):
    """The reference with one of its outputs changed by `spoil`."""

    def run(*inputs):
        outputs = list(reference(*inputs))
        number = OUTPUTS.index(name)
        outputs[number] = spoil(outputs[number])
        return outputs

    return run


def test_the_reference_agrees_with_itself(reference):
    record = check(CASE, reference, reference)
    assert record['is_good']
    assert sorted(record['errors']) == sorted(OUTPUTS)
    assert all(x == {'array': 0, 'worst_row': 0} for x in record['errors'].values())


@pytest.mark.parametrize(
    ('name', 'spoil'),
    [
        ('output', lambda x: x * (1 + 2e-5)),
        ('key', lambda x: x * (1 + 2e-4)),
        # A row of 1,600, two thousandths of it: nothing in the norm of the whole.
        ('value', lambda x: x.at[1, 17, 0].multiply(1.002)),
        ('query', lambda x: x.at[0, 3, 2, 5].set(jnp.nan)),
        ('sink_logits', lambda x: x + 1e-2),
    ],
)
def test_finds_what_is_wrong(reference, name, spoil):
    record = check(CASE, spoiled(reference, name, spoil), reference)
    assert not record['is_good']
    assert {x for x, error in record['errors'].items() if error['array'] != 0} == {name}
    largest = kernel_errors.largest([check(CASE, reference, reference), record])
    assert largest['float32'][name] == pytest.approx(record['errors'][name], nan_ok=True)
    assert f'| float32 | {name}' in kernel_errors.table([record]).replace('gradient of ', '')


def test_bfloat16_rounding_is_within_its_tolerance(reference):
    def rounded(*inputs):
        return [x.astype(jnp.bfloat16) for x in reference(*inputs)]

    assert not check(CASE, rounded, reference)['is_good']
    record = check(Case('stochastic', 'bfloat16', 64, 200, 'capped'), rounded, reference)
    assert record['is_good']
    assert record['errors']['output']['array'] > 1e-4


def test_the_grid_has_every_form_dtype_and_head_dim():
    grid = cases(list(FORMS), ['bfloat16', 'float32'], [64, 128, 256])
    assert len(set(grid)) == len(grid) == 2 * (5 * 4 + 2 * 2 * 2)
    assert {x.form for x in grid} == set(FORMS)
    assert {x.head_dim for x in grid if x.form == 'stochastic'} == {64, 128, 256}
    assert np.all([x.head_dim == 64 for x in grid if x.form == 'stochastic_partition'])


@pytest.mark.slow
def test_the_interpreted_kernels_pass(tmp_path):
    command = [sys.executable, '-m', 'experiments.kernel_check', f'--workdir={tmp_path}']
    options = {'cwd': ROOT, 'env': os.environ | {'XLA_FLAGS': ''}, 'text': True}
    done = subprocess.run(command, capture_output=True, check=False, **options)
    assert 'the kernels need an NVIDIA GPU, and JAX has cpu' in done.stderr
    command += ['--implementation=pallas_interpret', '--forms=stochastic', '--dtypes=float32']
    done = subprocess.run(
        [*command, '--head_dims=16', '--workers=1'], capture_output=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    assert 'All 4 cases are within their tolerance on cpu.' in done.stdout
    assert (tmp_path / 'result.json').exists()
    assert (tmp_path / 'table.md').read_text() in done.stdout
