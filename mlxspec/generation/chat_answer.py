"""The form of a chat's answer: reasoning, then text or tool calls."""

from __future__ import annotations

from dataclasses import replace

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.params import Constraint, Phase, Phases
from ..errors import OptionError
from ..models.reasoning import reasoning_markers, token_of

_AFTER_REASONING = r"[ \n]{1,4}"  # white space that templates insert and parsers of answers drop


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

    Reasoning is unconstrained, whether the template or the model begins it. A tool call may replace
    the constrained text.

    Args:
        constraint: what the answer's text must match; None allows any text.
        tokenizer: the model's tokenizer.
        reasons: whether the prompt ends inside reasoning.
        trims_space: whether a space at the answer's beginning comes from the tokenizer and will be
            dropped.
        calls: what the text after ``call_start`` must match; None allows any text.
        call_start: the token that begins a tool call, if tools may be called.

    Raises:
        OptionError: the model ends its reasoning with several tokens.
    """
    opens, closes = (
        token_of(tokenizer, marker) for marker in reasoning_markers(tokenizer) or ("", "")
    )
    if reasons and closes is None:
        raise OptionError(
            "this model's reasoning does not end with a single token, so no constraint can begin "
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
    return tuple(phases)
