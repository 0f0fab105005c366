"""A split of a prepared TFDS data set as a part of a table. Requires tensorflow-datasets (the extra "tfds"), not TensorFlow."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.data.sources.tables import CHUNK, Chunk, Undecodable
from jaxalign.errors import UserError

PREFIX = "tfds:"
_VERSION = re.compile(r"\d+\.\d+\.\d+")


class TfdsName(NamedTuple):
    """The parts of `tfds:NAME[/CONFIG][:VERSION][:SPLIT]`.

    Attributes:
      name: NAME, NAME/CONFIG or either with :VERSION, as `tfds.builder` reads it.
      split: a split or a slice of one, such as "train[:10%]".
    """

    name: str
    split: str = "train"

    @property
    def stem(self) -> str:
        """A short name for ids: without the split if it is train."""
        return self.name if self.split == "train" else f"{self.name}:{self.split}"


def is_tfds(path: Any) -> bool:
    """Whether a path names a TFDS data set."""
    return str(path).startswith(PREFIX)


def parse_name(path: Any) -> TfdsName:
    """The parts of a name. Raises UserError if it has another form."""
    name, *rest = str(path).removeprefix(PREFIX).split(":")
    if rest and _VERSION.fullmatch(rest[0]):
        name = f"{name}:{rest.pop(0)}"
    split = ":".join(rest) if rest else "train"  # The slice of a split may have colons.
    if not re.fullmatch(r"\w[\w./:-]*", name) or not re.fullmatch(r"\w+([\[+].*)?", split):
        raise UserError(f"{path} is not a TFDS name; tfds:NAME[/CONFIG][:VERSION][:SPLIT] is expected, such as "
                        "tfds:my_data:train")
    return TfdsName(name, split)


def prepared_files(path: Any) -> tuple[str, list[Path]]:
    """(name, config and version of a data set, the files of its prepared folder). Raises UserError like `TfdsPart`."""
    builder = _builder(path)
    folder = Path(os.fspath(builder.data_dir))
    return builder.info.full_name, sorted(file for file in folder.iterdir() if file.is_file() and file.name[0] != ".")


class TfdsPart:
    """The rows of a split, read through `tfds.data_source`.

    Args:
      path: "tfds:..." as in `TfdsName`.

    Raises:
      UserError: tensorflow-datasets is not installed, the data set is not prepared in a format with random access, or it has no
        such split.
    """

    def __init__(self, path: Any):
        self.name, (name, split) = str(path), parse_name(path)
        builder = _builder(path)
        tfds = _tfds(path)
        if re.split(r"[\[+]", split)[0].strip() not in {*builder.info.splits, "all"}:
            raise UserError(f"{path}: there is no split {split!r}; the splits are {', '.join(builder.info.splits)}")
        try:
            self._source = tfds.data_source(name, split=split, data_dir=_folder(), download=False)
            self._length = len(self._source)
        except NotImplementedError:
            raise UserError(f"{path} is prepared in {builder.data_dir} in a format without random access; delete that folder "
                            f"and prepare it again: {_command(name)}") from None
        except Exception as error:  # Readers of record files raise errors of many types.
            raise _damaged(path, error) from None
        self._features = builder.info.features
        self.columns = tuple(sorted(self._features))

    def __len__(self) -> int:
        return self._length

    def chunk(self, index: int) -> Chunk:
        start = index // CHUNK * CHUNK
        try:
            records = self._source.__getitems__(list(range(start, min(start + CHUNK, self._length))))
        except Exception as error:
            raise _damaged(self.name, error) from None
        return Chunk(start, [_row(record, self._features) for record in records])

    def release(self) -> None:
        """The source of TFDS has its own limits."""


def _row(record: dict[str, Any], features: Any) -> dict[str, Any] | Undecodable:
    """A record as a dictionary of JSON values. Columns without an equivalent, such as images, are left out."""
    try:
        cells = {name: _plain(value, features[name]) for name, value in record.items()}
    except UnicodeDecodeError as error:
        return Undecodable(f"not UTF-8 at byte {error.start} of a text")
    return cells


def _plain(value: Any, feature: Any) -> Any:
    """A decoded value as a JSON value. A sequence of dictionaries, which TFDS stores by column, becomes a list of them."""
    inner = getattr(feature, "feature", None)
    if inner is not None and isinstance(value, dict):
        columns = {name: list(cells) for name, cells in value.items()}
        return [{name: _plain(cell, inner[name]) for name, cell in zip(columns, cells, strict=True)}
                for cells in zip(*columns.values(), strict=True)]
    if isinstance(value, dict):
        return {name: _plain(cell, feature[name]) for name, cell in value.items()}
    if inner is not None:
        return [_plain(cell, inner) for cell in value]
    names = getattr(feature, "names", None)
    if names and not isinstance(value, bytes):
        return names[int(value)] if value >= 0 else None  # A class label is read as its name; -1 is an unknown one.
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [cell.decode("utf-8") if isinstance(cell, bytes) else cell for cell in value]
    return value if isinstance(value, (str, bool, int, float)) else None


def _folder() -> str | None:
    """The folder of prepared data sets; None: the default of TFDS."""
    return os.environ.get("TFDS_DATA_DIR") or None


def _command(name: str) -> str:
    return (f"python -c \"import tensorflow_datasets as tfds; tfds.builder('{name}', file_format='array_record')"
            ".download_and_prepare()\"")


def _tfds(path: Any) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise UserError(f"{path} is a TFDS data set, which needs tensorflow-datasets; install it with pip install "
                        "'jaxalign[tfds]'") from None
    return tfds


def _builder(path: Any) -> Any:
    """The builder of a prepared data set."""
    tfds, (name, _) = _tfds(path), parse_name(path)
    where = _folder() or "~/tensorflow_datasets"
    known, level = True, logging.getLogger("absl").level
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        builder = tfds.builder(name, data_dir=_folder())
        if builder.info.splits:
            return builder
    except tfds.core.registered.DatasetNotFoundError:
        known = False
    except Exception as error:  # A builder's own code may raise anything.
        raise _damaged(path, error) from None
    finally:
        logging.getLogger("absl").setLevel(level)
    if known:
        raise UserError(f"{path} is not prepared in {where}; set TFDS_DATA_DIR to the folder that has it, or run: "
                        f"{_command(name)}")
    raise UserError(f"{path} is not in {where} and TFDS does not know a data set of that name; set TFDS_DATA_DIR to the folder "
                    f"that has it, or import its builder and run: {_command(name)}")


def _damaged(path: Any, error: Exception) -> UserError:
    reason = str(error).strip().partition("\n")[0][:200].rstrip(". ") or type(error).__name__
    return UserError(f"{path} cannot be read ({reason}); prepare the data set again")
