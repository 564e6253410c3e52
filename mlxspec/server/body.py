"""Request bodies: received and parsed within limits, then validated by pydantic models.

Python's JSON parser has no limits, so :func:`read_json` first counts the values, without creating
any.

In a body, a field that is ``null`` counts as absent. A number such as 5.0 is accepted as the
integer 5, since some languages write integers that way.
"""

from __future__ import annotations

import json
import math
import re
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from ..errors import MlxspecError, printable
from ..jsonl import load_json


class ApiError(MlxspecError):
    """An error that the client gets instead of an answer.

    Args:
        message: what is wrong, and the remedy. The middle of a very long message is left out.
        status: the HTTP status, 400 to 599.
        param: the wrong field of the body, in OpenAI's notation: ``messages[2].role``.
        code: an identifier for programs, such as ``context_length_exceeded``.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = str(self)
        self.status = status
        self.param = param if param is None else printable(param)
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The response's JSON in OpenAI's form."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error" if self.status >= 500 else _INVALID),
                "param": self.param,
                "code": self.code,
            }
        }

    def messages_body(self, request_id: str) -> dict[str, Any]:
        """The response's JSON in Anthropic's form."""
        kind = _MESSAGES_TYPES.get(self.status, "api_error" if self.status >= 500 else _INVALID)
        details: dict[str, Any] = {"type": kind, "message": self.message}
        if self.param == "thread":  # Anthropic's library then resends the whole conversation
            details["details"] = {"error_code": "thread_unsupported_request", "unsupported": []}
        return {"type": "error", "error": details, "request_id": request_id}


def error_response(error: ApiError, path: str) -> JSONResponse:
    """The response for an error, in the form of the API that the path belongs to."""
    if not f"{path}/".startswith("/v1/messages/"):
        return JSONResponse(error.body, error.status, error.headers)
    request_id = new_request_id()
    headers = {**error.headers, "request-id": request_id}
    return JSONResponse(error.messages_body(request_id), error.status, headers)


def new_request_id() -> str:
    """A new request id, for Anthropic's clients."""
    return f"req_{uuid.uuid4().hex}"


_INVALID = "invalid_request_error"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {429: "rate_limit_error"}
_MESSAGES_TYPES = _TYPES | {413: "request_too_large"}


# --- bytes ---

MOST_BYTES = 32 * 2**20
"""The most bytes of a request's body."""

_TOO_LONG = f"the body has more than {MOST_BYTES >> 20} MiB: send less"


def stated_length(request: Request) -> int:
    """The most bytes that a request's body may have, according to its headers.

    Raises:
        ApiError: the body is too long, or has an unknown encoding.
    """
    encoded = _encoding_of(request) != "identity"
    # h11 allows only numbers.
    length = int(request.headers.get("content-length", 0))
    if length > MOST_BYTES:
        raise ApiError(_TOO_LONG, status=413, code="request_too_large")
    return MOST_BYTES if encoded or "transfer-encoding" in request.headers else length


_ENCODINGS = ("gzip", "x-gzip", "deflate")


def _encoding_of(request: Request) -> str:
    encoding = request.headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in ("identity", *_ENCODINGS):
        raise ApiError(
            f"the Content-Encoding is {shown(encoding)}: send the body with gzip, with deflate, "
            "or as it is",
            status=415,
            headers={"Accept-Encoding": "gzip, deflate"},
        )
    return encoding


def decoded(request: Request, data: bytes | bytearray) -> bytes | bytearray:
    """Undo the ``Content-Encoding`` of a body.

    Raises:
        ApiError: the encoding is unknown, the body is not in this encoding, or is too long.
    """
    if (encoding := _encoding_of(request)) == "identity":
        return data
    # Many clients send deflate without zlib's header.
    bare = encoding == "deflate" and (data[:1] != b"\x78" or int.from_bytes(data[:2]) % 31 != 0)
    decoder = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32)
    try:
        whole = decoder.decompress(data, MOST_BYTES + 1)
    except zlib.error as error:
        raise ApiError(f"the body is not {encoding} ({error}): encode it again") from None
    if len(whole) > MOST_BYTES:
        raise ApiError(_TOO_LONG, status=413, code="request_too_large")
    if not decoder.eof or decoder.unused_data:
        raise ApiError(f"the body is not one whole {encoding} stream: encode it again")
    return whole


