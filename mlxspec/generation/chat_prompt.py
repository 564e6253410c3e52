"""A conversation as a prompt, and the form of its answer: reasoning, then text or tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.params import Constraint, Phase, Phases
from ..errors import OptionError, PromptError
from ..models.chat_template import NOT_A_PROMPT, Message, Messages, apply_template
from ..models.model import encode_prompt
from ..models.reasoning import reasoning_markers, token_of
from ..models.tokenizer import detokenizer_of


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation in the model's chat template, and how its answer begins.

    Attributes:
        text: the prompt, with BOS if the template has it.
        reasons: whether the answer begins inside reasoning.
        trims_space: whether the tokenizer puts a space before the answer, which is to be dropped.
    """

    text: str
    reasons: bool
    trims_space: bool

    @classmethod
    def of(
        cls, tokenizer: TokenizerWrapper, messages: Messages, how: Mapping[str, Any]
    ) -> ChatPrompt:
        """The prompt for the answer to a conversation, or for the rest of its last message.

        Args:
            tokenizer: the model's tokenizer.
            messages: the conversation. If its last message is the assistant's, it is continued,
                unless ``how`` says otherwise.
            how: arguments of ``apply_chat_template``.

        Raises:
            PromptError: as :func:`.apply_template`.
        """
        last = messages[-1]
        continued = last.get("role") == "assistant"
        how = {"add_generation_prompt": not continued, "continue_final_message": continued, **how}
        text, continued = apply_template(tokenizer, messages, **how), how["continue_final_message"]
        opens, closes = reasoning_markers(tokenizer) or ("", "")
        if continued:
            begun = str(last.get("content"))
            reasons = begun.rfind(opens) > begun.rfind(closes)
        else:
            reasons = bool(opens) and text.rstrip().endswith(opens)
        # A space at the beginning of a continuation was written by the model.
        puts_space = bool(getattr(detokenizer_of(tokenizer), "prefix_space", False))
        return cls(text, reasons, puts_space and not continued)

    def tokens(self, tokenizer: TokenizerWrapper) -> list[int]:
        """The prompt's token ids."""
        return encode_prompt(tokenizer, self.text, templated=True)


def conversation_prompt(
    tokenizer: TokenizerWrapper, messages: Sequence[Message], how: Mapping[str, Any]
) -> ChatPrompt:
    """Check a conversation, and make its :class:`ChatPrompt`.

    Args:
        tokenizer: the model's tokenizer.
        messages: the conversation. Each message has a "role", a "content", and other keys that the
            template uses. If the last message is the assistant's, the model continues it.
        how: further arguments: "tools", or the template's own, such as "enable_thinking".

    Raises:
        PromptError: the model has no chat template, an item is not a message, or the template
            fails.
        OptionError: an entry of ``how`` is not allowed.
    """
    for number, message in enumerate(messages, start=1):
        if not _is_message(message):
            raise PromptError(
                f"message {number} must have a role and a content: write "
                '{"role": "user", "content": "..."}'
            )
    if not tokenizer.has_chat_template:
        raise PromptError(
            "the prompt is a list of messages, but this model has no chat template: pass a text"
        )
    if wrong := sorted(NOT_A_PROMPT & how.keys()):
        raise OptionError(f"chat_template_kwargs must not set {wrong[0]}: leave it out")
    try:
        return ChatPrompt.of(tokenizer, [*map(dict, messages)], how)
    except PromptError as error:
        raise PromptError(
            f"{error}: pass messages whose roles and order this model accepts"
        ) from error


def _is_message(message: object) -> bool:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str | list) or bool(message.get("tool_calls"))


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
    the constrained text, or end the reasoning.

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
    text, reasoning, after, call, maybe_call = range(5)
    first = calling = {} if call_start is None else {call_start: call}
    if opens is not None and closes is not None:
        first = {**calling, opens: reasoning}
    closing = {} if closes is None else {closes: after}
    aside = calling if calls is not None or call_start is None else {call_start: maybe_call}
    lead = " " if trims_space else ""
    phases = [
        Phase(constraint and replace(constraint, lead=lead), first),
        Phase(None, {**aside, **closing}, may_end=constraint is None),
        Phase(constraint and replace(constraint, lead=_AFTER_REASONING), calling),
        Phase(calls),
        Phase(None, closing),  # what begins as a call inside reasoning may be text
    ]
    if reasons:
        phases[text] = phases[reasoning]
    return tuple(phases)
