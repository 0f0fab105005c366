"""The entries of `config.data.columns`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxalign.errors import UserError


def parse_columns(entries: Sequence[str]) -> dict[str, str]:
    """The column of each field in entries of the form "field=column".

    Raises:
      UserError: an entry has another form, or two entries name one field.
    """
    fields: dict[str, str] = {}
    for entry in entries:
        field, equals, column = entry.partition("=")
        if not (field.strip() and equals and column.strip()):
            raise UserError(f"config.data.columns has {entry!r}; \"field=column\" is expected, such as prompt=question")
        if field.strip() in fields:
            raise UserError(f"config.data.columns names the field {field.strip()!r} twice; name each field once")
        fields[field.strip()] = column.strip()
    return fields
