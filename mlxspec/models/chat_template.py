"""Applies a model's own chat template, or makes one from the pieces of a SentencePiece model.

A chat template is a program by the model's author. It runs in Jinja's sandbox, which protects the
machine from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import PromptError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Message = Mapping[str, Any]
"""A turn of a conversation."""

Messages = list[dict[str, Any]]
"""A conversation: turns with "role", "content", and other keys that the chat template uses."""


def reserved_arguments() -> set[str]:
    """The names that a template's own variables cannot have.

    They are those of the arguments of :func:`apply_template` and ``apply_chat_template``. One of
    these arguments would even replace the template.
    """
    from transformers import PreTrainedTokenizerBase

    functions = (apply_template, PreTrainedTokenizerBase.apply_chat_template)
    return {name for function in functions for name in inspect.signature(function).parameters}


def apply_template(tokenizer: TokenizerWrapper, messages: Messages, **how: Any) -> str:
    """The text that ``tokenizer.apply_chat_template`` makes of a conversation.

    Contents are texts or lists of parts, as the template takes them. Given the other one, many
    templates leave the content out without an error.

    So do many with a second or late system message; others fail. What the template takes stays.
    Otherwise, system and developer messages at the beginning are joined. If the template does not
    show them, they begin the first user message. Later ones become user messages, within
    ``<system-reminder>``.

    Args:
        how: further arguments of ``apply_chat_template``.

    Raises:
        PromptError: the template fails, or leaves out the content of a message.
    """
    messages = _with_systems_in_place(tokenizer, messages, how)
    fitted = [_fitted(tokenizer, message, how) for message in messages]
    try:
        return str(tokenizer.apply_chat_template(fitted, **how, tokenize=False))
    except Exception as error:  # a template can raise anything
        cause = str(error) or type(error).__name__
        raise PromptError(f"the chat template failed ({cause})") from error


_SYSTEM = ("system", "developer")


def _with_systems_in_place(
    tokenizer: TokenizerWrapper, messages: Messages, how: Mapping[str, Any]
) -> Messages:
    """The conversation, with system and developer messages where the template takes them."""

    def takes(role: str, place: str = "") -> bool:
        return any(_shown_contents(tokenizer, role, how, place).values())

    roles = [message.get("role") for message in messages]
    if not set(roles).intersection(_SYSTEM):
        return messages
    if "developer" in roles and not takes("developer"):
        messages = [
            {**message, "role": "system"} if role == "developer" else message
            for role, message in zip(roles, messages, strict=True)
        ]
    count = next((at for at, role in enumerate(roles) if role not in _SYSTEM), len(roles))
    first, later = messages[:count], messages[count:]
    # With system messages alone, many templates render nothing, or demand a question.
    if first and not (takes(first[0]["role"]) and (later or takes(first[0]["role"], "alone"))):
        return _given_to_users(later, opening=first)
    if count > 1 and not takes("system", "again"):
        first = [{**first[0], "content": _joined(message.get("content") for message in first)}]
    if set(roles[count:]).intersection(_SYSTEM) and not takes("system", "later"):
        later = _given_to_users(later)
    return [*first, *later]


def _given_to_users(messages: Messages, opening: Sequence[dict[str, Any]] = ()) -> Messages:
    """Make system messages part of the user's messages beside them, or user messages.

    Args:
        messages: the conversation; its system messages are marked.
        opening: system messages before it, which are not marked.
    """
    # Each message with its contents, which are joined only at the end: there may be ten thousand.
    groups: list[tuple[dict[str, Any], list[Any]]] = []
    joins = False  # many templates require that the user and the assistant alternate
    for number, message in enumerate([*opening, *messages]):
        moved, content = message.get("role") in _SYSTEM, message.get("content")
        if moved and not content:
            continue
        if moved and number >= len(opening):
            # As Claude Code marks such texts.
            content = _joined(["<system-reminder>", content, "</system-reminder>"], "\n")
        given = {"role": "user", "content": content} if moved else message
        last, contents = groups[-1] if groups else ({}, [])
        if last.get("role") == given.get("role") == "user" and (moved or joins):
            contents.append(content)
            groups[-1] = {**last, **given}, contents
        else:
            groups.append((given, [content]))
        joins = moved
    if not groups:
        raise PromptError("the messages are empty: give one of them a content")
    return [
        {**message, "content": _joined(contents)} if len(contents) > 1 else message
        for message, contents in groups
    ]


def _joined(contents: Iterable[Any], between: str = "\n\n") -> str | list[Any]:
    """Join contents, with a text between them: to a text if all are texts, else to parts."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return between.join(given)
    parts: list[Any] = []
    for content in given:
        parts += _other_form(between) if parts else []
        parts += _other_form(content) if isinstance(content, str) else content
    return parts


