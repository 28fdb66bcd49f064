"""Packages of the optional extras, imported where they are needed."""

import importlib
from types import ModuleType


def optional_import(module: str, purpose: str, extra: str) -> ModuleType:
    """Imports a module of an extra.

    Args:
      module: its full name.
      purpose: what is read with it, for the message.
      extra: the extra of `setup.cfg` that installs it.

    Raises:
      ImportError: if the package is missing, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition('.')[0]
        raise ImportError(
            f"Reading {purpose} needs the package {package}: pip install 'sa_jax[{extra}]'."
        ) from error
