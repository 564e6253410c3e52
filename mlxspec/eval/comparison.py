"""Which drafter wins on which chip: every one replayed under every cost curve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..draft.context_index import OutputMemory
from ..draft.drafter import Drafter
from ..errors import OptionError
from ..plan.cost_curve import CostCurve, FixedCosts
from ..plan.planner import Planner
from ..plan.policy import trees_pay
from ..plan.suffix_source import SuffixSource
from .baselines import POLICIES
from .hindsight import Hindsight
from .replay import ReplayedCompletion, Workload, replay
from .replay_report import ReplayReport, report
from .traces import Completion

AUTO = "auto"
_AUTO_MEMORY = "auto-memory"
HINDSIGHT = "hindsight"
"""No decoder, since it knows the output; it shows how much is left to gain."""

DECODERS = {
    AUTO: "mlxspec's default decoder on the first output of a process",
    _AUTO_MEMORY: "the default decoder on what follows: it remembers the process's earlier "
    "outputs, up to 16k tokens",
    "prompt-lookup": "classic prompt lookup: n-grams of 3 to 1, 10 tokens, full drafts only",
    "transformers": "its prompt_lookup_num_tokens=10, n-grams of 2 and 1",
    "vllm": "its n-gram speculator: n-grams of 5, 5 tokens",
    "tensorrt-llm": "its prompt lookup pool: n-grams of 2 and 1, 10 tokens, keep all, oldest",
    "llama.cpp": "its ngram-simple: n-grams of 12, 48 tokens",
    "suffix-path": "suffix decoding: the most frequent continuation of what matches, as one chain",
    "suffix-tree": "the same with a tree of continuations, up to four times the match's length",
    HINDSIGHT: "unreachable: auto's candidates, as many as the known output shows to pay best",
}
"""Who can be replayed, and what each is."""

_Replayed = list[tuple[str, ReplayedCompletion]]
_Maker = Callable[[Completion], Drafter]
_ShareDone = Callable[[float], None]


def chosen_decoders(names: str | None, default: Sequence[str]) -> list[str]:
    """The decoders that a comma-separated list names, in its order.

    Raises:
        OptionError: one of them is unknown.
    """
    if names is None:
        return list(default)
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in DECODERS:
            raise OptionError(f"no decoder is named {name!r}: choose among {', '.join(DECODERS)}")
    return chosen


def compare(
    workload: Workload,
    decoders: Sequence[str],
    curves: Mapping[str, CostCurve],
    on_progress: _ShareDone = lambda share: None,
) -> dict[str, dict[str, ReplayReport]]:
    """Replay a workload with several decoders on several chips.

    Args:
        workload: at least one completion.
        decoders: names out of ``DECODERS``.
        curves: T(rows)/T(1) by the chip's name.
        on_progress: called with the share that is done.

    Returns:
        by chip and decoder, in the order given.
    """
    replays = sum(1 if name in POLICIES else len(curves) for name in decoders)
    total = replays * len(workload.completions)
    done = 0

    def run(make: _Maker) -> _Replayed:
        nonlocal done
        replayed = []
        for completion in workload.completions:
            outcome = replay(completion.prompt, completion.output, make(completion))
            replayed.append((completion.category, outcome))
            done += 1
            on_progress(done / total)
        return replayed

    # What a step costs is nothing to these, so that they run once for all chips.
    fixed = {name: run(_fixed(POLICIES[name])) for name in decoders if name in POLICIES}
    return {
        chip: {
            name: report(
                fixed[name] if name in fixed else run(_costed(name, curve, workload.classes)),
                curve,
            )
            for name in decoders
        }
        for chip, curve in curves.items()
    }


def _fixed(make: Callable[[], Drafter]) -> _Maker:
    return lambda completion: make()


def _costed(name: str, curve: CostCurve, classes: bytes) -> _Maker:
    """Makers of the drafters that know what a step costs."""
    branching = trees_pay(curve)
    if name == HINDSIGHT:
        return lambda completion: Hindsight(
            completion.output, curve, branching=branching, token_classes=classes
        )
    memory = OutputMemory() if name == _AUTO_MEMORY else None
    return lambda completion: Planner(
        FixedCosts(curve),
        [SuffixSource(memory=memory, token_classes=classes)],
        branching=branching,
    )
