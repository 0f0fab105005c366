"""The explanations of the numbers in the first section, each with the page and section of the documentation."""

from __future__ import annotations

from jaxalign.tracking.estimates import MAIN
from jaxalign.tracking.measures import MEASURES, quantities
from jaxalign.tracking.report.prose import conflict_sentences
from jaxalign.tracking.workdir import RunFiles


def terms(run: RunFiles) -> list[tuple[str, str, str]]:
    """(term, explanation, place in the documentation) for the numbers that the first section shows."""
    shown, evaluation = [], run.evaluation
    rates = {name for row in (evaluation.get("rates") or {}).values() for name in row or {}}
    for name, about in MEASURES.items():
        if name in rates and name in MAIN:
            page = "docs/rewards.md" if name == "correct" else "docs/world.md, “The gold judge”"
            shown.append((about.title, f"the share of {about.meaning}", page))
    compared = evaluation.get("win_rates") and (not rates or conflict_sentences(run))
    if rates or compared:
        shown.append(("95% interval", "for a rate the Wilson interval, for a mean the normal approximation: the values "
                      "that agree with the prompts that were asked",
                      _FILES))
    if len(run.models) > 1:
        shown.append(("More than noise", "the 95% interval of a difference does not contain 0; otherwise it is within noise",
                      "docs/watching.md, “What changed”"))
    if compared:
        shown.append(("Win rate", "the share of prompts for which the judge prefers the answer of one model over that of the "
                      "other, asked in both orders; an undecided or equal pair counts as half a win", _FILES))
    for quantity in () if rates else quantities(run.kl_reference):
        if any(value is not None for value in (evaluation.get(quantity.field) or {}).values()):
            shown.append((quantity.title, *_QUANTITIES[quantity.field]))
    if run.stage("revise").summary:
        shown.append(("Can be trained on", "a row whose text ended and was not refused; sft.keep admits further rows, and "
                      "sft.rounds_used selects the rounds", "docs/algorithms/supervised_cai.md, “Details”"))
    if run.stage("compare").summary:
        shown.append(("Decided label", "the judge prefers the same answer in both orders, and the mean over the orders differs "
                      "from 0.5 by more than the margin", "docs/labels.md, “From log-probabilities to a label”"))
    if run.stage("ppo").summary.get("checks"):
        shown.append(("Run-time checks", "measurements before the first update that detect errors of the implementation or of "
                      "the settings", "docs/ppo.md, “Checks”"))
    if not run.evaluation and (run.stage("pretrain").summary or run.stage("sft").summary):
        shown.append(("Loss", "the mean cross-entropy, in nats per token, of the first and of the last step", _FILES))
    return shown


_FILES = "docs/data_formats.md, “Files of the stages”"
_QUANTITIES = {
    "kl": ("how far the model has moved from the reference: the mean over its answers of log P(answer) under the model minus "
           "log P(answer) under the reference", "docs/ppo.md, “KL to the reference”"),
    "length": ("the mean number of tokens of an answer", _FILES),
    "preference_score": ("the mean score that the preference model gives to the answers; only differences have a meaning",
                         "docs/algorithms/preference_model.md, “Formula”"),
    "reward": ("the mean score that the function reward.callable gives to the answers that it can score", "docs/rewards.md"),
    "repetition": ("the mean share of the 4-grams of words of an answer that occur earlier in it", "docs/win_rates.md"),
    "text_loss": ("the mean negative log-probability of the tokens of evaluate.texts", "docs/win_rates.md"),
    "text_loss_per_byte": ("the negative log-probability of the texts of evaluate.texts divided by their bytes in UTF-8",
                           "docs/win_rates.md"),
}
