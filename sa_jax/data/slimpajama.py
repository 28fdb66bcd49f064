"""SlimPajama from local parquet or jsonl files, or from the Hugging Face hub."""

import pathlib

from sa_jax.data import builder, sources
from sa_jax.data.parquet import read_parquet

HUB_DATASET = 'DKYoon/SlimPajama-6B'


class SlimPajama(builder.DocumentBuilder):
    """The field `text` of the .parquet, .jsonl and .jsonl.zst files below `data.path`.

    The splits are told by the names of files or folders, as in both published forms
    (`data/train-00000-of-00048.parquet`, `train/chunk1/example_train_0.jsonl.zst`). Without a path
    the 6B-token sample is fetched from the hub, into the hub's own cache.
    """

    name = 'slimpajama'

    @classmethod
    def find(cls, path):
        """Returns the files below `path`, or those fetched from the hub."""
        root = pathlib.Path(path).expanduser() if path else _download()
        files = sources.find_files(root, ('.parquet', '.jsonl', '.jsonl.zst'))
        return root, builder.files_by_split(root, files)

    def read(self, path):
        """Yields the rows of a parquet file or the lines of a jsonl file."""
        reader = read_parquet if path.suffix == '.parquet' else sources.read_jsonl
        name = path.relative_to(self.root).as_posix()
        for position, text in reader(path):
            yield f'{name}:{position}', text


def _download() -> pathlib.Path:
    advice = (
        'set data.path to a folder with .parquet, .jsonl or .jsonl.zst files named after their '
        'splits'
    )
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f'Fetching {HUB_DATASET} needs the package huggingface_hub; install it, or {advice}.'
        ) from error
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(
                HUB_DATASET, repo_type='dataset', allow_patterns='data/*.parquet'
            )
        )
    except Exception as error:  # The hub's client raises those of whatever transport it uses.
        raise ValueError(f'Cannot fetch {HUB_DATASET} from the hub ({error}); {advice}.') from error