async def body_of(request: Request) -> bytearray:
    """Read a request's body.

    Raises:
        ApiError: the body is too long, or the client disconnected.
    """
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > MOST_BYTES:
                raise ApiError(_TOO_LONG, status=413, code="request_too_large")
    except ClientDisconnect:  # nobody reads this error
        raise ApiError("the client disconnected before the end of the body", status=499) from None
    return data


# --- JSON ---

MOST_VALUES = 300_000
"""The most values in a body: objects, lists, strings, numbers and constants. A prompt of token ids
may fill the context of any current model; an agent's long conversation has about ten thousand
values.
"""

_DEEPEST = 100  # levels of nesting; tools' JSON Schemas have a dozen

# No match may take long, since other threads wait for it. A longer word is no JSON.
_PIECE = 1 << 16  # bytes
_MARK = re.compile(
    rb"""
    (?P<string>") | (?P<begin>[\[{]) | (?P<end>[\]}])
    | (?P<word>[^\s\[\]{},:"]{1,65536}+)    # a number, or another value
    | (?P<gap>[\s,:]{16,65536}+)
    """,
    re.VERBOSE,
)
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_AFTER_NAME = re.compile(rb"[ \t\n\r]*+:")


def _marks(data: bytes | bytearray) -> Iterator[str]:
    """What a JSON text consists of: strings, words, and the begins and ends of lists and objects,
    without the names of fields.
    """
    at = 0
    while mark := _MARK.search(data, at):
        at, kind = mark.end(), str(mark.lastgroup)
        if kind == "string":
            while at + 1 < len(data) and data[at] != ord('"'):
                match = _IN_STRING.match(data, at, at + _PIECE)
                at = match.end() if match and match.end() > at else len(data)
            if name := _AFTER_NAME.match(data, at + 1):
                at = name.end()
                continue
            at += 1
        if kind != "gap":
            yield kind


def read_body(data: bytes | bytearray) -> Any:
    """The JSON value of a body.

    Raises:
        ApiError: it is not JSON in UTF-8, has too many values, or is nested too deeply.
    """
    try:
        return read_json(data)[0]
    except ValueError as error:
        raise ApiError(f"the body is not JSON ({error}): send a JSON object") from None


def read_json(data: bytes | bytearray, max_values: int = MOST_VALUES) -> tuple[Any, int]:
    """Parse a JSON text in UTF-8.

    Values are counted before any object is created. A lone surrogate becomes U+FFFD: editors send
    one when they cut a text inside a surrogate pair.

    Args:
        max_values: the most values that it may have.

    Returns:
        the value, and how many more values would have been allowed.

    Raises:
        ApiError: the text has too many values or is nested too deeply.
        ValueError: the text is not JSON, or has a number that is not finite.
    """
    depth, left = 0, max_values
    for kind in _marks(data):
        depth += (kind == "begin") - (kind == "end")
        left -= kind != "end"
        if left < 0:
            raise ApiError(
                f"the body has more than {MOST_VALUES:,} values, such as numbers, strings and "
                "objects: send fewer",
                status=413,
                code="request_too_large",
            )
        if depth > _DEEPEST:
            raise ApiError(
                f"the body is nested more than {_DEEPEST} levels deep: send a flatter object"
            )
        if depth == 0:  # the end of the value
            break
    return load_json(data, _DECODER.decode), left


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value if set(text) & set(".eE") else int(text)


_DECODER = json.JSONDecoder(parse_float=_number, parse_int=_number, parse_constant=_number)


# --- models ---


_LONGEST_SHOWN = 60  # characters of a value in a message

_T = TypeVar("_T")
Items = Annotated[list[_T], Field(fail_fast=True)]
"""A list whose validation ends at the first wrong item."""


def as_integer(value: object) -> object:
    """Turn 5.0 into 5; other values stay as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def without_nulls(value: Any) -> Any:
    """Remove an object's null fields; other values stay as they are."""
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None}


_Key = TypeVar("_Key")
Dictionary = Annotated[dict[_Key, _T], BeforeValidator(without_nulls)]
Integer = Annotated[int, BeforeValidator(as_integer)]
TokenId = Annotated[Integer, Field(ge=0, le=2**31 - 1)]
Name = Annotated[str, Field(min_length=1)]

