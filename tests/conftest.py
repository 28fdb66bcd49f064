"""Eight simulated CPU devices for the whole session; set before JAX starts."""

import importlib.metadata
import os

# Compilation takes most of the tests' time; 0 compiles as for users.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
os.environ['JAX_PLATFORMS'] = os.environ.get('JAX_PLATFORMS', 'cpu')
flags = [os.environ.get('XLA_FLAGS', ''), '--xla_force_host_platform_device_count=8']
is_quick = os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] == '1'
if is_quick and importlib.metadata.version('jaxlib').startswith('0.10.'):
    # Compiles in a third of the time; JAX 0.12 has no such flag.
    flags.append('--xla_cpu_use_fusion_emitters=false')
os.environ['XLA_FLAGS'] = ' '.join(flags).strip()

import hypothesis  # noqa: E402

# The same examples in every run; compilation makes single examples slow.
common = {'deadline': None, 'derandomize': True}
hypothesis.settings.register_profile('sa_jax', max_examples=14, **common)
hypothesis.settings.register_profile('few', max_examples=3, **common)
hypothesis.settings.load_profile('sa_jax')
