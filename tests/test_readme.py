"""The README's example runs as it stands."""

import re
from pathlib import Path


def test_the_example():
    text = (Path(__file__).parents[1] / 'README.md').read_text()
    (example,) = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    names = {}
    exec(example, names)
    assert names['far'].shape == names['near'].shape == (2, 1000, 8, 64)
