"""Experience: what the generations of a decoder teach about drafts.

The weights of p_accept were fitted on other people's outputs. Where a user's own requests copy
more, or less, or elsewhere, a few of them show it. So each decoder learns how its own texts differ:
by an online logistic regression on a few features of a continuation, whose weights correct the
logit (docs/planner-notes.md, "What generations teach").
"""

from __future__ import annotations

import os
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import repeat
from math import exp, sqrt

# Where these come from: docs/planner-notes.md, "What generations teach".
_RATE, _LOWEST_RATE = 0.2, 0.01
_SLOWS_AFTER = 10  # times that a feature was seen
MOST_SEEN = round(_SLOWS_AFTER * ((_RATE / _LOWEST_RATE) ** 2 - 1))  # until the rate is the lowest
_RATES = [_RATE / sqrt(1 + times / _SLOWS_AFTER) for times in range(MOST_SEEN + 1)]
_KIND_TOKENS = (8, 32)
MOST_KINDS = 16
SALT_BYTES = 16


class Corrections:
    """Weights of features, learned by gradient descent on the logarithmic loss.

    The rate of each weight falls with the square root of the times that its feature was seen, as
    in AdaGrad (Duchi, Hazan and Singer 2011), down to a rate at which it follows a user whose
    requests change.

    Args:
        weights: to begin with; by default all are 0.
        seen: how often each feature was seen.
    """

    def __init__(
        self, weights: Mapping[int, float] | None = None, seen: Mapping[int, int] | None = None
    ) -> None:
        self._weights = dict(weights or {})
        self._seen = Counter(seen or {})

    def __iter__(self) -> Iterator[tuple[int, float, int]]:
        """Each feature with its weight, and how often it was seen."""
        for feature, weight in [*self._weights.items()]:
            yield feature, weight, self._seen[feature]

    def logit(self, features: Sequence[int]) -> float:
        """What to add to the logit of a continuation with these features."""
        return sum(map(self._weights.get, features, _NOTHING))

    def learn(self, features: Sequence[int], logit: float, right: bool) -> None:
        """Learn whether a continuation was right.

        Args:
            features: the continuation's.
            logit: of its p_accept, without corrections.
            right: whether it was.
        """
        weights, seen = self._weights, self._seen
        error = right - probability(logit + self.logit(features))
        for feature in features:
            times = seen[feature]
            if times < MOST_SEEN:
                seen[feature] = times = times + 1
            weights[feature] = weights.get(feature, 0.0) + _RATES[times] * error

    def copy(self) -> Corrections:
        """The same weights, whose rates begin anew."""
        return Corrections(self._weights)


class Experience:
    """What the generations of a decoder have taught: corrections by kind of request.

    Requests whose prompts begin alike, with one system prompt or one template, are of one kind.
    Salted hashes of the first tokens tell kinds apart, so that no text is kept. A kind has
    corrections of its own from its second request on. They begin as a copy of those that its
    requests followed until then. A request of no known kind follows those of all generations.

    Args:
        salt: of the hashes; random by default.

    Attributes:
        salt: of the hashes.
        everything: the corrections that all requests follow or teach.
        kinds: by hash, the last used last; None after a kind's first request.
        probe_step: where in its round of probes the next generation goes on; see
            :class:`mlxspec.drafting.policy.Policy`.
    """

    def __init__(self, salt: bytes | None = None) -> None:
        self.salt = salt or os.urandom(SALT_BYTES)
        self.probe_step = 0
        self.everything = Corrections()
        self.kinds: OrderedDict[str, Corrections | None] = OrderedDict()

    def of_kind(self, prompt: Sequence[int]) -> list[Corrections]:
        """The corrections that a request follows, and the others that learn from it.

        Args:
            prompt: token ids.

        Returns:
            first the corrections of its kind; then those of the kinds that this one belongs to,
            and of all requests.
        """
        found = [self.everything]
        for length in _KIND_TOKENS:
            if len(prompt) < length:
                break
            tokens = array("q", prompt[:length]).tobytes()
            kind = blake2b(tokens, digest_size=8, key=self.salt).hexdigest()
            known = kind in self.kinds
            own = self.kinds.pop(kind, None)
            if known:
                own = own or found[-1].copy()
                found.append(own)
            self.kinds[kind] = own
        while len(self.kinds) > MOST_KINDS:
            self.kinds.popitem(last=False)
        return found[::-1]

    def end(self) -> None:
        """A generation has ended: nothing to do."""


def probability(logit: float) -> float:
    """The logistic function."""
    return 1 / (1 + exp(-logit))


_NOTHING = repeat(0.0)  # what features weigh that were never seen
