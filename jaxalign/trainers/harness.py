"""Runs tasks of lm-evaluation-harness (arXiv 2405.14782) on language models: `jaxalign.lm_eval`. Requires lm-eval (the extra
"eval"), which is imported on first use."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxalign.config.arguments import SEED, as_name, as_path, instance_of
from jaxalign.config.constraints import at_least, between
from jaxalign.config.schema import checked
from jaxalign.errors import UserError
from jaxalign.models.language_model import LanguageModel
from jaxalign.registry.custom import custom_code

if TYPE_CHECKING:
    from jaxalign.trainers.harness_model import HarnessModel

BOOTSTRAP = 1000
"""The number of resamples for the standard error of metrics that are not means, such as perplexity."""
_FEWSHOT_SEED, _RANDOM_SEED, _NUMPY_SEED = 1234, 0, 1234  # The defaults of `lm_eval.simple_evaluate`.
_MODEL = "a language model from load_model"


def lm_eval_model(
    policy: LanguageModel, *, batch: int = 64, max_length: int = 0, seed: int = 0, progress: bool = True
) -> HarnessModel:
    """A language model as an `lm_eval.api.model.LM`, for `lm_eval.simple_evaluate(model=...)`.

    Args:
      policy: the language model.
      batch: the maximum number of rows that are scored or sampled together. Rows of more than 512 tokens are scored in smaller
        batches.
      max_length: the maximum number of tokens that the model reads; 0: `policy.max_length`.
      seed: the seed of sampled answers, for tasks with a temperature above 0.
      progress: whether to show progress bars on stderr.

    Raises:
      UserError: an argument is not valid, or lm-eval is not installed.
    """
    instance_of(policy, LanguageModel, "policy", _MODEL)
    batch, seed = checked(batch, int, "batch", at_least(1)), checked(seed, int, "seed", SEED)
    max_length = checked(max_length, int, "max_length", between(0, policy.max_length)) or policy.max_length
    progress = checked(progress, bool, "progress")
    require_lm_eval("lm_eval_model")
    from jaxalign.trainers.harness_model import HarnessModel

    return HarnessModel(policy, batch, max_length, seed, progress)


def lm_eval(
    models: LanguageModel | Mapping[str, LanguageModel], tasks: Sequence[str], *, include: str | Path = "", limit: int = 0,
    chat: bool = False, batch: int = 64, max_length: int = 0, seed: int = 0, progress: bool = True,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Runs tasks of lm-evaluation-harness on language models, in this process.

    Args:
      models: the models by name; a single model is called "model".
      tasks: names of tasks, groups and tags.
      include: a folder with YAML files of further tasks; "": none.
      limit: the number of documents of each task; 0: all.
      chat: whether requests are dialogues in the model's chat template. Examples in the prompt are then earlier turns.
      batch, max_length, seed, progress: see `lm_eval_model`.

    Returns:
      {model: {task: {"metrics": {metric: {"value", "stderr"}}, "documents", "shots", "version"}}}: see `run_tasks`.

    Raises:
      UserError: an argument is not valid, a task is unknown or cannot be read, or lm-eval is not installed.
    """
    models = dict(models) if isinstance(models, Mapping) else {"model": models}
    if not models:
        raise UserError("lm_eval(models) is empty; at least one language model is expected")
    for name, model in models.items():
        as_name(name, "a name in lm_eval(models)")
        instance_of(model, LanguageModel, f"lm_eval(models)[{name!r}]", _MODEL)
    instance_of(tasks, list | tuple, "lm_eval(tasks)", "a list of names of tasks")
    tasks = tuple(as_name(task, "a name in lm_eval(tasks)") for task in tasks)
    include = str(as_path(include, "lm_eval(include)")) if include else ""
    limit, chat = checked(limit, int, "limit", at_least(0)), checked(chat, bool, "chat")
    check_tasks(tasks, include, "lm_eval(tasks)")
    return {
        name: run_tasks(lm_eval_model(model, batch=batch, max_length=max_length, seed=seed, progress=progress), tasks, include,
                        limit, chat, "lm_eval(tasks)")
        for name, model in models.items()
    }


