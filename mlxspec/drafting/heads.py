"""A planner's estimates for a trained head or a draft model: how likely its drafts are right, and
their time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from .accept import VerifiedStep
from .p_accept import Corrections, probability
from .tree import DraftTree

FEW_ROWS = 8
"""With at most this many rows to catch up on, about as many as after one step, a draft's time is
typical.
"""

# Chosen, not swept. A bad head costs 0.1 to 0.3 % with them (notes/planner.md, "Trained heads").
_FIRST_P_ACCEPT = 0.7  # of each token, if the earlier ones are right
_RATE = 0.05  # the weight of the newest draft in the averages; more at first
_FIRST_WEIGHT = 2  # the first probability counts as much as this many drafts
_LEAST, _MOST = 0.02, 0.98
_TRIAL, _RAREST_TRIAL = 64, 1024  # the tokens after which a head that does not pay is tried again
_CONFIDENCES = 8  # the number of classes of confidence
_TIME_RATE = 0.2  # the weight of the newest time, as an exponent
_MOST_SURPRISE = 4.0  # the largest ratio of a time to the expected one that counts


class HeadExperience:
    """How often a head's drafts are right, and how long they take.

    The time depends on a draft's depth and on the number of sequences that share it.

    Args:
        first: the seconds of a draft of one token for one sequence.
        further: the seconds that each further token adds.
        most: the most tokens that the head drafts at once.

    Attributes:
        p_accept: by depth, how often a token is right if the earlier ones are.
        seen: by depth, the number of drafts from which ``p_accept`` was learned.
        corrections: the corrections to the logits of the head's confidences.
    """

    def __init__(self, first: float, further: float, most: int) -> None:
        self.p_accept, self.seen = [_FIRST_P_ACCEPT] * most, [0] * most
        self.corrections = Corrections()
        self._scale = {1: 1.0}
        self._first, self._further = first, further

    def seconds(self, depth: int, sequences: int = 1) -> float:
        """The expected time of a draft for all sequences together."""
        fewer = max(count for count in self._scale if count <= sequences)
        return self._scale[fewer] * (self._first + (depth - 1) * self._further)

    def record(self, depth: int, sequences: int, seconds: float) -> None:
        """Learn from the time of a draft.

        The first draft for a number of sequences does not count: it may have to compile kernels.
        """
        if sequences not in self._scale:
            fewer = max(count for count in self._scale if count < sequences)
            self._scale[sequences] = self._scale[fewer]
            return
        surprise = seconds / self.seconds(depth, sequences)
        surprise = min(max(surprise, 1 / _MOST_SURPRISE), _MOST_SURPRISE)
        self._scale[sequences] *= surprise**_TIME_RATE


class HeadSource:
    """Drafts with a trained head, or with a draft model, for one generation.

    A planner runs the head only when it expects a gain from that, and for several sequences at
    once. Subclasses define how to run the head.

    Args:
        experience: the head's experience, to which this generation adds.

    Attributes:
        last: the current token.
        target, perturb: as given to :meth:`attach`.
    """

    origin = "head"
    """The origin of its drafts."""

    def __init__(self, experience: HeadExperience) -> None:
        self.experience = experience
        self._idle, self._trial = 0, _TRIAL  # the tokens since it ran, and those until a trial
        self._draft: DraftTree | None = None
        self._logits: list[tuple[float, tuple[int, int]]] = []

    def attach(self, target: Any, perturb: Callable[..., Any]) -> None:
        """Receive the target that will verify the drafts; called before :meth:`begin`.

        Args:
            target: the sequence's :class:`mlxspec.engine.target.Target`.
            perturb: :meth:`mlxspec.engine.sampling.Chooser.perturb`. More drafts are right if they
                use the random numbers that will choose the output's tokens.
        """
        self.target, self.perturb = target, perturb

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation whose context is ``prompt``."""
        self.last = prompt[-1]

    @property
    def ready(self) -> bool:
        """Whether the head can draft after the current token."""
        return True

    @classmethod
    def run(cls, heads: Sequence[Self], depth: int) -> list[tuple[list[int], list[float]]]:
        """Draft ``depth`` tokens for each sequence.

        Args:
            heads: the sources of the sequences.
            depth: the number of tokens.

        Returns:
            for each source, the tokens, and the confidence in each of them, 0 to 1, if the earlier
            ones are right.
        """
        behind, started = max(head.behind for head in heads), time.perf_counter()
        drafts = cls._run(heads, depth)
        if behind <= FEW_ROWS:  # catching up on many rows takes longer
            heads[0].experience.record(depth, len(heads), time.perf_counter() - started)
        return drafts

    @classmethod
    def _run(cls, heads: Sequence[Self], depth: int) -> list[tuple[list[int], list[float]]]:
        """Like :meth:`run`, but without learning how long it takes."""
        raise NotImplementedError

    @property
    def behind(self) -> int:
        """The number of rows that the head has yet to run before it can draft."""
        raise NotImplementedError

    @property
    def trials(self) -> bool:
        """Whether to run the head even without an expected gain, in case it has improved."""
        return self._idle >= self._trial

    def outlook(self, depth: int) -> DraftTree:
        """What to expect of a draft: a chain of unknown tokens with their ``p_reached``."""
        p_reached, right = [], 1.0
        for p_accept in self.experience.p_accept[:depth]:
            right *= p_accept
            p_reached.append(right)
        return self._chain(range(-2, -2 - len(p_reached), -1), p_reached)

    def drafted(self, tokens: Sequence[int], confidences: Sequence[float]) -> DraftTree:
        """The tree of a draft. Its ``p_reached`` are the confidences, corrected by experience.

        Args:
            tokens, confidences: from :meth:`run`.
        """
        # If the head runs only for trials, these become rarer.
        self._trial = min(2 * self._trial, _RAREST_TRIAL) if self.trials else _TRIAL
        self._idle, self._logits = 0, []
        p_reached, right = [], 1.0
        for depth, confidence in enumerate(confidences):
            bounded = min(max(confidence, _LEAST), _MOST)
            logit = math.log(bounded / (1 - bounded))
            sure = min(int(_CONFIDENCES * confidence), _CONFIDENCES - 1)
            features = depth, -1 - sure  # the latter below 0, to differ from depths
            self._logits.append((logit, features))
            right *= probability(logit + self.experience.corrections.logit(features))
            p_reached.append(right)
        self._draft = self._chain(tokens, p_reached)
        return self._draft

    def observe(self, step: VerifiedStep) -> None:
        """Learn from a step, whether or not it verified the draft."""
        self._idle += len(step.tokens)
        self.last = step.tokens[-1]
        if self._draft is None:
            return
        known = self.experience
        for node, right in self._draft.judged(step.tokens):
            depth = node - 1
            known.seen[depth] += 1
            rate = max(_RATE, 1 / (_FIRST_WEIGHT + known.seen[depth]))
            known.p_accept[depth] += rate * (right - known.p_accept[depth])
            logit, features = self._logits[depth]
            known.corrections.learn(features, logit, right)
        self._draft = None

    def _chain(self, tokens: Sequence[int], p_reached: Sequence[float]) -> DraftTree:
        parents, origins = tuple(range(-1, len(tokens))), (self.origin,) * len(tokens)
        return DraftTree((self.last, *tokens), parents, tuple(p_reached), origins)
