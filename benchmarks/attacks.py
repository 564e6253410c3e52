"""Hostile requests to every endpoint of `mlxspec serve`, each made from a seed.

The same seed makes the same request, so every fault can be reproduced.
"""

from __future__ import annotations

import copy
import gzip
import json
import math
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))  # where the tests are

from tests.server.test_messages_requests import FULL_MESSAGES
from tests.server.test_requests import FULL_CHAT, FULL_COMPLETION, WEATHER, places
from tests.server.test_responses_requests import FULL as FULL_RESPONSES
from tests.support.hostile import EDITS, LEAVES, SPICE, edited

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"
RESPONSES, INPUT = "/v1/responses", "/v1/responses/input_tokens"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PATHS = [CHAT, TEXT, TOKENIZE, DETOKENIZE, RESPONSES, INPUT, MESSAGES, COUNT]
LOOKS = ["/", "/health", "/ready", "/metrics", "/status", "/v1/models"]

MOST_TOKENS = 6  # of an answer, to keep it short
_MOST_BYTES = 31 << 20  # of a large body; the server takes 32 MiB
_MOST_PARTS = 10_000_000  # in a large body
_PARTLY = 1 << 14  # bytes; a client that leaves early leaves before this many


class Kept(NamedTuple):
    """Ids from a server's answers, which requests may name."""

    response: str = "resp_1"
    item: str = "msg_kept"


class Attack(NamedTuple):
    """A request.

    Attributes:
        seed: the seed that made it.
        kind: what is wrong with it.
        data: the bytes to send.
        sound: whether it is complete and valid HTTP, so the server must answer.
        leaves: the bytes of the answer after which the client disconnects; None for the end.
        path: the endpoint, if it has one.
    """

    seed: int
    kind: str
    data: bytes
    sound: bool = True
    leaves: int | None = None
    path: str = ""


@dataclass(frozen=True)
class Raw:
    """JSON text that Python's encoder would not write."""

    text: str


def attack(seed: int, kept: Kept) -> Attack:
    """Make the request of a seed."""
    rng = random.Random(seed)
    (kind,) = rng.choices([*_KINDS], [weight for _, weight in _KINDS.values()])
    made = _KINDS[kind][0](rng, kept)
    return made._replace(seed=seed, kind=kind)


# --- valid bodies ---

