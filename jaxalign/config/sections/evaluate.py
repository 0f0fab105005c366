"""Stage evaluate: metrics on held-out prompts."""

from __future__ import annotations

import dataclasses

from jaxalign.config.constraints import at_least, between
from jaxalign.config.reading import unless
from jaxalign.config.schema import field, like
from jaxalign.config.sections.shared import SamplingFields

_TASKS = unless("lm_eval", (), "to tasks")
_RATED = unless("rubrics", "", "to default or a file")


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(SamplingFields):
    """Gold metrics, win rates, rates by rubrics, KL and length on held-out prompts."""

    prompts: int = field(512, "Number of prompts that each model answers.", at_least(1))
    batch: int = field(128, "Prompts per chunk; also the number of rows decoded together. Up to 4 chunks form one queue.",
                       at_least(1))
    temperature: float = like(SamplingFields, "temperature", default=0.7, doc="Sampling temperature; 0 is greedy.",
                              check=at_least(0))
    win_rate_prompts: int = field(128, "Number of prompts on which the labeller compares models; 0: none.", at_least(0))
    rubrics: str = field("", "Rubrics by which the judge rates the answers, for rates without a gold judge: default, or the "
                         "path of a JSON file; empty: none. See docs/labels.md.")
    rubric_column: str = field("kind", "The column of the prompts whose value says which rubrics rate the answers, such as "
                               "harmful, benign or borderline; if the prompts lack it, their source does. Empty: every rubric "
                               "rates all answers.", None, _RATED)
    rubric_margin: float = field(1.0, "A rating by a rubric that is closer to the rubric's cut than this is undecided.",
                                 between(0.0, 4.5), _RATED)
    examples: int = field(12, "Number of prompts shown in the report, with each model's answer.", at_least(0))
    texts: str = field("", "File of held-out plain texts whose loss is measured under every model: rows with a field text, or "
                       "a .txt file with one text per line; empty: none.")
    choices: str = field("", "JSONL file of questions with several answers, rows with prompt, choices and correct (an index), "
                         "for the accuracy by log-probabilities; empty: none.")
    lm_eval: tuple[str, ...] = field((), "Tasks, groups and tags of lm-evaluation-harness that each model is measured on, such "
                                     "as hellaswag; needs the extra eval.")
    lm_eval_include: str = field("", "Folder with YAML files of further tasks for lm_eval; empty: none.", None, _TASKS)
    lm_eval_limit: int = field(0, "Number of documents of each task of lm_eval; 0: all.", at_least(0), _TASKS)
    lm_eval_chat: bool = field(False, "Ask the requests of lm_eval in the model's chat template.", None, _TASKS)
