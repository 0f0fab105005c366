"""Writes a config file that runs another one with further arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxalign.errors import UserError

_TEXT = '''"""{title}

Written by `python -m jaxalign.plan --write-config`. Relative paths are those of the folder in which that command ran.
"""

from jaxalign.train import read_values

ARGUMENTS = (
{arguments}
)


def get_config():
    config, _, _ = read_values(["config", *ARGUMENTS])
    return config
'''


def require_new(path: str) -> None:
    """Raises UserError if a config file cannot be written to the path."""
    file = Path(path)
    if file.exists():
        raise UserError(f"--write-config={path}: the file exists; choose a new name, or remove it")
    if not file.parent.is_dir():
        raise UserError(f"--write-config={path}: the folder {file.parent} does not exist; create it")


def write_config(path: str, title: str, arguments: Sequence[str]) -> None:
    """Writes the file.

    Args:
      path: the file.
      title: the first line of its docstring.
      arguments: the arguments of `jaxalign.train`, --config=FILE of the other config among them.

    Raises:
      UserError: the file cannot be written.
    """
    listed = "\n".join(f"    {argument!r}," for argument in arguments)
    try:
        Path(path).write_text(_TEXT.format(title=title, arguments=listed), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--write-config={path} cannot be written ({error.strerror}); choose another file") from None
