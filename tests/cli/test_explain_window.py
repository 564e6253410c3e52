"""Lookahead decoding's window in the recorded steps, against the model itself."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import pytest

from mlxspec.cli.explain_walk import Fate
from mlxspec.cli.explain_window import window_levels
from mlxspec.draft.lookahead import LookaheadDrafter
from mlxspec.draft.recording import RecordedStep, RecordingDrafter
from mlxspec.generation.decoder import Decoder
from tests.support.demo import demo_decoder
from tests.support.explained_steps import lookahead_step

PROMPT = "def sub("
COLUMNS, LEVELS = 4, 3


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return demo_decoder(Decoder)


@pytest.fixture(scope="module")
def steps(decoder: Decoder) -> list[tuple[list[int], RecordedStep]]:
    """The steps of a generation, each with the tokens before it."""
    recorded: list[RecordedStep] = []
    decoder.wrap_drafter = partial(RecordingDrafter, steps=recorded)
    context = decoder.tokenizer.encode(PROMPT)
    drafter = LookaheadDrafter(COLUMNS, LEVELS + 1, guess_set_size=2)
    for _ in decoder.decode(context, drafter, max_tokens=20):
        pass
    result = []
    for step in recorded:
        result.append((list(context), step))
        context.extend(step.verified.tokens)
    return result


def test_the_level_now_is_what_the_model_says_after_each_column(
    decoder: Decoder, steps: list[tuple[list[int], RecordedStep]]
) -> None:
    full = [(context, step) for context, step in steps if len(window_levels(step)) == LEVELS + 1]
    assert len(full) >= 2
    for context, step in full[:2]:
        *guesses, now = [[cell.token for cell in level.cells] for level in window_levels(step)]
        assert guesses[0][0] == context[-1]
        for column in range(COLUMNS):
            # Level 0 up to the column, then the column: section 3 of the paper.
            seen = guesses[0][1 : column + 1] + [level[column] for level in guesses[1:]]
            logits = decoder.model(mx.array([context + seen]))[0, -1]
            assert now[column] == mx.argmax(logits).item()


def test_the_window_grows_by_a_level_a_step_until_it_is_full(
    steps: list[tuple[list[int], RecordedStep]],
) -> None:
    levels = [[level.name for level in window_levels(step)] for _, step in steps[:4]]
    assert levels == [
        ["t−1", "now"],
        ["t−2", "t−1", "now"],
        ["t−3", "t−2", "t−1", "now"],
        ["t−3", "t−2", "t−1", "now"],
    ]


def test_cells_know_their_place_and_whether_the_walk_came_by() -> None:
    step = lookahead_step()
    for height, level in enumerate(window_levels(step)):
        assert [cell.place for cell in level.cells] == [height, height + 1, height + 2, height + 3]
    became = [[cell.fate for cell in level.cells] for level in window_levels(step)]
    assert became[0] == [Fate.ROOT, Fate.REJECTED, Fate.UNREACHED, Fate.UNREACHED]
    assert became[2] == [None] * 4


def test_a_row_that_was_not_verified_leaves_its_place_empty() -> None:
    step = lookahead_step()
    window = {place: node for place, node in step.window.items() if place != (1, 2)}
    _, deepest, now = window_levels(RecordedStep(step.verified, step.origins, window))
    assert [cell is None for cell in deepest.cells] == [False, False, True, False]
    assert [cell is None for cell in now.cells] == [False, False, True, False]
