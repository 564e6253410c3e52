"""Estimates the probability that a continuation is right (p_accept); learns from every token."""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache
from importlib.resources import files
from itertools import repeat
from math import exp, log
from typing import Any, Protocol

from ..corpus.suffix_index import Continuation

_RATE = 0.07  # of learning; fast enough to follow a user whose requests change


class Corrections(dict[int, float]):
    """Weights of features, learned by gradient descent on the logarithmic loss."""

    def logit(self, features: Sequence[int]) -> float:
        """The correction to the logit of a continuation with these features."""
        return sum(map(self.get, features, _NOTHING))

    def learn(self, features: Sequence[int], logit: float, right: bool) -> None:
        """Learn whether a continuation was right.

        Args:
            features: the continuation's features.
            logit: the logit of its p_accept without corrections.
            right: whether it was right.
        """
        error = right - probability(logit + self.logit(features))
        for feature in features:
            self[feature] = self.get(feature, 0.0) + _RATE * error


def probability(logit: float) -> float:
    """The logistic function."""
    return 1 / (1 + exp(-logit))


_NOTHING = repeat(0.0)  # the weights of features that have never been seen


# The classes of tokens; some are easier to predict than others.
WORD_START, CONTINUATION, PUNCTUATION, DIGIT, BYTE_OR_NEWLINE, SPECIAL = range(6)
SPACED_PUNCTUATION, UNKNOWN = 6, 7
_N_CLASSES = 8


class TokenClasses(Protocol):
    """The class of each token id of a vocabulary, such as ``bytes``."""

    def __getitem__(self, token: int, /) -> int: ...

    def __len__(self) -> int: ...


def token_classes(pieces: Iterable[str], special: Container[int]) -> bytes:
    """Classify a vocabulary.

    Args:
        pieces: each token's piece in the order of ids.
        special: the ids of control tokens.

    Returns:
        the class of each token id.
    """
    return bytes(
        SPECIAL if token in special else class_of(piece) for token, piece in enumerate(pieces)
    )


def class_of(piece: str) -> int:
    """The class of a token that is not special.

    Args:
        piece: the token as SentencePiece (``▁the``, ``<0x0A>``) or byte-level BPE (``Ġthe``, ``Ċ``)
            writes it.
    """
    if piece.startswith("<0x") and piece.endswith(">"):
        return BYTE_OR_NEWLINE
    text = piece.replace("▁", " ").replace("Ġ", " ").replace("Ċ", "\n").replace("ĉ", "\t")
    word = text.lstrip(" ")
    if "\n" in text or "\t" in text:
        return BYTE_OR_NEWLINE
    if not word:
        return WORD_START
    if word != text:
        return WORD_START if word[0].isalnum() else SPACED_PUNCTUATION
    if word.isdigit():
        return DIGIT
    return CONTINUATION if word[0].isalpha() else PUNCTUATION


# Where these come from: notes/planner.md, "Constants".
_MAX_LENGTH = 512  # longer matches count as this long
_LOWEST, _HIGHEST = 1e-4, 0.998

# If a p_accept is wrong by less than this, nothing is learned, which saves most of the learning in
# long copies. So p_accept rarely rises above 0.99.
_SURE = 0.01
_FIRST_HIT_RATE, _CHANGE = 0.3, 0.1  # how often best continuations are right: a running average

# Features have numbers, under which experience stores their weights. The numbers of each kind of
# feature follow those of the previous kind. Tokens, whose number is unlimited, come last. A
# continuation has one of three forms: without a competitor, the best of several, one of the others.
_FORMS, _LOWER_RANKED = 3, 2
_LONGEST_RUN = 10  # as an exponent of two
_LENGTH_BOUNDS = (1, 2, 3, 4, 5, 6, 8, 12, 20, 32)  # the bounds of the classes of match lengths
_NO_GAP = 5
_RUN = 0
_CLASSES = _RUN + 2 * (_LONGEST_RUN + 1)
_LENGTH = _CLASSES + _N_CLASSES**2
_GAP = _LENGTH + _FORMS * (len(_LENGTH_BOUNDS) + 1)
_IN_PROMPT = _GAP + _NO_GAP + 1
TOKEN_FEATURES = _IN_PROMPT + _FORMS * 2
"""Features from this number on stand for single tokens. Their weights would reveal texts."""


