"""Metrics of the server, for Prometheus and the status page."""

from __future__ import annotations

import time
from collections import Counter as Count
from collections import defaultdict, deque
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ..drafting.accept import VerifiedStep

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

_HISTORY = 300  # seconds
_FIGURES = ("generated", "steps", "forwards", "seconds", "plain_seconds")


class Metrics:
    """Counters and histograms. Only the worker's thread adds to them; other threads read them.

    Attributes:
        registry: the Prometheus registry with all metrics.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"mlxspec_{name}", help, labels, registry=self.registry)

        def histogram(name: str, help: str) -> Histogram:
            name = f"mlxspec_{name}"
            return Histogram(name, help, buckets=_SECONDS, registry=self.registry)

        self._ended = counter("generations", "Generations that have ended.", "outcome")
        self._prompt = counter("prompt_tokens", "Prompt tokens, including cached ones.")
        self._cached = counter("cached_tokens", "Prompt tokens found in the cache.")
        self._generated = counter("generated_tokens", "Generated tokens.")
        self._drafted = counter("drafted_tokens", "Draft tokens verified.", "source")
        self._accepted = counter("accepted_tokens", "Draft tokens accepted.", "source")
        about = "The share of the steps' time that planning drafts and learning from steps took."
        self._planning_share = Gauge("mlxspec_planning_share", about, registry=self.registry)
        self._planning = self._of_steps = 0.0  # seconds
        self._first = histogram("first_token_seconds", "Time to the first token.")
        self._seconds = histogram("generation_seconds", "Time to the last token.")
        self._began = int(time.perf_counter())
        self._sums: deque[tuple[int, Count[str]]] = deque(maxlen=_HISTORY + 1)
        """The sums of each of the last seconds in which something happened, including the current
        one.
        """

    def _sum(self, **figures: Any) -> None:
        """Add to the sums of the current second."""
        second = int(time.perf_counter())
        if not self._sums or self._sums[-1][0] != second:
            self._sums.append((second, Count()))
        self._sums[-1][1].update(figures)

    @property
    def history(self) -> dict[str, Any]:
        """For each figure, its sums per second over the last seconds, for the status page's charts.

        The lists end just before the second ``end``.
        """
        end = int(time.perf_counter())
        known = defaultdict(Count, self._sums.copy())
        sums = [known[second] for second in range(max(self._began, end - _HISTORY), end)]
        columns = {name: [round(count[name], 4) for count in sums] for name in _FIGURES}
        return {"end": end, **columns}

    @property
    def totals(self) -> dict[str, int]:
        """Totals of prompt, cached and generated tokens, and of generations by outcome."""
        counted = {"prompt": self._prompt, "cached": self._cached, "generated": self._generated}
        totals = {name: _counts(counter)[""] for name, counter in counted.items()}
        return totals | _counts(self._ended)

    @property
    def sources(self) -> dict[str, dict[str, int]]:
        """The numbers of drafted and accepted tokens by source, most drafted first."""
        drafted, accepted = (_counts(counter) for counter in (self._drafted, self._accepted))
        names = sorted(drafted, key=lambda name: -drafted[name])
        return {n: {"drafted": drafted[n], "accepted": accepted.get(n, 0)} for n in names}

    def add_first_token(self, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        """Record a generation's first token."""
        self._first.observe(seconds)
        self._prompt.inc(prompt_tokens)
        self._cached.inc(cached_tokens)

    def add_step(self, step: VerifiedStep, seconds: float, cost: float) -> None:
        """Record a sequence's part in a step.

        Args:
            seconds: the wall time of the step.
            cost: the step's time according to the measured costs, in plain steps; NaN if unknown.
        """
        self._generated.inc(len(step.tokens))
        self._planning += step.planning_seconds
        self._of_steps += seconds / step.sequences
        self._planning_share.set(self._planning / self._of_steps if self._of_steps else 0.0)
        # Each sequence counts its share of the forward.
        self._sum(generated=len(step.tokens), steps=1, forwards=1 / step.sequences)
        if cost > 0:  # not NaN; other load would slow plain steps just as much
            self._sum(seconds=seconds, plain_seconds=seconds * len(step.tokens) / cost)
        origins = step.tree.node_origins
        drafted = Count(origins[1 : len(step.tree)])
        accepted = Count(origins[node] for node in step.accepted if node < len(origins))
        for source, count in drafted.items():
            self._drafted.labels(source).inc(count)
        for source, count in accepted.items():
            self._accepted.labels(source).inc(count)

    def add_end(self, outcome: str, seconds: float | None = None) -> None:
        """Record that a generation has ended after ``seconds``, or was refused."""
        self._ended.labels(outcome).inc()
        if seconds is not None:
            self._seconds.observe(seconds)


def _counts(metric: Counter) -> dict[str, int]:
    """The values of a counter by label; "" stands for no label."""
    (family,) = metric.collect()
    return {
        "".join(sample.labels.values()): int(sample.value)
        for sample in family.samples
        if sample.name.endswith("_total")
    }