_String = TypeVar("_String")
StringOr = Annotated[
    Annotated[_String, Tag("[string]")] | Annotated[_T, Tag("[other]")],
    Discriminator(lambda value: "[string]" if isinstance(value, str) else "[other]"),
]
"""A string of the first type, or any other value, of the second type. An error about a string
mentions only the first type, and an error about another value only the second.
"""


class Body(BaseModel):
    """An object in a request's body. Unknown fields are ignored, and ``null`` counts as absent."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", frozen=True)

    needed: ClassVar[Mapping[str, Sequence[str]]] = {}
    """By type or role: the fields that it requires, besides those without a default."""

    unsupported: ClassVar[Sequence[str]] = ()
    """The names of the lists in ``unsupported.yaml`` that apply to this body."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = without_nulls(value)
        kind = given.get("type", given.get("role"))
        # A missing required field becomes null, and the error then names it.
        return dict.fromkeys(cls.needed.get(kind, ()) if isinstance(kind, str) else ()) | given


_Body = TypeVar("_Body", bound=Body)
_UNSUPPORTED = yaml.safe_load(files(__package__).joinpath("unsupported.yaml").read_bytes())


def parse(model: type[_Body], body: object) -> _Body:
    """Validate a body.

    Raises:
        ApiError: a field is missing, wrong or unsupported.
    """
    if not isinstance(body, dict):
        raise ApiError(
            f"The body is {shown(body)}: send a JSON object, such as "
            '{"messages": [{"role": "user", "content": "Hello"}]}.'
        )
    fields = (field for name in model.unsupported for field in _UNSUPPORTED[name].items())
    for name, (remedy, *harmless) in fields:
        if (value := body.get(name)) is not None and value not in harmless:
            refuse(name, value, remedy)
    try:
        return model.model_validate({**body, "sent": body})
    except ValidationError as error:
        _refuse_first(error, body)


def _refuse_first(error: ValidationError, body: Any) -> NoReturn:
    """Raise an ApiError for the first validation error."""
    wrong = error.errors(include_url=False, include_context=False)[0]
    path = _path(wrong["loc"], body)
    if wrong["type"] == "missing":
        raise ApiError(f"{path} is missing: send it.", param=path)
    if wrong["type"] == "value_error":  # raised by our own code, with a clear message
        raise ApiError(f"{path}: {wrong['msg'].removeprefix('Value error, ')}.", param=path)
    remedy = re.sub(r"^\w+ should", "it should", wrong["msg"])
    remedy = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", remedy)
    remedy = remedy.replace("Extra inputs are not permitted", "leave it out")
    if wrong["type"] == "list_type" and _TEXT.search(path):
        remedy = "it should be a string or a list"
    if path.endswith("type") and _NO_TEXT.match(str(wrong["input"])):
        remedy = "leave it out, since this server reads only text"
    refuse(path, wrong["input"], remedy.replace(" after validation", ""))


# Fields that may be a string or a list, and types of parts that models of text cannot read.
_TEXT = re.compile(r"\b(content|input|output|prompt|stop|system)(\[\d+\])?$")
_NO_TEXT = re.compile("(input_)?(image|audio|video|file|document)")


def _path(location: Sequence[int | str], body: Any) -> str:
    """A field's path in OpenAI's notation, such as ``messages[2].role``."""
    path, value = "", body
    for part in location:
        # Other parts, such as "[key]", are added by Pydantic or belong to a converted value.
        if isinstance(part, int) and isinstance(value, list):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(part, str) and isinstance(value, dict) and part[:1] != "[":
            path, value = f"{path}.{part}" if path else part, value.get(part)
    return path


def refuse(param: str | None, value: object, remedy: str) -> NoReturn:
    """Raise an ApiError that names a field, its value, and what to send instead."""
    what = "missing" if value is None else shown(value)  # null means an absent field
    raise ApiError(f"{param or 'The body'} is {what}: {remedy}.", param=param)


def shown(value: object) -> str:
    """A value as error messages quote it: short, on one line."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = ascii(value[:_LONGEST_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
