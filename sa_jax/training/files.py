"""Files that survive a crash."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a crash leaves the old content or the new, never a part."""
    temporary = path.with_name(path.name + '.tmp')
    temporary.write_text(text)
    os.replace(temporary, path)