HELLO = [{"role": "user", "content": "Name a river, and say where it is."}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def right_bodies(kept: Kept) -> list[tuple[str, dict[str, Any]]]:
    """Valid bodies for each endpoint that takes one."""
    full_chat: dict[str, Any] = {
        **FULL_CHAT,
        "model": "tools",
        "max_completion_tokens": MOST_TOKENS,
    }
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    function: Any = WEATHER["function"]
    strict = {**WEATHER, "function": {**function, "strict": True}}
    forced = {"model": "tools", "tools": [strict], "tool_choice": "required"}
    responses = {
        **FULL_RESPONSES,
        "model": "tools",
        "max_output_tokens": MOST_TOKENS,
        "previous_response_id": kept.response,
        "input": [*FULL_RESPONSES["input"][:-1], {"type": "item_reference", "id": kept.item}],
    }
    messages = {**FULL_MESSAGES, "model": "tools", "max_tokens": MOST_TOKENS}
    flat = {"name": "a", "type": "json_schema", "schema": SCHEMA}
    text = {**FULL_COMPLETION, "model": "float32", "max_tokens": MOST_TOKENS, "suffix": None}
    return [
        (CHAT, full_chat),
        (CHAT, {"messages": HELLO, "max_tokens": MOST_TOKENS}),
        (CHAT, {"messages": HELLO, "max_tokens": MOST_TOKENS, "response_format": format}),
        (CHAT, {"messages": HELLO, "max_tokens": MOST_TOKENS, **forced}),
        (TEXT, {**text, "max_completion_tokens": None}),
        (TEXT, {"prompt": "Once", "max_tokens": MOST_TOKENS, "guided_regex": "[a-z ]+"}),
        (TOKENIZE, {"prompt": "Once", "add_special_tokens": True}),
        (TOKENIZE, {"messages": FULL_CHAT["messages"], "model": "tools"}),
        (DETOKENIZE, {"tokens": [1, 300], "model": "float32"}),
        (RESPONSES, responses),
        (RESPONSES, {"input": "Hello", "max_output_tokens": MOST_TOKENS, "text": {"format": flat}}),
        (INPUT, responses),
        (MESSAGES, messages),
        (MESSAGES, {"messages": HELLO, "max_tokens": MOST_TOKENS}),
        (COUNT, messages),
    ]


def _right(rng: random.Random, kept: Kept) -> tuple[str, dict[str, Any]]:
    path, body = rng.choice(right_bodies(kept))
    body = copy.deepcopy(body)
    if rng.random() < 0.5:
        body["stream"] = rng.random() < 0.5
    return path, body


# --- values ---

_STRINGS = [
    *("\0", "\udc00x", "é☃𝄞", "\u202e", "a" * 300, "☃" * 5000, "</s>", "<tool_call>", "[INST]"),
    *("<|im_end|>", "/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/", "{{ 7 * 7 }}"),
    *("%s%n", "null", "NaN", "-1", "true", "\r\nX-Injected: 1", "claude-☃", "float32", "tools"),
    *("system", "function", "god", "__class__", "required", "json_schema", "low", "none"),
]
_NUMBERS: list[Any] = [
    *(2**31 - 1, 2**53, -(2**63), 10**400, -0.0, 1e-320, 5.0, 1.5, 129, 4096, 1e22),
    *map(Raw, ("1e999", "-1e999", "1e-999", "9" * 5000, "-0", "1E+2", "1." + "0" * 400)),
]
_OTHERS: list[Any] = [[], {}, [[]], [None], [""], {"": None}, [{}], {"type": "text"}, [0] * 50]


def _value(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.02:
        depth = rng.choice([50, 99, 101, 1000, 100_000])
        opens, closes = rng.choice([("[", "]"), ('{"a":', "}")])
        return Raw(opens * depth + "1" + closes * depth)
    if kind < 0.03:
        return "☃\0a b"[rng.randrange(5)] * rng.choice([10_000, 100_000, 1_000_000])
    values: list[list[Any]] = [LEAVES, [*_STRINGS], _NUMBERS, _OTHERS]
    return copy.deepcopy(rng.choice(rng.choice(values)))


def written(rng: random.Random, body: Any) -> bytes:
    """A body as JSON, or almost JSON."""
    raws: list[str] = []

    def stand_in(value: Any) -> str:
        raws.append(value.text)
        return "@raw@"

    ascii_only = rng.random() < 0.7
    text = json.dumps(body, default=stand_in, ensure_ascii=ascii_only)
    first, *rest = text.split('"@raw@"')
    text = first + "".join(raw + part for raw, part in zip(raws, rest, strict=True))
    return text.encode(errors="surrogatepass")


# --- bodies with something wrong ---

_NAMES = [
    *("partition", "state", "constraint", "constrained_by", "names", "told", "known_tools"),
    *("_mlxspec", "__class__", "", "\0", "☃", "\ud800", "a.b", "a[0]", "x" * 5000, "$ref"),
    *("json_schema", "grammar", "guided_json", "guided_choice", "structured_outputs", "echo"),
    *("min_tokens", "ignore_eos", "thread", "container", "functions", "enable_thinking"),
    *("continue_final_message", "continuous_usage_stats", "best_of", "reasoning", "thinking"),
    *("xtc_probability", "presence_context_size", "repetition_context_size", "output_format"),
]


def _mutated(rng: random.Random, kept: Kept) -> Attack:
    """Values of other types or from other places; fields that are missing, renamed or new."""
    path, body = _right(rng, kept)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        body = _changed(rng, body, kept)
    return _posted(rng, path, written(rng, shortened(body)))


def _changed(rng: random.Random, body: dict[str, Any], kept: Kept) -> dict[str, Any]:
    everywhere = places(body)
    place = rng.choice(everywhere)
    if not place:
        return body
    holder = _at(body, place[:-1])
    key = place[-1]
    how = rng.choice(["put", "put", "swap", "move", "drop", "add", "rename", "repeat"])
    if how == "put":
        holder[key] = _value(rng)
    elif how == "swap":
        holder[key] = _as_another_type(rng, holder[key])
    elif how == "move":
        other = rng.choice(right_bodies(kept))[1]
        holder[key] = copy.deepcopy(_at(other, rng.choice(places(other))))
    elif how == "drop":
        del holder[key]
    elif how == "repeat":
        holder[key] = [copy.deepcopy(holder[key]) for _ in range(rng.choice([2, 20, 200]))]
    elif isinstance(holder, dict):
        other = rng.choice(right_bodies(kept))[1]
        name = rng.choice([*_NAMES, *other])
        value = other.get(name) if rng.random() < 0.5 else _value(rng)
        holder[name] = holder.pop(key) if how == "rename" else copy.deepcopy(value)
    return body


def _at(value: Any, place: Sequence[Any]) -> Any:
    for key in place:
        value = value[key]
    return value


def _as_another_type(rng: random.Random, value: Any) -> Any:
    wrapped: list[Any] = [[value], {"a": value}, str(value), json.dumps(value, default=str)]
    if isinstance(value, str):
        wrapped += [len(value), [*value], list(value.encode(errors="replace"))]
    if isinstance(value, (int, float)):
        wrapped += [not value, Raw(f"{value}e3"), -value]
    if isinstance(value, dict):
        wrapped += [[*value], [*value.items()], dict.fromkeys(value)]
    return rng.choice(wrapped)


def shortened(body: Any) -> Any:
    """A body that requests a short answer, if its endpoint generates one."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            asked = body.get(name)
            if isinstance(asked, (int, float)) and asked > MOST_TOKENS:
                body[name] = MOST_TOKENS
        if isinstance(body.get("n"), int) and 4 < body["n"] <= 128:
            body["n"] = 4
    return body


def _other_api(rng: random.Random, kept: Kept) -> Attack:
    """A body that is valid at another endpoint."""
    return _posted(rng, rng.choice(PATHS), written(rng, _right(rng, kept)[1]))


def _bytes_edited(rng: random.Random, kept: Kept) -> Attack:
    """JSON with bytes changed, inserted, repeated or cut off."""
    path, body = _right(rng, kept)
    whole = written(rng, body)
    edits = [
        (
            rng.choice(EDITS),
            rng.randint(0, len(whole)),
            rng.choice(SPICE) if rng.random() < 0.5 else rng.randbytes(rng.randint(1, 8)),
            rng.randint(1, 64),
        )
        for _ in range(rng.randint(1, 4))
    ]
    return _posted(rng, path, edited(whole, edits))


def _no_json(rng: random.Random, kept: Kept) -> Attack:
    """Values other than objects, invalid JSON, repeated keys, other encodings."""
    path, body = _right(rng, kept)
    text = json.dumps(body)
    twice = text[:-1] + "," + text[1:]
    data = rng.choice(
        [
            *(b"", b" ", b"null", b"[]", b"0", b'""', b"\xef\xbb\xbf" + text.encode(), b"{}"),
            *(twice.encode(), text.encode("utf-16"), text.encode("utf-32"), text.encode() * 2),
            *(rng.randbytes(40), b"\0" * 100, b"[" * 1_000_000, b'{"a":' * 200_000, b"9" * 100_000),
            *(gzip.compress(text.encode()), text.replace('"', "'").encode(), text.encode() + b"\0"),
        ]
    )
    return _posted(rng, path, data)


# --- large bodies ---


def _large(rng: random.Random, kept: Kept) -> Attack:
    """Many parts in one place, at most ten million of the smallest."""
    name, part = rng.choice(_PARTS)
    path, body = rng.choice([one for one in right_bodies(kept) if name in _FIELDS_OF[one[0]]])
    numbered = "%d" in part
    most = min(_MOST_PARTS, _MOST_BYTES // (len(part) + (7 if numbered else 1)))
    count = int(math.exp(rng.uniform(math.log(1000), math.log(most))))
    parts = (part % number for number in range(count)) if numbered else [part] * count
    opens, closes = "{}" if part.startswith('"%d"') else "[]"
    body = {**body, name: Raw(opens + ",".join(parts) + closes)}
    return _posted(rng, path, written(rng, body))


_MESSAGE = '{"role":"user","content":"a"}'
_PARTS = [
    *(("ignored", part) for part in ("{}", "[]", "0", '""', '"%d":0', '{"a":[]}')),
    *(("messages", part) for part in ("{}", _MESSAGE, '{"role":"assistant","content":"a"}')),
    *(("input", part) for part in ("{}", _MESSAGE, '{"type":"web_search_call"}')),
    *(("prompt", part) for part in ("1", '"a"', "[1]")),
    *(("stop_token_ids", "1"), ("tokens", "1"), ("logit_bias", '"%d":1')),
    *((name, '"a"') for name in ("stop", "include", "guided_choice", "stop_sequences")),
    *((name, '"%d":"a"') for name in ("metadata", "chat_template_kwargs")),
    ("tools", '{"type":"function","function":{"name":"a"}}'),
    ("tools", '{"type":"function","name":"f%d"}'),
    ("system", '{"type":"text","text":"a"}'),
]
_ANY = {"ignored", "metadata", "chat_template_kwargs", "tools"}
_OPENAI = _ANY | {"stop_token_ids", "logit_bias", "stop", "guided_choice"}
_FIELDS_OF = {
    CHAT: _OPENAI | {"messages"},
    TEXT: _OPENAI | {"prompt"},
    TOKENIZE: {"ignored", "messages"},
    DETOKENIZE: {"ignored", "tokens"},
    RESPONSES: _OPENAI | {"input", "include"},
    INPUT: _OPENAI | {"input", "include"},
    MESSAGES: _ANY | {"messages", "stop_sequences", "system"},
    COUNT: _ANY | {"messages", "stop_sequences", "system"},
}
"""The fields that may get a large list, by endpoint."""


def _long(rng: random.Random, kept: Kept) -> Attack:
    """A long text in place of another, or in the chat template's variables."""
    path, body = _right(rng, kept)
    count = int(math.exp(rng.uniform(math.log(10_000), math.log(_MOST_BYTES // 3))))
    text = rng.choice(["a", "a ", "1", "\n", "☃", "<s>", '"', "{"])
    text = text * (count // len(text.encode()))
    texts = [place for place in places(body) if isinstance(_at(body, place), str)]
    if texts and rng.random() < 0.7:
        place = rng.choice(texts)
        _at(body, place[:-1])[place[-1]] = text
    else:
        name = rng.choice(["bos_token", "eos_token", "tools", "messages", "a", "add_x"])
        body["chat_template_kwargs"] = {name: text}
    return _posted(rng, path, written(rng, body))


# --- constraints ---


def _constrained(rng: random.Random, kept: Kept) -> Attack:
    """A schema, a regular expression or a grammar that is wrong, large or slow."""
    if rng.random() < 0.5:
        schema = _schema(rng)
        path, body = _with_schema(rng, schema)
    else:
        path = rng.choice([CHAT, TEXT])
        regex = rng.random() < 0.5
        text = _regex(rng) if regex else _grammar(rng)
        if rng.random() < 0.2:
            edits = [
                (rng.choice(EDITS), rng.randint(0, len(text)), rng.choice(SPICE), rng.randint(1, 9))
            ]
            text = edited(text.encode(), edits).decode(errors="replace")
        name = "guided_regex" if regex else rng.choice(["grammar", "guided_grammar"])
        body = {name: text}
    prompt, longest = {
        TEXT: ({"prompt": "Once"}, "max_tokens"),
        RESPONSES: ({"input": "Once"}, "max_output_tokens"),
    }.get(path, ({"messages": HELLO}, "max_tokens"))
    return _posted(rng, path, written(rng, {**prompt, **body, longest: MOST_TOKENS}))


def _with_schema(rng: random.Random, schema: Any) -> tuple[str, dict[str, Any]]:
    """A body with a schema in one of the fields for it."""
    function = {"name": "f", "parameters": schema, "strict": True}
    tool = {"type": "function", "function": function}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    flat = {"type": "json_schema", "name": "a", "schema": schema}
    claude = {"name": "f", "input_schema": schema, "strict": True}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"response_format": format}),
        (CHAT, {"response_format": {"type": "json_object", "schema": schema}}),
        (CHAT, {"model": "tools", "tools": [tool], "tool_choice": "required"}),
        (CHAT, {"model": "tools", "tools": [tool]}),
        (TEXT, {"guided_json": schema}),
        (TEXT, {"json_schema": schema}),
        (TEXT, {"structured_outputs": {"json": schema}}),
        (RESPONSES, {"text": {"format": flat}}),
        (RESPONSES, {"model": "tools", "tools": [{"type": "function", **function}]}),
        (MESSAGES, {"output_config": {"format": flat}}),
        (MESSAGES, {"model": "tools", "tools": [claude], "tool_choice": {"type": "any"}}),
    ]
    return rng.choice(bodies)


def _schema(rng: random.Random) -> Any:
    count = rng.choice([3, 30, 99, 101, 200, 500, 1200, 2500])
    texts = [{"const": f"{number}"} for number in range(count)]
    makers: list[Callable[[], Any]] = [
        lambda: _chain(rng, count),
        lambda: _nested(rng, count),
        lambda: {"type": "object", "properties": {f"a{n}": {} for n in range(count)}},
        lambda: {"type": "object", "patternProperties": {f"^a{n}": {} for n in range(count // 5)}},
        lambda: {"type": "object", "patternProperties": {f"{n}.*$": True for n in range(200)}},
        lambda: {"type": "string", "minLength": 10 ** min(count, 400)},
        lambda: {"type": "string", "maxLength": rng.choice([-1, 0, 10**6, 10**9, 1.5, "a"])},
        lambda: {"type": "array", "items": {}, "minItems": rng.choice([10**3, 10**5, 10**9])},
        lambda: {"type": "array", "prefixItems": texts, "items": False},
        lambda: {"type": "integer", "minimum": -(10 ** min(count, 400)), "maximum": 1e300},
        lambda: {"type": "number", "multipleOf": rng.choice([0, -1, 1e-300, 7919, 0.3])},
        lambda: {"type": "number", "minimum": _value(rng), "exclusiveMaximum": _value(rng)},
        lambda: {"enum": [_value(rng) for _ in range(9)]},
        lambda: {"anyOf": texts, "allOf": texts[:9]},
        lambda: {"allOf": [{"anyOf": texts[:20]} for _ in range(min(count, 200))]},
        lambda: {"oneOf": texts},
        lambda: {"type": "string", "pattern": _regex(rng)},
        lambda: {"type": "object", "required": [_value(rng), "a"], "properties": {"a": {}}},
        lambda: {"type": _value(rng), "properties": _value(rng), "items": _value(rng)},
        lambda: {"$ref": rng.choice(["#", "#/a", "#/$defs/☃", "file:///etc/passwd", "http://a"])},
        lambda: {"type": "string", "format": rng.choice(["date-time", "email", "x", "uuid"])},
        lambda: {"x-guidance": _value(rng), "type": "object"},
        lambda: _value(rng),
    ]
    return rng.choice(makers)()


def _chain(rng: random.Random, count: int) -> dict[str, Any]:
    """References, each to the next one, sometimes in a ring."""
    wraps: list[Callable[[Any], Any]] = [
        lambda ref: ref,
        lambda ref: {"anyOf": [ref, {"type": "null"}]},
        lambda ref: {"allOf": [ref, {}]},
        lambda ref: {"type": "object", "properties": {"a": ref}},
        lambda ref: {"type": "array", "items": ref},
        lambda ref: {"type": "object", "additionalProperties": ref},
    ]
    wrap = rng.choice(wraps)
    definitions = {f"d{n}": wrap({"$ref": f"#/$defs/d{n + 1}"}) for n in range(count)}
    end = {"$ref": "#/$defs/d0"} if rng.random() < 0.2 else {"type": "string"}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": end}}


def _nested(rng: random.Random, count: int) -> Raw:
    opens, closes = rng.choice(
        [
            ('{"type":"array","items":', "}"),
            ('{"anyOf":[', "]}"),
            ('{"allOf":[', "]}"),
            ('{"type":"object","properties":{"a":', "}}"),
            ('{"type":"object","additionalProperties":', "}"),
            ('{"not":', "}"),
        ]
    )
    return Raw(opens * count + "{}" + closes * count)


_REGEXES = [
    *("(a*)*b", "", "^$", "[", "(", "*", "\\", "(?=a)a", r"(a)\1", "a{,5}", "x{9,1}", "\0"),
    *("[^\\x00-\\x{10FFFF}]", "[z-a]", "(?P<a>b)", ".*" * 200, "(?i)" + "ß" * 999, "[☃-𝄞]"),
]


def _regex(rng: random.Random) -> str:
    count = rng.choice([10, 100, 1000, 10**5, 10**9])
    most = min(count, 10_000)
    large = [
        *(f"x{{{count}}}", f"(a{{{count}}}){{{count}}}", f"\\p{{L}}{{{count}}}", "☃" * most),
        *(f"(.*a){{{most}}}", f"[ab]*a.{{{most}}}", "a?" * most + "a" * most),
        *("(" * most + "a" + ")" * most, "(a|" * most + "b" + ")" * most),
        "|".join(f"a{n}.*" for n in range(most)),
    ]
    return rng.choice(rng.choice([_REGEXES, large]))


_GRAMMARS = [
    *('start: a\na: a a | "x"\n', "start: a\na: b\nb: a\n", "start:", "start: start", "root ::= "),
    *('root ::= "x" root | "y"\n', "%", "start: <[5]>", "start: <0x41>", "\0", 'start: "a"*****'),
    'start: "x"\n%import common.ESCAPED_STRING\n%ignore /./\n',
]


def _grammar(rng: random.Random) -> str:
    count = rng.choice([3, 100, 500, 2500, 5000])
    rules = range(count)
    nested = "(" * count + '"x"' + ")" * count + "\n"
    large = [
        "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in rules) + f'a{count}: "x"\n',
        "start: A0\n" + "".join(f"A{n}: A{n + 1}\n" for n in rules) + f"A{count}: /x/\n",
        "start: A0\n" + "".join(f'A{n}: "x" A{n + 1}\n' for n in rules) + f"A{count}: /x/\n",
        "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1}\n" for n in rules) + f"a{count} ::= [a]\n",
        "start: " + " | ".join(f'"{n}"' for n in rules) + "\n",
        "start: %json {" + '"a":{' * count + "}" * count + "}\n",
        *(f"start: {nested}", f"root ::= {nested}", f"start: a{{{count}}}\na: /[a-z]*/\n"),
        *(f"start: /{_regex(rng)}/\n", f"start: %json {json.dumps(_chain(rng, count))}\n"),
        f'root ::= "x"{{{count}}} [a-z]{{{count}}}\n',
    ]
    return rng.choice(large if rng.random() < 0.7 else _GRAMMARS)


# --- HTTP ---

_TYPES = ["application/json", "application/json; charset=utf-16", "text/plain", "", "a/b;=", "é"]


def _posted(rng: random.Random, path: str, body: bytes) -> Attack:
    """A request with a body, as clients send it."""
    kind = "application/json" if rng.random() < 0.9 else rng.choice(_TYPES)
    return Attack(0, "", _request("POST", path, body, [f"Content-Type: {kind}"]), path=path)


def _request(method: str, path: str, body: bytes, lines: Sequence[str] = ()) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *lines]
    return _joined(head) + body


def _joined(head: Sequence[str]) -> bytes:
    return "\r\n".join([*head, "", ""]).encode(errors="surrogatepass")


def _headers(rng: random.Random, kept: Kept) -> Attack:
    """A valid body with invalid headers."""
    path, body = _right(rng, kept)
    data = written(rng, body)
    line = rng.choice(
        [
            *("Content-Encoding: gzip", "Content-Encoding: identity", "Content-Encoding: é"),
            *("Expect: 100-continue", "Expect: more", "Upgrade: websocket\r\nConnection: Upgrade"),
            *("Authorization: Bearer é", "Authorization: ", "Authorization: Basic \0", "X: é\xff"),
            *("Origin: http://evil", "Origin: null", "Origin: ", "Cookie: " + "a" * 5000, ": a"),
            *("X: " + "a" * 70_000, "a b: c", "X: a\r\n b", "anthropic-beta: ☃", "Host: evil"),
            *("Content-Length: 1", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip"),
            *("Connection: close", "Connection: keep-alive, x", "Accept-Encoding: br", "TE: x"),
            "\r\n".join(f"X-{n}: a" for n in range(2000)),
        ]
    )
    lines = [line, "Content-Type: application/json"]
    # The server decides whether it is still HTTP.
    return Attack(0, "", _request("POST", path, data, lines), sound=False, path=path)


def _lengths(rng: random.Random, kept: Kept) -> Attack:
    """A body whose length differs from its header, or in invalid chunks."""
    path, body = _right(rng, kept)
    data = written(rng, body)
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1"]
    n = len(data)
    if rng.random() < 0.6:
        lengths = [n - 1, n + 1, 0, -1, 10**18, 10**400, 33 << 20, f"{n}, {n}", "é", "", f"0x{n:x}"]
        head.append(f"Content-Length: {rng.choice([*lengths, f'+{n}', f' {n} ', '１２'])}")
        return Attack(0, "", _joined(head) + data, sound=False, path=path)
    head.append("Transfer-Encoding: chunked")
    size = rng.choice([f"{n:x}", f"{n:X};a=b", f"{n + 5:x}", "-1", "zz", "f" * 20, "", f"0{n:x}"])
    chunks = size.encode() + b"\r\n" + data + rng.choice([b"\r\n0\r\n\r\n", b"0\r\n", b"\r\n", b""])
    return Attack(0, "", _joined(head) + chunks, sound=False, path=path)


def _no_http(rng: random.Random, kept: Kept) -> Attack:
    """Bytes that are not a request, or two requests at once."""
    path, body = _right(rng, kept)
    right = _request("POST", path, written(rng, body))
    cut = right[: rng.randint(1, len(right) - 1)]
    data = [
        *(b"", b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0", b"\0" * 5000, cut),
        *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", right.replace(b"/1.1", b"/1.0"), right + right),
        *(right.replace(b"/1.1", b"/9.9"), right.replace(b"\r\n", b"\n"), rng.randbytes(200)),
        *(b"GET /" + b"a" * 100_000, right.replace(b"Host", b"H\0st"), right[4:]),
    ]
    return Attack(0, "", rng.choice(data), sound=False)


_ODD_PATHS = [
    *("/v1/models/%s", "/v1/models/float32", "/v1/models/", "/v1/responses/%s", "/v1/messages/%s"),
    *("/v1/responses/%s/cancel", "/v1/responses/%s/input_items", "/%s", "/v1/%s", "//%s", "/../%s"),
    *("/v1/embeddings", "/v1/files/%s", "/v1/responses/compact", "/v1/realtime", "/docs"),
]
_ODD_NAMES = [
    *("a", "☃", "é", "%00", "%ff", "%2e%2e/%2e%2e", "%E2%98%83", "a" * 60_000, "%41" * 9000),
    *("%", "a b", "\x7f", "tools/", "?", "#", ";", "{id}", "%0d%0aX: 1", "resp_1"),
]
_METHODS = ["GET", "GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW", "é"]
_QUERIES = [
    *("", "", "?limit=1", "?limit=-1", "?limit=1e9", "?limit=%C2%B2", "?order=up", "?after=%00"),
    *("?stream=true", "?a&&=%ff", "?beta=true", "?" + "a=b&" * 5000, "?limit=99999999999999999999"),
]


def _paths(rng: random.Random, kept: Kept) -> Attack:
    """Any method for any path."""
    path = rng.choice([*_ODD_PATHS, *PATHS, *LOOKS])
    if "%s" in path:
        path = path.replace("%s", rng.choice([*_ODD_NAMES, kept.response, kept.response]))
    # DELETE would remove responses that other requests name.
    methods = [one for one in _METHODS if one != "DELETE" or kept.response not in path]
    path += rng.choice(_QUERIES)
    lines = [f"{rng.choice(methods)} {path} HTTP/1.1", "Host: 127.0.0.1"]
    sound = bool(re.fullmatch(r"[A-Z]+ /[!-~]* HTTP/1.1", lines[0])) and len(path) < 60_000
    return Attack(0, "", _joined(lines), sound, path=path[:200])


def _left(rng: random.Random, kept: Kept) -> Attack:
    """Requests whose clients disconnect during the answer."""
    bodies = [one for one in right_bodies(kept) if one[0] in (CHAT, TEXT, RESPONSES, MESSAGES)]
    path, body = rng.choice(bodies)
    longest = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = {**body, "stream": rng.random() < 0.7, longest: 100, "max_completion_tokens": None}
    leaves = rng.choice([0, 1, 200, _PARTLY])
    return _posted(rng, path, written(rng, body))._replace(sound=False, leaves=leaves)


_Make = Callable[[random.Random, Kept], Attack]
_KINDS: dict[str, tuple[_Make, float]] = {
    "fields": (_mutated, 55),
    "other API": (_other_api, 3),
    "bytes": (_bytes_edited, 12),
    "no JSON": (_no_json, 4),
    "many parts": (_large, 0.5),
    "long text": (_long, 1.5),
    "constraint": (_constrained, 3),
    "headers": (_headers, 4),
    "lengths": (_lengths, 4),
    "no HTTP": (_no_http, 3),
    "paths": (_paths, 7),
    "left": (_left, 3),
}
"""The functions that make each kind of request, and their frequencies."""
