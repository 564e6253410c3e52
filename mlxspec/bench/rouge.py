"""ROUGE: how much of a reference text an output has. Needs the library ``rouge-score``."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean

from ..errors import OptionError

_KINDS = ("rouge1", "rouge2", "rougeL")


def require_rouge() -> None:
    """Raise OptionError unless the library is installed."""
    try:
        import rouge_score  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "--references needs the library rouge-score: pip install 'mlxspec[rouge]'"
        ) from error


def rouge(pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L, 0 to 1, over pairs of reference and output.

    (Chin-Yew Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004; no stemming.)
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(_KINDS)
    scores = [scorer.score(reference, output) for reference, output in pairs]
    return {kind: mean(score[kind].fmeasure for score in scores) for kind in _KINDS}
