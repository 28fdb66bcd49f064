"""What a user would pick instead, each on the kinds it has: JAX, tokamax, PyTorch."""

import functools
import importlib.util

import jax

from sa_jax.benchmarks import patterns
from sa_jax.benchmarks.patterns import TWO_SIDED
from sa_jax.benchmarks.runners import NotAvailableError, Runner, prepare_jax
from sa_jax.benchmarks.settings import PEERS, Case, Inputs, Sweep

LABELS = {
    'jax_xla': 'jax.nn, XLA',
    'jax_cudnn': 'jax.nn, cuDNN',
    'tokamax': 'tokamax',
    'torch_sdpa': 'PyTorch SDPA',
    'torch_flex': 'FlexAttention',
}
_PACKAGES = {'tokamax': 'tokamax', 'torch_sdpa': 'torch', 'torch_flex': 'torch'}


def prepare(case: Case, sweep: Sweep, inputs: Inputs) -> Runner:
    """Compiles a case for inputs, whoever runs it.

    Raises:
      NotAvailableError: a peer that isn't installed, or can't run the case on this device.
      Exception: whatever the function itself raises.
    """
    if case.implementation not in PEERS:
        function = patterns.build(case.kind, sweep, case.implementation)
        return prepare_jax(function, inputs, case.dtype, case.mode)
    package = _PACKAGES.get(case.implementation, 'jax')
    if importlib.util.find_spec(package) is None:
        raise NotAvailableError(f'{package} is not installed')
    if package == 'torch':
        from sa_jax.benchmarks import torch_peers

        return torch_peers.prepare(case, sweep, inputs)
    return prepare_jax(_jax_peer(case, sweep), inputs, case.dtype, case.mode)


def _jax_peer(case: Case, sweep: Sweep) -> patterns.Attention:
    """The attention of a peer whose interface is `jax.nn.dot_product_attention`'s."""
    if case.implementation == 'jax_cudnn':
        if jax.default_backend() != 'gpu':
            raise NotAvailableError('cuDNN needs an NVIDIA GPU')
        if case.kind != 'full' and not sweep.is_causal:
            # Its windows are one-sided.
            raise NotAvailableError("cuDNN's windows are causal")
    if case.implementation == 'tokamax':
        import tokamax

        attention = tokamax.dot_product_attention
    else:
        implementation = case.implementation.removeprefix('jax_')
        attention = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    # Both count the keys on either side, the query's own left out. cuDNN sees the future through a
    # window unless told to be causal as well.
    arguments = {'is_causal': sweep.is_causal and case.kind != TWO_SIDED}
    if case.kind != 'full':
        arguments['local_window_size'] = patterns.window_sides(case.kind, sweep)
    return lambda query, key, value, draw: attention(query, key, value, **arguments)
