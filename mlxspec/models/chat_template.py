"""Chat templates: apply a model's own, or make one for the pieces of a SentencePiece model.

A chat template is a program by the model's author. Jinja's sandbox protects the machine from it,
but does not limit its time. So a trace function, as debuggers use, checks time and memory before
each line. Other ways are worse. A timer's signal reaches only the main thread. An exception sent
into a thread can come too late and hit other code. A separate process takes as long to start as a
model takes to load.

A trace function cannot stop a single operation. Powers can take hours for a few digits, and no
template needs them, so they are refused. A product or a filter can make gigabytes of text at once.
Such texts fail if the system limits the process's memory (on Linux, not on macOS). A process that
does other work meanwhile sets no such limit, since the limit could hit that work.
"""

from __future__ import annotations

import inspect
import math
import resource
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import jinja2.utils

from ..errors import OptionError, PromptError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Message = Mapping[str, Any]
"""A turn of a conversation."""

Messages = list[dict[str, Any]]
"""Turns of a conversation for a chat template: "role", "content", and other keys that it uses."""

_SECONDS = 5.0
_BYTES = 500_000_000
_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes in the system's unit of memory
_SIZES = Path("/proc/self/statm")  # of the process, in pages; the first is its address space
_LINES = 4  # between two checks of the memory, which take longer than those of the clock
_WATCHED = ("<template>", jinja2.utils.__file__)  # the latter makes texts of a given length


def reserved_arguments() -> set[str]:
    """The names of arguments of :func:`apply_template` and ``apply_chat_template``.

    A template cannot receive variables of these names. One of them replaces the template itself.
    """
    from transformers import PreTrainedTokenizerBase

    functions = (apply_template, PreTrainedTokenizerBase.apply_chat_template)
    return {name for one in functions for name in inspect.signature(one).parameters}


class _Endless(BaseException):
    """Stops a template; a BaseException, so that nothing on the way handles it."""


def apply_template(
    tokenizer: TokenizerWrapper, messages: Messages, *, bound_memory: bool = True, **how: Any
) -> Any:
    """Return what ``tokenizer.apply_chat_template`` returns, within limits.

    Args:
        tokenizer: the model's tokenizer.
        messages: the conversation.
        bound_memory: limit the template's memory in addition to its time; only for processes in
            which no other thread allocates memory.
        how: further arguments of ``apply_chat_template``.

    Raises:
        PromptError: the template fails or does not end.
    """
    try:
        _check(tokenizer.chat_template)
        with _watched(bound_memory):
            return tokenizer.apply_chat_template(messages, **how)
    except (_Endless, MemoryError):
        cause = "it does not end, or takes too much memory"
    except Exception as error:  # a template can raise anything
        cause = str(error) or type(error).__name__
    raise PromptError(f"the chat template failed ({cause})")


_NOT_A_PROMPT = {
    *("bound_memory", "conversation", "messages", "return_dict", "return_tensors", "tokenize")
}
"""Arguments of :func:`apply_template` with which the result is not a prompt."""


def conversation_ids(
    tokenizer: TokenizerWrapper, messages: Sequence[Message], how: Mapping[str, Any]
) -> list[int]:
    """The prompt for the model's next turn, or for the rest of a turn that it has begun.

    Args:
        tokenizer: the model's tokenizer.
        messages: the conversation. Each has a "role", a "content", and other keys that the template
            uses. A trailing assistant message is continued.
        how: further arguments of the template: "tools", or its own, such as "enable_thinking".

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
    if not isinstance(how, Mapping):
        raise OptionError("chat_template_kwargs must be a dict of names and values")
    if wrong := sorted(_NOT_A_PROMPT & how.keys()):
        raise OptionError(f"chat_template_kwargs must not set {wrong[0]}: leave it out")
    turn = {"add_generation_prompt": True}
    if messages[-1]["role"] == "assistant":
        if not messages[-1].get("content"):
            raise PromptError(
                "the last message is the assistant's and has no content to continue: leave it out"
            )
        turn = {"add_generation_prompt": False, "continue_final_message": True}
    conversation = [dict(message) for message in messages]
    try:
        ids: list[int] = apply_template(
            tokenizer, conversation, bound_memory=False, **{**turn, **how}
        )
    except PromptError as error:
        raise PromptError(
            f"{error}: pass messages whose roles and order this model accepts"
        ) from error
    return ids


def _is_message(message: object) -> bool:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str | list | tuple) or (
        content is None and bool(message.get("tool_calls"))
    )


def _check(template: object) -> None:
    """Raise ValueError for a template that computes a power."""
    texts = template.values() if isinstance(template, dict) else [template]
    for text in texts:
        before = "("
        for _, kind, value in jinja2.Environment().lex(text) if isinstance(text, str) else ():
            if value == "**" and kind == "operator" and before not in "(,":
                raise ValueError("it computes a power")
            before = before if kind == "whitespace" else value


@contextmanager
def _watched(bound_memory: bool) -> Iterator[None]:
    """Raise _Endless in this thread if a template runs too long or takes too much memory."""
    deadline, lines = 0.0, 0
    most = _most_memory() + _BYTES if bound_memory else math.inf

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal deadline, lines
        now = time.monotonic()
        lines += 1
        if lines == 1:
            deadline = now + _SECONDS
        if now > deadline or (lines % _LINES == 0 and _most_memory() > most):
            raise _Endless
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename in _WATCHED else None

    previous = sys.gettrace()
    with _bounded_memory() if bound_memory else nullcontext():
        sys.settrace(on_call)
        try:
            yield
        finally:
            sys.settrace(previous)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Make too large allocations fail, if the system reports the process's size."""
    try:
        pages = int(_SIZES.read_text().split()[0])
    except (OSError, ValueError):
        yield
        return
    bound = pages * resource.getpagesize() + 2 * _BYTES
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        bound = min(bound, soft)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _most_memory() -> int:
    """The process's peak memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


# --- the template of Mistral's instruct models ---

# A space after a piece's name belongs to the piece (SentencePiece puts one before every text), so
# the spaces at the start of a turn's own text are kept.
_TEMPLATE = Path(__file__).with_name("mistral.jinja")


def instruct_template(control: Collection[str], user_defined: Collection[str]) -> str | None:
    """The Jinja template for a model with these pieces, or None if they show no instruct format.

    ``[INST]`` as a control piece is Mistral's format from version 2 on: ``[INST] text[/INST]``,
    with the system prompt before the last question or, from version 7 on, in its own pieces. As a
    user-defined piece it is plain text of the form ``[INST] text [/INST]``.
    """
    if {"[INST]", "[/INST]"}.issubset(control):
        close = "[/INST]"
    elif {"[INST]", "[/INST]"}.issubset(user_defined):
        close = " [/INST]"
    else:
        return None
    system_pieces = "true" if {"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"}.issubset(control) else "false"
    settings = f"{{%- set close, has_system_pieces = '{close}', {system_pieces} -%}}"
    return f"{settings}\n{_TEMPLATE.read_text(encoding='utf-8')}"
