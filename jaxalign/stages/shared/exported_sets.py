"""Exports the rows that a run made as data sets in the columns of other libraries, with a card.

A row of set "sft" is an answer to imitate, one of "preference" a pair with a decided label, and one of "labels" any pair of
stage compare with the judge's verdicts. The train and test parts are those of the run.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.config.finished import finished_stage
from jaxalign.errors import UserError
from jaxalign.models.checkpoints.export import check_target, whole_folder
from jaxalign.records import Comparison
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.labelled import labelled_split, read_comparisons, revision_split, row_answer
from jaxalign.stages.shared.manifest import DONE, find_manifest, output_changes
from jaxalign.stages.shared.preference_pairs import is_human, preference_pairs
from jaxalign.stages.shared.shards import Shards
from jaxalign.storage import LocalStorage
from jaxalign.tracking.cards.dataset import SetFacts, dataset_card
from jaxalign.tracking.cards.facts import RunFacts, read_facts

Row = dict[str, Any]
Kind = dict[str, Any]
"""The type of a column, as `datasets` writes it in a card: {"dtype": name}, or {"list": name or list of named types}."""

_TEXT, _NUMBER, _TRUTH = {"dtype": "string"}, {"dtype": "float64"}, {"dtype": "bool"}
_TEXTS = {"list": "string"}
_MESSAGES = {"list": [{"name": "role", **_TEXT}, {"name": "content", **_TEXT}]}
VERDICTS = {"list": [
    {"name": name, **(_NUMBER if name in ("ab", "ba", "tie") else _TEXT)}
    for name in ("principle", "ab", "ba", "tie", "reasoning_ab", "reasoning_ba")
]}

Columns = dict[str, tuple[Kind, str]]
"""The type and the meaning of each column."""

_PROMPT_COLUMNS: Columns = {
    "prompt_id": (_TEXT, "the id of the prompt"),
    "source": (_TEXT, "the set of prompts that it belongs to"),
}
SFT: Columns = {
    "prompt": (_MESSAGES, "the dialogue up to the answer"),
    "completion": (_MESSAGES, "the answer to imitate"),
    "messages": (_MESSAGES, "the dialogue with the answer"),
    "round": ({"dtype": "int64"}, "the round of the revision; 0 for an answer that was not revised"),
    "principle": (_TEXT, "the principle of the revision, if any"),
    **_PROMPT_COLUMNS,
}
PREFERENCE: Columns = {
    "prompt": (_MESSAGES, "the dialogue up to the answers"),
    "chosen": (_MESSAGES, "the answer that is labelled better"),
    "rejected": (_MESSAGES, "the other answer"),
    "score_chosen": (_NUMBER, "the label: the probability that the chosen answer is better"),
    "score_rejected": (_NUMBER, "1 - score_chosen"),
    "principle": (_TEXT, "the principle that decided the label, if one did"),
    **_PROMPT_COLUMNS,
}
LABELS: Columns = {
    "messages": (_MESSAGES, "the dialogue up to the answers"),
    "response_a": (_TEXT, "the first answer"),
    "response_b": (_TEXT, "the second answer"),
    "label": (_NUMBER, "the probability that the first answer is better; 0.5 if it is undecided"),
    "decided": (_TRUTH, "whether the label is decided"),
    "outcome": (_TEXT, "why it is undecided"),
    "label_ab": (_NUMBER, "the label with the first answer shown first"),
    "label_ba": (_NUMBER, "the label with the first answer shown second"),
    "principles": (_TEXTS, "the principles under which the judge was asked"),
    "principle": (_TEXT, "the principle that decided the label, if one did"),
    "labels": (VERDICTS, "the verdicts under each principle"),
    "reasoning_ab": (_TEXT, "the judge's text before the verdict that decided, with the first answer shown first"),
    "reasoning_ba": (_TEXT, "the same with the first answer shown second"),
    "problem": (_TEXT, "why the judge gave no verdict"),
    "outside": (_NUMBER, "the probability that the judge gave to none of the options"),
    "notes": (_TEXTS, "facts about the verdicts that do not prevent their use"),
    "disagreement": (_NUMBER, "the largest difference between two members of a jury"),
    "incomplete": (_TEXTS, "the answers that did not end within the length limit: a, b"),
    "weight": (_NUMBER, "the weight of the pair's loss; empty: 1"),
    **_PROMPT_COLUMNS,
}


def columns_of(columns: Columns, plain: bool) -> Columns:
    """The columns of a set; in style "plain" a prompt and an answer are texts, and there is no dialogue."""
    if not plain:
        return columns
    return {name: (_TEXT if kind is _MESSAGES else kind, meaning) for name, (kind, meaning) in columns.items()
            if name != "messages"}


def _write_jsonl(path: Path, rows: Sequence[Row], kinds: Mapping[str, Kind]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _write_parquet(path: Path, rows: Sequence[Row], kinds: Mapping[str, Kind]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    def arrow(kind: Kind) -> Any:
        if "dtype" in kind:
            return {"string": pa.string(), "float64": pa.float64(), "bool": pa.bool_(), "int64": pa.int64()}[kind["dtype"]]
        if isinstance(kind["list"], str):
            return pa.list_(arrow({"dtype": kind["list"]}))
        return pa.list_(pa.struct([(entry["name"], arrow(entry)) for entry in kind["list"]]))

    schema = pa.schema([(name, arrow(kind)) for name, kind in kinds.items()])
    parquet.write_table(pa.Table.from_pylist(list(rows), schema), path)


Writer = Callable[[Path, Sequence[Row], Mapping[str, Kind]], None]

WRITERS: dict[str, Writer] = {"jsonl": _write_jsonl, "parquet": _write_parquet}
"""Writes the rows of a file in each format. Every row has all columns; the kinds are those of the columns."""


def require_pyarrow() -> None:
    """Raises UserError if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError("--format=parquet needs pyarrow, which is not installed; run pip install 'jaxalign[data]', or use "
                        "--format=jsonl") from None


