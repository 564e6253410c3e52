"""What explained steps are made of: fates of nodes, lookahead's window, and looks of tokens."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.cells import cell_len

from mlxspec import load
from mlxspec.cli.explain import (
    _piece,
    _text_of,
    fates_of,
    most_instructive,
    window_of,
)
from mlxspec.drafting.drafter import DraftTree, VerifiedStep
from mlxspec.drafting.lookahead import LookaheadDrafter
from mlxspec.drafting.sources import RecordedStep, RecordingDrafter
from mlxspec.generation.decoder import Decoder
from tests.support.demo import demo_decoder
from tests.support.explained_steps import lookahead_step


def test_a_rejected_node_is_one_that_the_target_could_have_chosen_and_did_not() -> None:
    step = lookahead_step()
    tokens = map(chr, (*step.verified.tree.tokens, step.verified.tokens[-1]))
    fate = dict(zip(tokens, fates_of(step), strict=True))
    assert fate["a"] == "emitted before"
    assert {letter for letter in fate if fate[letter] == "accepted"} == set("bc")
    assert {letter for letter in fate if fate[letter] == "rejected"} == set("dmx")
    assert {letter for letter in fate if fate[letter] == "not reached"} == set("nyozp")


def test_the_most_instructive_has_walks_that_end_inside_their_drafts() -> None:
    def chain(drafted: int, accepted: int) -> RecordedStep:
        tree = DraftTree.chain(0, [1] * drafted)
        walk = tuple(range(1, accepted + 1))
        step = VerifiedStep(tree, (1,) * len(tree), (1,) * len(tree), walk, (1,) * (accepted + 1))
        return RecordedStep(step, ("",) * len(tree), {})

    plain, partly, whole, wrong = chain(0, 0), chain(5, 2), chain(9, 9), chain(5, 0)
    assert most_instructive([plain, whole, whole, partly, partly, wrong], 2) == 3
    assert most_instructive([plain, wrong, whole, plain], 1) == 2  # none is partly accepted
    assert most_instructive([plain, plain], 3) == 0


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


@pytest.mark.slow
def test_the_level_now_is_what_the_model_says_after_each_column(
    decoder: Decoder, steps: list[tuple[list[int], RecordedStep]]
) -> None:
    full = [(context, step) for context, step in steps if len(window_of(step)) == LEVELS + 1]
    assert len(full) >= 2
    for context, step in full[:2]:
        *guesses, now = [[cell[0] for cell in level if cell] for level in window_of(step).values()]
        assert guesses[0][0] == context[-1]
        for column in range(COLUMNS):
            # Level 0 up to the column, then the column: section 3 of the paper.
            seen = guesses[0][1 : column + 1] + [level[column] for level in guesses[1:]]
            logits = decoder.model(mx.array([context + seen]))[0, -1]
            assert now[column] == mx.argmax(logits).item()


@pytest.mark.slow
def test_the_window_grows_by_a_level_a_step_until_it_is_full(
    steps: list[tuple[list[int], RecordedStep]],
) -> None:
    levels = [[*window_of(step)] for _, step in steps[:4]]
    assert levels == [
        ["t−1", "now"],
        ["t−2", "t−1", "now"],
        ["t−3", "t−2", "t−1", "now"],
        ["t−3", "t−2", "t−1", "now"],
    ]


def test_cells_of_the_window_are_the_tokens_of_its_rows_and_the_model_s_choices() -> None:
    cells = {
        name: "".join(chr(cell[0]) for cell in level if cell)
        for name, level in window_of(lookahead_step()).items()
    }
    assert cells == {"t−2": "axyz", "t−1": "mnop", "now": "MNOP"}


def test_a_row_that_was_not_verified_leaves_its_place_empty() -> None:
    step = lookahead_step()
    window = {place: node for place, node in step.window.items() if place != (1, 2)}
    _, deepest, now = window_of(RecordedStep(step.verified, step.origins, window)).values()
    assert [cell is None for cell in deepest] == [False, False, True, False]
    assert [cell is None for cell in now] == [False, False, True, False]


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerWrapper:
    return load("demo")[1]


def pieces_of(tokenizer: TokenizerWrapper, text: str) -> list[str]:
    text_of = _text_of(tokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return [_piece(token, text_of) for token in tokens]


def test_the_pieces_of_a_text_join_to_it_with_its_white_space_in_signs(
    tokenizer: TokenizerWrapper,
) -> None:
    pieces = pieces_of(tokenizer, "def f(a):\n    return\ta\r\n")
    assert "".join(pieces) == "·def·f(a):↵····return⇥a␍↵"


def test_parts_of_a_character_are_numbers(tokenizer: TokenizerWrapper) -> None:
    parts = tokenizer.encode("é", add_special_tokens=False)[-2:]
    assert pieces_of(tokenizer, "é")[-2:] == [f"<{token}>" for token in parts]


def test_every_token_has_a_piece_that_takes_room_and_holds_no_space(
    tokenizer: TokenizerWrapper,
) -> None:
    text_of = _text_of(tokenizer)
    for token in [*range(len(tokenizer)), len(tokenizer), 10**6]:
        piece = _piece(token, text_of)
        assert cell_len(piece) > 0
        assert not set(" \t\n\r\x1b") & set(piece)
    assert piece == "<1000000>"


def test_a_text_stays_readable_on_one_line(tokenizer: TokenizerWrapper) -> None:
    text = "say é:\n    a\x1b[2J\u202e"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert _text_of(tokenizer)(tokens).strip() == "say é:↵    a␛[2J�"
