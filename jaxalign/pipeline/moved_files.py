"""Finds the files of a run that were only moved to another folder since its stages ran."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxalign.config import Config
from jaxalign.errors import UserError
from jaxalign.pipeline.graph import Load
from jaxalign.stages.shared.manifest import Manifest, file_fingerprint


class MovedFiles:
    """Compares the files that the stages of a work directory have read with those that they would read now."""

    def __init__(self, manifests: Sequence[Manifest], config: Config, load: Load):
        """
        Args:
          manifests: the manifests of all stages in the work directory.
          config: the current config.
          load: finds a stage by its name. It is called only if a path differs.
        """
        self._recorded = {file: content for manifest in manifests for file, content in manifest.files.items()}
        self._current = functools.cache(
            lambda: {str(file) for manifest in manifests for file in load(manifest.stage).files(config)}
        )
        self._find = functools.cache(self._compare)  # The files of a model may be large.

    def find(self, was: Any, now: Any) -> set[str]:
        """The recorded files of a config field, if they were only moved.

        They are if the stages find files of the same names and contents at the new path. The last name of the path must be
        the same too, because the ids of prompts contain it.

        Args:
          was, now: the recorded and the current value of the field: a path or a list of paths; others were not moved.

        Returns:
          The paths that were recorded; empty if the files differ, or if the stages have read no file at a path.
        """
        before, after = ([value] if isinstance(value, str) else value for value in (was, now))
        if not isinstance(before, list) or not isinstance(after, list) or len(before) != len(after):
            return set()
        if not all(isinstance(value, str) for value in (*before, *after)):
            return set()
        found = [self._find(old, new) for old, new in zip(before, after, strict=True) if old != new]
        return set().union(*found) if all(found) else set()

    def _compare(self, was: str, now: str) -> set[str]:
        """`find` for one path. Files that cannot be found or read were not moved."""
        if not Path(was).name or Path(was).name != Path(now).name:
            return set()
        try:
            old, new = Path(was).expanduser(), Path(now).expanduser()
            places = _places(old, self._recorded)
            for place in places:
                file = new / place
                if not file.exists() or file_fingerprint(file, now) != self._recorded[str(old / place)]:
                    return set()
            moved = bool(places) and places == _places(new, self._current())
        except (RuntimeError, UserError):  # `expanduser` does not know a user of another machine.
            return set()
        return {str(old / place) for place in places} if moved else set()


def _places(folder: Path, files: Iterable[str]) -> set[Path]:
    """The paths of files in a folder, or the empty path if the folder is a file itself."""
    return {Path(file).relative_to(folder) for file in files if Path(file).is_relative_to(folder)}
