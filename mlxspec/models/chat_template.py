"""Chat templates: applying one that came with a model, and the one that its pieces imply.

A chat template is a program by the model's author. Jinja's sandbox keeps it from the machine,
but puts no bound on how long it runs. So it is watched as by a debugger: before each line of it
the time and the memory are checked. A timer's signal would reach the main thread alone, an
exception that is sent into a thread could come too late and hit what follows, and a process of its
own would take as long to start as a model takes to load.

A single operation cannot be stopped in this way. So powers, which can take hours for a few digits,
are refused; no template has a use for them. Texts of gigabytes, which a product or a filter can
make at once, are refused by the system where it bounds a process's memory (on Linux, not on macOS).
In a process that does something else meanwhile, that bound would hit the wrong one.
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
"""Turns of a conversation, as chat templates take them: "role", "content", and what else they
know."""

_SECONDS = 5.0
_BYTES = 500_000_000
_UNIT = 1 if sys.platform == "darwin" else 1024  # of what the system says about memory
_SIZES = Path("/proc/self/statm")  # of the process, in pages; the first is its address space
_LINES = 4  # between two looks at the memory, which take longer than a look at the clock
_WATCHED = ("<template>", jinja2.utils.__file__)  # the latter makes texts of a given length


def reserved_arguments() -> set[str]:
    """Names that :func:`apply_template` and ``apply_chat_template`` have arguments of.

    So a template gets nothing of such a name. Among them is that of a template to use instead.
    """
    from transformers import PreTrainedTokenizerBase

    functions = (apply_template, PreTrainedTokenizerBase.apply_chat_template)
    return {name for one in functions for name in inspect.signature(one).parameters}


class _Endless(BaseException):
    """A BaseException, so that nothing between here and the template handles it."""


def apply_template(
    tokenizer: TokenizerWrapper, messages: Messages, *, bound_memory: bool = True, **how: Any
) -> Any:
    """What ``tokenizer.apply_chat_template`` returns.

    Args:
        tokenizer: the model's.
        messages: the conversation.
        bound_memory: bound the memory that the template takes, too, not only its time; for
            processes in which no other thread takes any.
        how: what else ``apply_chat_template`` is called with.

    Raises:
        PromptError: the template does not apply, or does not end.
    """
    try:
        _check(tokenizer.chat_template)
        with _watched(bound_memory):
            return tokenizer.apply_chat_template(messages, **how)
    except (_Endless, MemoryError):
        cause = "it does not end, or takes too much memory"
    except Exception as error:  # it may do anything
        cause = str(error) or type(error).__name__
    raise PromptError(f"the chat template does not apply ({cause})")


_NOT_A_PROMPT = {
    *("bound_memory", "conversation", "messages", "return_dict", "return_tensors", "tokenize")
}
"""Arguments of a template's caller with which the result is not a prompt."""


def conversation_ids(
    tokenizer: TokenizerWrapper, messages: Sequence[Message], how: Mapping[str, Any]
) -> list[int]:
    """The prompt for the model's next turn, or for the rest of a turn that it has begun.

    Args:
        tokenizer: the model's.
        messages: the conversation: each a "role" and a "content", and what else the template
            knows. If the last one is the assistant's, the model continues it.
        how: what else ``tokenizer.apply_chat_template`` is called with: "tools", or what the
            template knows, such as "enable_thinking".

    Raises:
        PromptError: there is no chat template, an item is not a message, or the template does
            not apply.
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
            "the prompt is messages, and this model has no chat template: pass a text"
        )
    if not isinstance(how, Mapping):
        raise OptionError("chat_template_kwargs must be a dict of names and values")
    if wrong := sorted(_NOT_A_PROMPT & how.keys()):
        raise OptionError(
            f"chat_template_kwargs has {wrong[0]}, which makes no prompt: leave it out"
        )
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
            f"{error}: pass messages with roles, and in an order, that this model accepts"
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
    """Raise _Endless in this thread once a template has run too long, or takes too much memory."""
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
    """Let allocations of too much memory fail, where the system reports how much there is."""
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
    """The most bytes of memory that the process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


# --- the template of Mistral's instruct models ---

# A space after a piece's name belongs to the piece (SentencePiece puts one before every text),
# so that the spaces at the start of a turn's own text are kept.
_TEMPLATE = """\
{%- set state = namespace(questions=messages|selectattr('role', 'equalto', 'user')|list|length) -%}
{%- set systems = messages|selectattr('role', 'equalto', 'system')|map(attribute='content')|list -%}
{%- set system = systems[-1] if systems else '' -%}
{{- bos_token -}}
{%- if system and has_system_pieces -%}
  {{- '[SYSTEM_PROMPT] ' + system + '[/SYSTEM_PROMPT]' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    {%- set state.questions = state.questions - 1 -%}
    {%- set leads = system and not has_system_pieces and state.questions == 0 -%}
    {{- '[INST] ' + (system + '\\n\\n' if leads else '') + message['content'] + close -}}
  {%- elif message['role'] == 'assistant' -%}
    {{- ' ' + message['content'].rstrip(' ') + eos_token -}}
  {%- elif message['role'] != 'system' -%}
    {{- raise_exception('this model knows no role ' + message['role']) -}}
  {%- endif -%}
{%- endfor -%}
"""


def instruct_template(control: Collection[str], user_defined: Collection[str]) -> str | None:
    """The Jinja template for a model with these pieces, None without an instruct format.

    ``[INST]`` as a control piece is Mistral's format from version 2 on: ``[INST] text[/INST]``,
    with the system prompt before the last question or, from version 7 on, in pieces of its own.
    As a user-defined piece it is plain text of the form ``[INST] text [/INST]``.
    """
    if {"[INST]", "[/INST]"}.issubset(control):
        close = "[/INST]"
    elif {"[INST]", "[/INST]"}.issubset(user_defined):
        close = " [/INST]"
    else:
        return None
    system_pieces = "true" if {"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"}.issubset(control) else "false"
    return f"{{%- set close, has_system_pieces = '{close}', {system_pieces} -%}}\n{_TEMPLATE}"
