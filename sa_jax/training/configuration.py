"""Run configurations: command-line overrides, and what makes two of them the same run."""

import json
import re
from collections.abc import Sequence
from typing import Any

from absl import app
from ml_collections import ConfigDict

# Fields that may change when a run is continued: they decide how long it goes on, what is
# written down and when, and on how many devices it runs, but not what is learned at a step.
# (Under a cosine schedule more steps also stretch what is left of the decay.)
FREE_FIELDS = (
    'training.steps',
    'training.log_every',
    'training.checkpoint_every',
    'training.keep_checkpoints',
    'evaluation',
    'logging',
    'mesh',
)


def flatten(config: ConfigDict | dict, prefix: str = '') -> dict[str, Any]:
    """Returns the fields of a nested configuration by their dotted names."""
    fields = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict | dict):
            fields |= flatten(value, f'{prefix}{name}.')
        else:
            fields[prefix + name] = value
    return fields


def to_json(config: ConfigDict) -> dict:
    """Returns a configuration as what it reads as after a round trip through JSON."""
    return json.loads(config.to_json())


def differences(stored: dict, current: dict) -> list[str]:
    """Names the fields in which two JSON configurations are different runs.

    Returns:
      One line 'field: stored -> current' for each differing field outside FREE_FIELDS.
    """
    missing = '(absent)'
    before, after = flatten(stored), flatten(current)
    free = re.compile('|'.join(rf'{re.escape(name)}(\.|$)' for name in FREE_FIELDS))
    return [
        f'{name}: {before.get(name, missing)!r} -> {after.get(name, missing)!r}'
        for name in sorted(before | after)
        if before.get(name, missing) != after.get(name, missing) and not free.match(name)
    ]


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses the flags of a binary; a mistyped config field names the nearest one.

    For `absl.app.run(main, flags_parser=parse_flags)`. Exits with status 1 and one line instead
    of a traceback through the flag library.
    """
    try:
        return app.parse_flags_with_usage(list(argv))
    except (AttributeError, KeyError) as error:
        raise SystemExit(_explain_override(argv, error)) from None


def _explain_override(argv: Sequence[str], error: Exception) -> str:
    message = str(error.args[0]).replace('\\n', ' ').replace('\\', '')
    message = ' '.join(message.split()).strip('"')
    typed = re.search(r"'(\w+)'", message)
    argument = next(
        (a for a in argv if typed and re.match(rf'--?config\.[\w.]*\b{typed[1]}\b', a)), None
    )
    if argument is None:
        return f'Bad configuration: {message}'
    return f'{argument} names no field of the configuration. {message}'
