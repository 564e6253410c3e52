"""Drafts from an expected output, against a scan of the whole text."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mlxspec.drafting.drafter import DraftTree, VerifiedStep
from mlxspec.drafting.sources import PredictionDrafter

texts = st.lists(st.integers(0, 3), max_size=40)


def place_by_definition(text: Sequence[int], output: Sequence[int]) -> int | None:
    """Where in the text the output goes on: token by token, as the class describes it."""
    place: int | None = 0
    left = 0
    for count, token in enumerate(output, start=1):
        if place is not None and list(text[place : place + 1]) == [token]:
            place = left = place + 1
            continue
        place = None
        for size in (4, 3, 2):
            end_of_output = list(output[max(0, count - size) : count])
            ends = [
                end
                for end in range(size, len(text) + 1)
                if size <= count and list(text[end - size : end]) == end_of_output
            ]
            if ends:
                place = left = next((end for end in ends if end >= left), ends[0])
                break
    return place


@given(texts, texts)
def test_drafts_go_on_where_the_output_is_in_the_text(text: list[int], output: list[int]) -> None:
    drafter = PredictionDrafter(text)
    drafter.begin([9])
    last, written = 9, 0
    while True:
        place = place_by_definition(text, output[:written])
        draft = [] if place is None else text[place:]
        assert drafter.propose(100) == DraftTree.chain(last, draft)
        assert drafter.propose(2) == DraftTree.chain(last, draft[:2])
        if written == len(output):
            return
        emitted = tuple(output[written : written + 3])
        drafter.observe(VerifiedStep(DraftTree.chain(last), (), (), (), emitted))
        last, written = emitted[-1], written + len(emitted)
