"""The base package loads nothing beyond what jax and numpy load."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
import jax, numpy
before = set(sys.modules)
import sa_jax
sa_jax.stochastic_attention
added = {name for name in set(sys.modules) - before if name.split('.')[0] != 'sa_jax'}
print(json.dumps(sorted(added)))
"""


def test_importing_the_package_loads_jax_and_numpy_only():
    result = subprocess.run(
        [sys.executable, '-c', SCRIPT], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == []
