"""The index of a generation's context, kept from one turn of a conversation to the next."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from .suffix_index import MAX_LENGTH, SEPARATOR, SuffixIndex

# Times the text of an index built anew; what is more comes from abandoned turns.
_MOST_TEXT = 4


class ContextIndex:
    """The index of a context; a thread builds it during the prefill.

    The next prompt of a conversation begins with most of the last context; then only the rest is
    added. Where the two differ, the abandoned turn stays in the index as one more text to draft
    from. The new one comes after a separator, with enough of what precedes it for matches of any
    length.
    """

    def __init__(self) -> None:
        self._building: Future[SuffixIndex] | None = None
        self.prompt: array[int] = array("i")
        """The tokens that the context began with."""
        self.output_start = 0
        """Where in the index's text the prompt ends and the output begins."""

    @property
    def index(self) -> SuffixIndex:
        """The index of the context; waits until it is built."""
        assert self._building is not None
        return self._building.result()

    @property
    def output(self) -> Sequence[int]:
        """What was added since the prompt."""
        return self.index.tokens[self.output_start :]

    def begin(self, prompt: Sequence[int]) -> None:
        """Start the index of a context that begins with ``prompt``."""
        tokens = array("i", prompt)
        kept = self._continued(tokens) if self._building else None
        self.prompt = tokens
        if kept is not None:
            index, added = kept
            self.output_start = len(index) + len(added)
            self._run(lambda: _extended(index, added))
        else:
            self.output_start = len(tokens)
            self._run(lambda: SuffixIndex(tokens))

    def _continued(self, prompt: array[int]) -> tuple[SuffixIndex, array[int]] | None:
        """The index so far and what to add to it; None where building a new one is better.

        That is where most of the prompt is new, or where too much text has been abandoned.
        """
        context = self.prompt + array("i", self.output)
        common = common_length(context, prompt)
        added = prompt[common:]
        if common < len(context):
            added = array("i", [SEPARATOR]) + prompt[max(0, common - MAX_LENGTH) :]
        needed = max(len(context), len(prompt))
        if len(added) >= common or len(self.index) + len(added) > _MOST_TEXT * needed:
            return None
        return self.index, added

    def _run(self, build: Callable[[], SuffixIndex]) -> None:
        executor = ThreadPoolExecutor(max_workers=1)
        self._building = executor.submit(build)
        executor.shutdown(wait=False)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences of one type begin with in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # halving the slices, which compare fast, instead of token by token
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _extended(index: SuffixIndex, tokens: Sequence[int]) -> SuffixIndex:
    index.extend(tokens)
    return index