Estimate = tuple[float, float, tuple[int, ...]]
"""Of a continuation: its p_accept, given that its path is right and the better continuations are
wrong; the logit of this p_accept without corrections; and its features."""


class AcceptanceModel:
    """A logistic model of a continuation's p_accept, with corrections learned online.

    The evidence is the match's length, the numbers of occurrences that agree and disagree with the
    continuation, their distance, the token's class, its rank among the continuations, and the
    recent hit rate. There are three vectors of weights: for continuations without a competitor, for
    the best of several, and for the others. They were fitted on replayed outputs, and are in
    ``p_accept_prior.json``.

    Args:
        classes: the class of each token id; ids beyond the end are UNKNOWN.
        earlier: whether the continuations come from other, earlier texts instead of the context.
    """

    def __init__(self, classes: TokenClasses = b"", *, earlier: bool = False) -> None:
        self._classes = classes
        self._earlier = earlier
        self._unanimous, self._divided, self._lower_ranked = _weights()
        self.begin()

    def begin(self, corrections: Sequence[Corrections] = (), output_start: int = 0) -> None:
        """Start a generation.

        Args:
            corrections: the corrections of earlier generations. All of them learn, but only the
                first is used. By default, new corrections for this generation alone.
            output_start: the index in the text at which the output begins.
        """
        self._corrections = corrections or [Corrections()]
        self._output_start = output_start
        self._hit_rate = _FIRST_HIT_RATE
        self._logit_hit_rate = _logit(self._hit_rate)
        self._run = 0  # consecutive tokens whose best continuation was right

    def estimate(
        self, ranked: Sequence[Continuation], end: int, depth: int, before: int, limit: int
    ) -> list[Estimate]:
        """Estimate the probabilities of the continuations of one node.

        Args:
            ranked: all continuations of the node, best first.
            end: the length of the indexed text.
            depth: the node's depth; 0 for the root, the text's last token.
            before: the node's token.
            limit: the most continuations to estimate.
        """
        occurrences = sum([len(continuation.occurrences) for continuation in ranked])
        classes, output_start = self._classes, self._output_start - depth
        class_before = classes[before] if before < len(classes) else UNKNOWN
        run = _RUN + 2 * min((self._run + depth).bit_length(), _LONGEST_RUN) + (depth > 0)
        weight_of = self._corrections[0].get
        estimates: list[Estimate] = []
        for rank, (token, matched, newest, agreed) in enumerate(ranked[:limit]):
            if rank > 0:
                weights, form, gap = self._lower_ranked, _LOWER_RANKED, _NO_GAP
            elif len(ranked) > 1:  # the gap: by how many tokens its match is longer than the next
                gap = min(matched - ranked[1].length, _NO_GAP - 1)
                weights, form = self._divided, 1
            else:
                weights, form, gap = self._unanimous, 0, _NO_GAP
            token_class = classes[token] if token < len(classes) else UNKNOWN
            logit = (
                weights["by_length"][min(matched + depth, _MAX_LENGTH)]
                + (weights["by_rank"][min(rank, 4)] if rank else weights["by_gap"][gap])
                + weights["hit_rate"] * self._logit_hit_rate
                + weights["share"] * len(agreed) / occurrences
                + weights["log_agreeing"] * log(len(agreed))
                + weights["log_occurrences"] * log(occurrences)
                + weights["class"][token_class]
                + weights["class_before"][class_before]
            )
            if self._earlier:
                logit += weights["earlier"]
            else:
                logit += weights["log_age"] * log(end - newest + 1)
            if depth == 0:
                logit += weights["first"]
            in_prompt = not self._earlier and newest < output_start
            features = (
                run,
                _CLASSES + _N_CLASSES * class_before + token_class,
                _LENGTH + _FORMS * bisect(_LENGTH_BOUNDS, matched) + form,
                _GAP + gap,
                _IN_PROMPT + form + _FORMS * in_prompt,
                TOKEN_FEATURES + token,
            )
            p_accept = 1 / (1 + exp(-logit - sum(map(weight_of, features, _NOTHING))))
            if not _LOWEST <= p_accept <= _HIGHEST:
                p_accept = min(max(p_accept, _LOWEST), _HIGHEST)
            estimates.append((p_accept, logit, features))
        return estimates

    def unanimous(self, begin: Continuation, end: int) -> Callable[[int, int, int], float]:
        """What :meth:`estimate` says of tokens on which all occurrences of a continuation agree.

        Args:
            begin: the continuation.
            end: the length of the indexed text.

        Returns:
            a function that returns the p_accept of a token, given the token before it and that
            one's depth, at least 1.
        """
        weights, classes, weight_of = self._unanimous, self._classes, self._corrections[0].get
        by_length, of_class = weights["by_length"], weights["class"]
        of_class_before = weights["class_before"]
        _, matched, newest, agreed = begin
        logit = (
            weights["by_gap"][_NO_GAP]
            + weights["hit_rate"] * self._logit_hit_rate
            + weights["share"]
            + (weights["log_agreeing"] + weights["log_occurrences"]) * log(len(agreed))
            + weight_of(_LENGTH + _FORMS * bisect(_LENGTH_BOUNDS, matched), 0.0)
            + weight_of(_GAP + _NO_GAP, 0.0)
        )
        if self._earlier:
            logit += weights["earlier"]
        else:
            logit += weights["log_age"] * log(end - newest + 1)
        first_in_output = 0 if self._earlier else self._output_start - newest
        right, known = self._run, len(classes)

        def p_accept(token: int, before: int, depth: int) -> float:
            token_class = classes[token] if token < known else UNKNOWN
            class_before = classes[before] if before < known else UNKNOWN
            length, run = matched + depth, (right + depth).bit_length()
            total = (
                logit
                + by_length[length if length < _MAX_LENGTH else _MAX_LENGTH]
                + of_class[token_class]
                + of_class_before[class_before]
                + weight_of(_RUN + 2 * (run if run < _LONGEST_RUN else _LONGEST_RUN) + 1, 0.0)
                + weight_of(_CLASSES + _N_CLASSES * class_before + token_class, 0.0)
                + weight_of(_IN_PROMPT + (_FORMS if depth < first_in_output else 0), 0.0)
                + weight_of(TOKEN_FEATURES + token, 0.0)
            )
            p = 1 / (1 + exp(-total))
            return _LOWEST if p < _LOWEST else _HIGHEST if p > _HIGHEST else p

        return p_accept

    def learn(self, estimates: Sequence[Estimate], right: int | None) -> None:
        """Learn which of a node's continuations was right.

        Args:
            estimates: the estimates of the continuations, best first.
            right: the rank of the right one, or None if none was.
        """
        tried = estimates if right is None else estimates[: right + 1]
        for rank, (p_accept, logit, features) in enumerate(tried):
            if abs((rank == right) - p_accept) >= _SURE:
                for corrections in self._corrections:
                    corrections.learn(features, logit, rank == right)
        hit = right == 0
        self._run = self._run + 1 if hit else 0
        self._hit_rate += _CHANGE * (hit - self._hit_rate)
        self._logit_hit_rate = _logit(self._hit_rate)


_Weights = dict[str, Any]  # numbers, and tables of numbers


@cache
def _weights() -> tuple[_Weights, _Weights, _Weights]:
    """The weights of continuations without a competitor, of the best of several, and of others."""
    text = files(__package__).joinpath("p_accept_prior.json").read_text(encoding="utf-8")
    prior: dict[str, _Weights] = json.loads(text)
    chosen = prior["unanimous"], prior["divided"], prior["lower_ranked"]
    logs = [log(length + 1) for length in range(_MAX_LENGTH + 1)]
    for weights in chosen:
        constant, inverse = weights["constant"], weights["inverse_length"]
        linear, square = weights["log_length"], weights["log_length_squared"]
        weights["by_length"] = [
            constant + linear * x + square * x * x + inverse / (n + 1) for n, x in enumerate(logs)
        ]
    return chosen


def _logit(rate: float) -> float:
    clipped = min(0.98, max(0.02, rate))
    return log(clipped / (1 - clipped))
