"""The models of a run, their roles, and the data that they read, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

from jaxalign.endpoint.redaction import shown_url
from jaxalign.reasons import MOSTLY
from jaxalign.registry.core import names_in
from jaxalign.tracking.formatting import capitalized, percent
from jaxalign.tracking.measures import model_phrase, model_title
from jaxalign.tracking.requests import FIELD
from jaxalign.tracking.workdir import RunFiles

_DUTIES = {
    "revise": "criticised and revised the base model's answers",
    "compare": "labelled the pairs of answers",
    "online_dpo": "labelled the pairs of answers of online DPO",
    "ppo": "rated the answers during RL",
    "evaluate": "decided the win rates",
}
"""The work of a judge in each stage that may ask one."""

_GENERATED = {"world": "the embedded world (docs/world.md)", "arithmetic": "generated arithmetic tasks"}
_TASKS = "prompts for labels and RL"
_REVISED = ("prompts whose answers are revised", "prompts that are answered without revision")
_FILES = {
    "train": {"prompts_jsonl": _TASKS, "judgements_jsonl": "judged answers", "messages_jsonl": "answered dialogues"},
    "extra_train": {"judgements_jsonl": "judged answers"},
    "red_team": _REVISED[0],
    "helpful": _REVISED[1],
    "rl": _TASKS,
    "eval": "prompts for evaluation only",
}
"""What the files of `config.data` contain, by field; for a field that sources read differently, by source."""


def role_sentences(run: RunFiles) -> list[str]:
    """Names the base model, each judge with its work, what each model was trained on, and the data."""
    if not run.config:
        return []
    return [*_base_sentence(run), *_judge_sentences(run), *_training_sentences(run), *_data_sentence(run)]


def judge_phrase(run: RunFiles, stage: str) -> str:
    """The judge of a stage in a sentence: "the base model", "your judge judge.py:Judge", "the model FOLDER", "the model NAME
    at URL"."""
    section = run.config.get("judge") or {}
    name = section.get(stage) or (run.config.get("feedback") or {}).get("judge") or "local"
    if name == "local":
        return "the base model"
    if name == "model":
        folders = section.get("path") or ()
        folders = [folders] if isinstance(folders, str) else list(folders)
        return f"the model {folders[0]}" if len(folders) == 1 else f"a jury of the models {joined(folders)}"
    return _server_phrase(run, stage) if name == "endpoint" else f"your judge {name}"


def judge_models(run: RunFiles, stage: str) -> frozenset[str]:
    """The models that judge in a stage, to compare stages: folders, the server with its model, the location of a class, or
    "local" for a model of the run that is not a folder."""
    section = run.config.get("judge") or {}
    name = section.get(stage) or (run.config.get("feedback") or {}).get("judge") or "local"
    model = run.config.get("model") or {}
    if name == "local":
        return frozenset([(model.get("path") if model.get("source") == "huggingface" else "") or "local"])
    if name == "model":
        folders = section.get("path") or ()
        return frozenset([folders] if isinstance(folders, str) else folders)
    return frozenset([_server_phrase(run, stage) if name == "endpoint" else name])


def _server_phrase(run: RunFiles, stage: str) -> str:
    """The model of the server that judges in a stage, with the server's first URL. The name of the model is in the stage's
    summary, unless the config has it."""
    section = run.config.get("endpoint") or {}
    model = (run.stage(stage).summary.get(FIELD) or {}).get("model") or section.get("model")
    urls = section.get("url") or ()
    urls = [urls] if isinstance(urls, str) else list(urls)
    place = f" at {shown_url(urls[0])}" if urls else ""
    return f"the model {model}{place}" if model else f"the model of the server{place}"


