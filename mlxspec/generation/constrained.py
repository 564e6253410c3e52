"""Where a constraint begins in an answer: after the reasoning, or instead of a call of a tool."""

from __future__ import annotations

from dataclasses import replace

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.constraint import Constraint, Phase, Phases
from ..errors import OptionError

_AFTER_REASONING = r"[ \n]{1,4}"  # which templates write there, and who reads an answer drops


def in_answer(
    constraint: Constraint | None,
    tokenizer: TokenizerWrapper,
    *,
    reasons: bool,
    trims_space: bool = False,
    calls: Constraint | None = None,
    call_start: int | None = None,
) -> Phases:
    """The phases of a chat's answer.

    Reasoning is free, whether the template has opened it or the model does; so is text, without
    a constraint. A call of a tool may stand in place of the constrained text.

    Args:
        constraint: of the answer's text; None for any.
        tokenizer: the model's.
        reasons: the prompt ends within reasoning.
        trims_space: a space at the answer's beginning is the tokenizer's, and will be dropped.
        calls: what follows ``call_start``; None for anything.
        call_start: the token that begins a call of a tool, where tools may be called.

    Raises:
        OptionError: the model ends its reasoning with several tokens.
    """
    opens = closes = None
    if tokenizer.has_thinking:
        opens, closes = (_only(tokenizer.think_start_tokens), _only(tokenizer.think_end_tokens))
    if reasons and closes is None:
        raise OptionError(
            "this model's reasoning does not end with one token, so no constraint can begin "
            "after it: turn the reasoning off"
        )
    text, reasoning, after, call = range(4)
    first = calling = {} if call_start is None else {call_start: call}
    if opens is not None and closes is not None:
        first = {**calling, opens: reasoning}
    lead = " " if trims_space else ""
    phases = [
        Phase(constraint and replace(constraint, lead=lead), first),
        Phase(None, {} if closes is None else {closes: after}, may_end=constraint is None),
        Phase(constraint and replace(constraint, lead=_AFTER_REASONING), calling),
        Phase(calls),
    ]
    if reasons:
        phases[text] = phases[reasoning]
    return Phases(tuple(phases))


def _only(tokens: tuple[int, ...] | None) -> int | None:
    """The one token of a marker."""
    return tokens[0] if tokens and len(tokens) == 1 else None


def leaves_reasoning_open(text: str, tokenizer: TokenizerWrapper) -> bool:
    """Whether an answer that begins with this text goes on within reasoning."""
    if not tokenizer.has_thinking:
        return False
    return text.rfind(tokenizer.think_start) > text.rfind(tokenizer.think_end)


def ends_in_reasoning(tokens: list[int], tokenizer: TokenizerWrapper) -> bool:
    """Whether a prompt's last tokens open reasoning, as a chat template does."""
    if not tokenizer.has_thinking:
        return False
    text: str = tokenizer.decode(tokens[-16:])
    return text.rstrip().endswith(tokenizer.think_start)