def require_lm_eval(name: str) -> None:
    """Raises UserError if lm-eval is not installed. name: the function or field that needs it."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"{name} needs lm-eval, which is not installed; run `pip install 'jaxalign[eval]'`")


def check_tasks(tasks: Sequence[str], include: str, where: str) -> None:
    """Checks the names of tasks without reading their data.

    Args:
      tasks: names of tasks, groups and tags.
      include: a folder with YAML files of further tasks; "": none.
      where: the field or argument with the names.

    Raises:
      UserError: lm-eval is not installed, the folder does not exist, there are no tasks, or one is unknown or given twice.
    """
    require_lm_eval(where)
    if include and not os.path.isdir(include):
        raise UserError(f"{where} cannot use the tasks of {include}, which is not a folder; give the folder of the YAML files")
    if not tasks:
        raise UserError(f"{where} is empty; name at least one task")
    known = _manager(tuple(tasks), include).all_tasks
    for task in tasks:
        if tasks.count(task) > 1:
            raise UserError(f"{where} has {task!r} twice; name each task once")
        if task not in known:
            near = difflib.get_close_matches(task, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists the tasks"
            raise UserError(f"{where} has {task!r}, which is not a task, group or tag of lm-eval; {hint}")


def run_tasks(
    lm: HarnessModel, tasks: Sequence[str], include: str, limit: int, chat: bool, where: str
) -> dict[str, dict[str, Any]]:
    """Runs tasks on a model with the defaults of `lm_eval.simple_evaluate`, except that metrics other than means have the
    standard error of `BOOTSTRAP` resamples.

    Args:
      lm: the model.
      tasks, include, where: as in `check_tasks`, which has been called.
      limit: the number of documents of each task; 0: all.
      chat: whether requests are dialogues in the chat template.

    Returns:
      For each task, and for each group that has metrics of its own: "metrics", {name: {"value", "stderr"}}, where the name has
      the form "exact_match,FILTER" if the task filters answers, and "stderr" is None if it is unknown; "documents", their
      number; "shots", the number of examples in a prompt, and "version", both None for a group.

    Raises:
      UserError: a task cannot be read, runs code that models write, or reads images.
    """
    from lm_eval.evaluator import evaluate

    with custom_code(where):
        loaded = _manager(tuple(tasks), include).load(list(tasks))
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"{where} has {name!r}, which runs code that the model writes; run it with lm-eval itself on an "
                            "exported model, in a container")
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"{where} has {name!r}, which has images or sounds; jaxalign reads only text")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    with _own_process():
        found = evaluate(
            lm=lm, task_dict=loaded, limit=limit or None, bootstrap_iters=BOOTSTRAP, log_samples=False,
            apply_chat_template=chat, fewshot_as_multiturn=chat,
        )
    results = {name: _task_result(name, result, found) for name, result in found["results"].items()}
    return {name: result for name, result in results.items() if result["metrics"]}


def _task_result(name: str, result: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    values = {key.removesuffix(",none"): value for key, value in result.items() if "," in key}
    metrics = {}
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if not metric.endswith("_stderr"):
            metrics[key] = {"value": _number(value), "stderr": _number(values.get(f"{metric}_stderr{comma}{kind}"))}
    version = found["versions"].get(name)
    return {"metrics": metrics, "documents": result.get("sample_len"), "shots": found["n-shot"].get(name),
            "version": None if version in (None, "N/A") else str(version)}


def _number(value: Any) -> float | None:
    number = isinstance(value, int | float | np.number) and math.isfinite(value)
    return float(value) if number else None


@functools.lru_cache(maxsize=2)
def _manager(tasks: tuple[str, ...], include: str) -> Any:
    """The `TaskManager` that knows the tasks. That of lm-eval's own tasks reads 14,000 files, so it is made only if the folder
    `include` lacks a task."""
    from lm_eval.tasks import TaskManager

    if include:
        own = TaskManager(include_path=include, include_defaults=False)
        if set(tasks) <= set(own.all_tasks):
            return own
    return TaskManager(include_path=include or None)


@contextlib.contextmanager
def _own_process() -> Iterator[None]:
    """Seeds Python's and NumPy's random numbers, which some tasks use, and keeps lm-eval from starting processes: a process
    with JAX must not fork. Both are restored at the end."""
    before, states = os.environ.get("DISABLE_MULTIPROC"), (random.getstate(), np.random.get_state())
    os.environ["DISABLE_MULTIPROC"] = "1"
    random.seed(_RANDOM_SEED)
    np.random.seed(_NUMPY_SEED)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