def joined(parts: Sequence[str]) -> str:
    """The parts as a list in words: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _base_sentence(run: RunFiles) -> list[str]:
    model = run.config.get("model") or {}
    if model.get("source") == "huggingface" and model.get("path"):
        origin = f"is {model['path']}"
    elif run.stage("pretrain").started:
        origin = "was trained by stage pretrain of this run"
    else:
        return []
    sentence = f"The base model (“{model_title('base', run.used)}”) {origin}"
    return [f"{sentence}; it answered the prompts of stage revise." if run.stage("revise").started else f"{sentence}."]


def _judge_sentences(run: RunFiles) -> list[str]:
    """Sentences on the author of the pairs, on each judge, and on the constitution."""
    duties: dict[str, list[str]] = {}
    for stage in judging_stages(run):
        judge = judge_phrase(run, stage)
        if stage == "revise" and judge.startswith("a jury"):  # Its first member writes.
            judge = f"the first model of {judge}"
        own = stage == "revise" and judge == "the base model"
        done = _evaluation_duties(run) if stage == "evaluate" else [_DUTIES[stage]]
        duties.setdefault(judge, []).extend(["criticised and revised its own answers"] if own else done)
    sentences = []
    if run.stage("compare").started:
        writer = capitalized(model_phrase(run.start_of("compare"), run.used))
        sentences.append(f"{writer} wrote the pairs of answers of stage compare.")
    sentences += [f"{capitalized(judge)} {joined(done)}." for judge, done in duties.items()]
    feedback = run.config.get("feedback") or {}
    if sentences and feedback.get("constitution"):
        sentences.append(f"Feedback followed the constitution “{feedback['constitution']}”.")
    return sentences


def judging_stages(run: RunFiles) -> Iterable[str]:
    """The stages that have asked a judge."""
    for stage in _DUTIES:
        if not run.stage(stage).started:
            continue
        if stage == "ppo" and "ai_feedback" not in names_in((run.config.get("reward") or {}).get("source") or ""):
            continue
        if stage == "evaluate" and not _evaluation_duties(run):
            continue
        yield stage


def _evaluation_duties(run: RunFiles) -> list[str]:
    rated = ["rated the answers by rubrics"] if run.evaluation.get("rubrics") else []
    return ([_DUTIES["evaluate"]] if run.evaluation.get("win_rates") else []) + rated


def _training_sentences(run: RunFiles) -> list[str]:
    """What each model of rewards or policy was trained on, by the manifests of the stages."""
    sentences = []
    if run.stage("sft").started:
        revised = run.reads("sft", "revise")
        demonstrated = "answers" in (run.stage("sft").summary.get("data") or {})
        source = ("the revisions and answers of stage revise" if revised else
                  "the answers of the data" if demonstrated else "the preferred answers of the data")
        sentences.append(f"Fine-tuning imitated {source}.")
    sentences += _preference_sentence(run)
    if run.stage("dpo").started:
        judged = "judged answers" if run.stage("dpo").summary.get("balance") else "comparisons"
        source = "the labels of stage compare" if run.reads("dpo", "compare") else f"the {judged} of the data"
        sentences.append(f"DPO learned from {source}.")
    parts = _reward_parts(run)
    if parts and parts != ["preference"]:
        phrases = [_reward_phrase(run, part) for part in parts]
        sentences.append(f"The reward of RL was {phrases[0]}." if len(phrases) == 1 else
                         f"The reward of RL was the sum of {joined(phrases)}.")
    changed = [share for share in run.stage("ppo").column("score_changed")[1] if math.isfinite(share)]
    if parts and changed and (mean := sum(changed) / len(changed)) > MOSTLY:
        setting = (run.config.get("ppo") or {}).get("missing_eos")
        sentences.append(f"But ppo.missing_eos ({setting}) changed the scores of {percent(mean)} of the responses, which have "
                         "no stop token.")
    return sentences


def _preference_sentence(run: RunFiles) -> list[str]:
    stage = run.stage("preference")
    if not stage.started:
        return []
    source = "these labels" if run.reads("preference", "compare") else "the comparisons of the data"
    counted = [("", source)]
    if stage.summary.get("human"):
        counted = [("ai", source), ("human", "the human comparisons of preference.human")]
    parts = []
    for name, rows in counted:
        pairs = ((stage.summary.get(name) or {}) if name else stage.summary).get("train_pairs")
        parts.append(rows if pairs is None else f"{pairs:,} of {rows}")
    held_out = (stage.summary.get("held_out") or {}).get("pairs")
    rest = "" if held_out is None else f" ({held_out:,} more were held out to measure its accuracy)"
    scored = ", and its scores were the reward of RL" if _reward_parts(run) == ["preference"] else ""
    return [f"The preference model was trained on {joined(parts)}{rest}{scored}."]


def _reward_parts(run: RunFiles) -> list[str]:
    """The names of the sources of the reward of RL; empty if RL has not started."""
    source = (run.config.get("reward") or {}).get("source") or "preference"
    return list(names_in(source)) if run.stage("ppo").started else []


def _reward_phrase(run: RunFiles, part: str) -> str:
    reward = run.config.get("reward") or {}
    return {
        "preference": "the score of the preference model",
        "distilled": "the score of the student of the preference model",
        "model": f"the score of the model {reward.get('model')}",
        "callable": f"the function {reward.get('callable')}",
        "verifier": f"the verifier {reward.get('verifier')}",
        "ai_feedback": f"the rating of {judge_phrase(run, 'ppo')}",
    }.get(part, f"the reward source {part}")


def rewards_rl(run: RunFiles) -> bool:
    """Whether the preference model's scores were the reward of RL, or a part of it."""
    return "preference" in _reward_parts(run)


def _data_sentence(run: RunFiles) -> list[str]:
    data = run.config.get("data") or {}
    source = data.get("source")
    if source in _GENERATED:
        return [f"The prompts come from {_GENERATED[source]}."]
    files = []
    for field, contents in _FILES.items():
        kind = contents.get(source, "preferences") if isinstance(contents, Mapping) else contents
        if kind in _REVISED and not run.stage("revise").started:
            kind = "prompts"
        elif kind == _TASKS:
            labels = run.stage("compare").started or run.stage("online_dpo").started
            purposes = ["labels"] * labels + ["RL"] * run.stage("ppo").started
            kind = f"prompts for {joined(purposes)}" if purposes else "prompts"
        paths = data.get(field) or ()
        files += [f"{PurePath(path).name} ({kind})" for path in ([paths] if isinstance(paths, str) else paths)]
    if files:
        return [f"Data: {joined(files)}."]
    return [f"The data come from the source {source}."] if source else []