class _Set(NamedTuple):
    """The rows of a set by split, its columns, and the number of rows that it does not contain by reason."""

    columns: Columns
    purpose: str
    splits: Mapping[str, Sequence[Row]]
    left_out: Mapping[str, int]


class _Maker(NamedTuple):
    """A kind of set: the stage that makes its rows, and the function that reads them."""

    stage: str
    read: Callable[[RunFacts], _Set]


def export_sets(workdir: Path, target: Path, names: Sequence[str] = (), file_format: str = "jsonl") -> list[str]:
    """Writes the sets of a run and their card to a new folder, atomically.

    Args:
      workdir: the work directory of the run.
      target: must be empty or not exist.
      names: the sets to write, of `SETS`; empty: all that the run has made.
      file_format: one of `WRITERS`.

    Returns:
      Sentences that report what was written.

    Raises:
      UserError: the folder is not a work directory, the run has not made a set, its rows have changed since they were made,
        the target cannot be written, or pyarrow is missing.
    """
    check_target(target)
    if file_format == "parquet":
        require_pyarrow()
    if not (workdir / "config.json").is_file():
        raise UserError(f"{workdir} is not the work directory of a run: it has no config.json; give the --workdir of a run")
    run = read_facts(workdir)
    read = {name: SETS[name].read(run) for name in _available(run, names)}
    sets = {name: made for name, made in read.items() if made.splits}  # `datasets` cannot load a set without rows.
    facts, sentences = [], [f"set {name} has no rows and is left out" for name in read if name not in sets]
    if not sets:
        raise UserError(f"{workdir} has no rows to export in {', '.join(read)}; the warnings of its report tell why")
    with whole_folder(target) as folder:
        for name, made in sets.items():
            files = []
            for split, rows in made.splits.items():
                file = f"{name}/{split}.{file_format}"
                (folder / name).mkdir(exist_ok=True)
                WRITERS[file_format](folder / file, rows, {column: kind for column, (kind, _) in made.columns.items()})
                files.append((split, file, len(rows)))
                sentences.append(f"{target / file} has {len(rows):,} rows")
            columns = tuple((column, *described) for column, described in made.columns.items())
            left_out = tuple(made.left_out.items())
            facts.append(SetFacts(name, SETS[name].stage, made.purpose, tuple(files), columns, left_out))
        (folder / "README.md").write_text(dataset_card(run, facts), encoding="utf-8")
    return [*sentences, f"{target / 'README.md'} describes the data; datasets.load_dataset({str(target)!r}, NAME) loads it, "
                        f"with NAME {' or '.join(sets)}"]


def _available(run: RunFacts, names: Sequence[str]) -> list[str]:
    """The names of the sets to export, whose stages are finished and unchanged."""
    storage, found = LocalStorage(run.workdir), []
    for name in names or SETS:
        stage = SETS[name].stage
        manifest = find_manifest(storage, stage)
        if manifest is None:
            if names:
                raise UserError(f"{run.workdir} has no stage {stage}, which makes the set {name}; leave {name} out of --sets")
            continue
        if manifest.status != DONE:
            raise UserError(f"stage {stage} is unfinished in {run.workdir}; finish it first, or leave {name} out of --sets")
        changes = output_changes(storage, stage, manifest)
        if changes:
            raise UserError(f"stage {stage} of {run.workdir} cannot be exported: {changes[0]}; restore the file, or run the "
                            "stage again")
        found.append(name)
    if not found:
        raise UserError(f"{run.workdir} has no rows to export: it has neither stage revise nor stage compare, and files that "
                        "a run only read are not exported; give a run with one of them")
    return found


def _context(run: RunFacts, stage: str) -> StageContext:
    finished = finished_stage(run.workdir / stage)
    return StageContext(finished.config, run.workdir, run.workdir / stage, False)