def _fitted(
    tokenizer: TokenizerWrapper, message: dict[str, Any], how: Mapping[str, Any]
) -> dict[str, Any]:
    """A message with its content as a text or as a list of parts, as the template takes it."""
    content, role = message.get("content"), message.get("role")
    if not isinstance(content, str | list) or not isinstance(role, str):
        return message
    of_template = _shown_contents(tokenizer, role, how)
    given, other = (str, list) if isinstance(content, str) else (list, str)
    if of_template[given]:
        return message
    if of_template[other]:
        return {**message, "content": _other_form(content)}
    if content and of_template[given] is False:
        raise PromptError(
            f"the chat template leaves out the content of messages of the role {role}"
        )
    return message  # the template fails, and says why


def _other_form(content: str | list[Any]) -> str | list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    texts = [part if isinstance(part, str) else _text_of_part(part) for part in content]
    return "".join(texts)


def _text_of_part(part: Any) -> str:
    if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
        return text
    raise PromptError("the chat template takes texts only, and no other parts of a message")


_MARK = "mark7\nmark4"  # with a character that Python and JSON escape in a list
_CALL = {"id": "call00001", "type": "function", "function": {"name": "mark", "arguments": {}}}
_TEXT = {"type": "object", "properties": {"text": {"type": "string", "description": "A text."}}}
_TOOL = {
    "type": "function",
    "function": {"name": "mark", "description": "Marks a text.", "parameters": _TEXT},
}


def _shown_contents(
    tokenizer: TokenizerWrapper, role: str, how: Mapping[str, Any], place: str = ""
) -> dict[type, bool | None]:
    """Whether a template shows the contents of a role if they are texts, and if they are lists.

    None if it fails. This is found out once, from marked contents. The place is "again" for a
    second message of this role, "later" for further ones, "alone" for one without others, and
    otherwise the role's usual one.
    """
    known: dict[Any, Any] = vars(tokenizer).setdefault("_mlxspec_shown_contents", {})
    # Tools may select another template, or another branch of it.
    selecting = {name: how[name] for name in ("chat_template", "tools") if how.get(name)}
    if "tools" in selecting:
        selecting["tools"] = [_TOOL]  # the template may fail on the caller's
    template = selecting.get("chat_template") or getattr(tokenizer, "chat_template", None)
    key = str(template), "tools" in selecting, role, place
    if key not in known:
        known[key] = {
            str: _shows(tokenizer, role, place, _MARK, "mark7", selecting),
            list: _shows(tokenizer, role, place, _other_form(_MARK), _MARK, selecting),
        }
    return cast("dict[type, bool | None]", known[key])


def _shows(
    tokenizer: TokenizerWrapper,
    role: str,
    place: str,
    content: Any,
    mark: str,
    selecting: Mapping[str, Any],
) -> bool | None:
    """Whether a template shows a mark in each content of this role; None if it fails."""
    # The other contents are in the same form, since a template may fail at the other one.
    other = "Hello" if isinstance(content, str) else _other_form("Hello")
    user, marked = {"role": "user", "content": other}, {"role": role, "content": content}
    answer = {"role": "assistant", "content": other}
    conversations: dict[str, Messages] = {
        "again": [marked, marked, user],
        "later": [marked, user, marked, answer, marked, user, marked],
        "alone": [marked],
        "user": [marked],
        "assistant": [user, marked, user],
        "tool": [
            user,
            {**answer, "tool_calls": [_CALL]},
            {**marked, "name": "mark", "tool_call_id": _CALL["id"]},
        ],
    }
    conversation = conversations.get(place or role, [marked, user])
    try:
        text = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, **selecting
        )
    except Exception:  # a template can raise anything
        return None
    count = sum(message["content"] is content for message in conversation)
    return text.count(mark) >= count if isinstance(text, str) else None


NOT_A_PROMPT = {*("conversation", "messages", "return_dict", "return_tensors", "tokenize")}
"""Arguments of :func:`apply_template` that would make the result something other than a prompt."""


# --- the template of Mistral's instruct models ---

# SentencePiece puts a space before every text. In the template, this is the space after a piece's
# name. Spaces at the start of a turn's own text come after it, and are kept.
_TEMPLATE = Path(__file__).with_name("mistral.jinja")


def instruct_template(control: Collection[str], user_defined: Collection[str]) -> str | None:
    """The Jinja template for a model with these pieces; None if they show no instruct format.

    If ``[INST]`` is a control piece, the format is Mistral's from version 2 on:
    ``[INST] text[/INST]``. The system prompt comes before the last question or, from version 7 on,
    between two pieces of its own. If ``[INST]`` is a user-defined piece, the format is
    ``[INST] text [/INST]``.
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
