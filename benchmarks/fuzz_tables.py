"""Tables for `fuzz.py`: Parquet and Arrow files, a folder of them and a saved data set."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.fuzz_mutations import all_of

CHAT = [{"role": "user", "content": "Why is the sky blue?"}, {"role": "assistant", "content": "Air scatters light."}]


def prepare(folder: Path) -> None:
    """Writes a folder of Parquet files, an Arrow file, an Arrow stream and a saved data set, all with the same rows."""
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.Table.from_pylist([
        {"messages": CHAT, "prompt": "Why?", "chosen": f"So {i}.", "rejected": "No.", "label": True, "score": i / 2}
        for i in range(30)
    ])
    (folder / "parts").mkdir()
    for number in range(2):
        parquet.write_table(table, folder / "parts" / f"part-{number}.parquet", row_group_size=10)
    for name, new in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with new(str(folder / name), table.schema) as writer:
            writer.write_table(table, 10)
    (folder / "saved").mkdir()
    (folder / "saved" / "data.arrow").write_bytes((folder / "stream.arrow").read_bytes())
    (folder / "saved" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))


def read(folder: Path, given: tuple[str, bytes]) -> None:
    """Reads the table that a changed file belongs to with every reader."""
    from jaxalign.data.sources.judgements import read_judgements
    from jaxalign.data.sources.preferences import read_preferences
    from jaxalign.data.sources.prompts import read_prompts
    from jaxalign.data.sources.rows import open_rows

    path = folder / given[0]
    path = path if path.parent == folder else path.parent
    all_of(
        lambda: list(open_rows(path)),
        lambda: open_rows(path)[9],
        lambda: read_preferences(path, max_bad_share=0.5),
        lambda: read_judgements(path, judged=False, max_bad_share=0.5),
        lambda: read_prompts(path, 0.5),
    )