def _reader(run: RunFacts, stages: Iterable[str]) -> str | None:
    """The first of the stages that is finished and has read the rows."""
    return next((name for name in stages if run.stage(name).done), None)


def _read_sft(run: RunFacts) -> _Set:
    reader = _reader(run, ("sft",))
    context = _context(run, reader or "revise")
    with _quietly():
        train, held_out, report = revision_split(context)
    plain = context.config.data.style == "plain"
    splits = {"train": [_sft_row(row, plain) for row in train], "test": [_sft_row(row, plain) for row in held_out]}
    which = "all rounds" if context.config.sft.rounds_used == "all" else "the last round"
    purpose = f"Answers to imitate: the revisions of {which} and the answers that were not revised"
    return _Set(columns_of(SFT, plain), purpose, _filled(splits), report.reasons)


def _sft_row(row: Mapping[str, Any], plain: bool) -> Row:
    messages, answer = row_answer(row)
    prompt, completion = _turns(messages, plain), _answer(answer, plain)
    dialogue = {} if plain else {"messages": [*prompt, *completion]}
    return {"prompt": prompt, "completion": completion, **dialogue, "round": row["round"], "principle": row["principle"],
            "prompt_id": row["prompt_id"], "source": row["source"]}


def _read_preference(run: RunFacts) -> _Set:
    reader = _reader(run, ("preference", "dpo"))
    context = _context(run, reader or "compare")
    train, held_out = _pairs(context, reader)
    plain = context.config.data.style == "plain"
    splits = {split: [_preference_row(pair, plain) for pair in pairs if pair.decided and pair.label != 0.5]
              for split, pairs in (("train", train), ("test", held_out))}
    left_out = dict(run.stage("compare").summary.get("outcomes") or {})
    dropped = run.stage(reader).left_out.get("stage compare", {}).get("dropped", 0) if reader else 0
    left_out |= {f"they do not fit into stage {reader}": dropped} if dropped else {}
    return _Set(columns_of(PREFERENCE, plain), "Pairs of answers with a decided label", _filled(splits), left_out)


def _pairs(context: StageContext, reader: str | None) -> tuple[list[Comparison], list[Comparison]]:
    """(training pairs, held-out pairs) of stage compare, as the stage that reads them splits them."""
    with _quietly():
        if reader is None:
            return read_comparisons(Shards(context.workdir / "compare"), "drop"), []
        tokenizer = run_models.load_tokenizer(context)
        if reader == "dpo":
            return labelled_split(context, tokenizer, context.config.dpo)[:2]
        pairs = preference_pairs(context, tokenizer)
    train, *held_out = ([pair for pair in part if not is_human(pair)] for part in (pairs.train, pairs.choosing, pairs.held_out))
    return train, [pair for part in held_out for pair in part]


def _preference_row(pair: Comparison, plain: bool) -> Row:
    """A row for trainers of preferences. The scores are the probabilities that each answer is the better one."""
    first = pair.label > 0.5
    chosen, rejected = (pair.response_a, pair.response_b) if first else (pair.response_b, pair.response_a)
    score = pair.label if first else 1 - pair.label
    return {"prompt": _turns(pair.prompt.messages, plain), "chosen": _answer(chosen, plain),
            "rejected": _answer(rejected, plain), "score_chosen": score, "score_rejected": 1 - score,
            "principle": pair.principle, "prompt_id": pair.prompt.id, "source": pair.prompt.source}


def _read_labels(run: RunFacts) -> _Set:
    rows: list[Row] = []
    for row in Shards(run.workdir / "compare").read():
        verdicts = [{entry["name"]: label.get(entry["name"]) for entry in VERDICTS["list"]} for label in row.get("labels", ())]
        listed = {name: row.get(name, []) for name in ("notes", "incomplete")}
        rows.append({name: row.get(name) for name in LABELS} | {"labels": verdicts} | listed)
    return _Set(LABELS, "All pairs that stage compare asked the judge about, with its verdicts", _filled({"train": rows}), {})


SETS = {
    "sft": _Maker("revise", _read_sft),
    "preference": _Maker("compare", _read_preference),
    "labels": _Maker("compare", _read_labels),
}
"""The sets by name."""


def _turns(messages: Iterable[Any], plain: bool) -> Any:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return turns[0]["content"] if plain else turns


def _answer(text: str, plain: bool) -> Any:
    return text if plain else [{"role": "assistant", "content": text}]


def _filled(splits: Mapping[str, Sequence[Row]]) -> dict[str, Sequence[Row]]:
    return {split: rows for split, rows in splits.items() if rows}


def _quietly() -> contextlib.AbstractContextManager:
    """Leaves out the reports that the stages print on their rows: the card states the counts."""
    return contextlib.redirect_stdout(io.StringIO())
