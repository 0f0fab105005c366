"""Stage pretrain counts the documents that it cuts."""

from __future__ import annotations

from jaxalign.config import PretrainConfig
from jaxalign.stages import pretrain
from tests.feedback.fakes import WordTokenizer


def test_documents_that_are_cut_are_counted_with_their_lost_tokens(capsys):
    """With their first and last symbols, the documents have 8, 9 and 15 tokens. In rows of 8, the last two lose 1 and 7 of 24
    tokens."""
    documents = [("word " * count,) for count in (6, 7, 13)]
    rows, lengths = pretrain._pack(documents, WordTokenizer(), PretrainConfig(row_length=8))
    assert rows.tokens.shape == (3, 8) and lengths == [8, 9, 15]
    assert pretrain._cut_documents(lengths, 8) == {"documents": 3, "cut": 2}
    assert capsys.readouterr().out == (
        "[pretrain] warning: 2 of 3 documents are longer than pretrain.row_length (8 tokens) and lose 33.3% of their tokens; "
        "raise it, or split them\n"
    )


def test_documents_that_fit_cause_no_warning(capsys):
    assert pretrain._cut_documents([8, 3], 8) == {"documents": 2, "cut": 0} and not capsys.readouterr().out
