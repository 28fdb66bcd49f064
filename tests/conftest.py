"""Eight simulated CPU devices for the whole session; set before JAX starts."""

import os

# Compilation takes most of the tests' time; 0 compiles as for users.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
os.environ['JAX_PLATFORMS'] = os.environ.get('JAX_PLATFORMS', 'cpu')
flag = '--xla_force_host_platform_device_count=8'
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flag}'.strip()

import hypothesis  # noqa: E402

# The same examples in every run; compilation makes single examples slow.
hypothesis.settings.register_profile('sa_jax', deadline=None, derandomize=True)
hypothesis.settings.load_profile('sa_jax')
