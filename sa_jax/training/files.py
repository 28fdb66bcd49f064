"""Files that survive a crash."""

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a crash leaves the old content or the new, never a part.

    Several processes may write the same file at once; the last one's content stays.
    """
    temporary = path.with_name(f'{path.name}.{uuid.uuid4().hex}.tmp')
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
