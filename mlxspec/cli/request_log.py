"""The lines that ``mlxspec serve`` prints of its requests."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from ..errors import printable
from .common.output import shown

if TYPE_CHECKING:
    from ..server.body import ApiError
    from ..server.worker import ServedRequest

_LAST_LINES = 1.0  # seconds that a terminal has at the end to take what is left


class RequestLog:
    """Prints a line for each request, in a thread of its own: a terminal may be held (Ctrl-S).

    Neither prompts nor outputs are in it, and of what was refused no value.

    Args:
        console: for lines for people.
        as_json: print JSON on standard output instead.
        quiet: print nothing.
    """

    def __init__(self, console: Console, as_json: bool, quiet: bool) -> None:
        self._console = console
        self._as_json = as_json
        self._quiet = quiet
        self._records: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mlxspec log", daemon=True)
        self._thread.start()

    def ended(self, requests: Sequence[ServedRequest]) -> None:
        """All generations of a request have ended."""
        self._add(_record(requests))

    def refused(self, path: str, error: ApiError) -> None:
        """A request got an error instead of generations."""
        self._add(
            {
                "outcome": "refused",
                "path": printable(path),
                "status": error.status,
                "param": error.param,
                "code": error.code,
            }
        )

    def close(self) -> None:
        """Print what is left, if the terminal takes it."""
        self._records.put(None)
        self._thread.join(_LAST_LINES)

    def _add(self, record: dict[str, Any]) -> None:
        if not self._quiet:
            self._records.put({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **record})

    def _run(self) -> None:
        while record := self._records.get():
            try:
                if self._as_json:
                    click.echo(json.dumps(record))
                else:
                    self._console.print(_line(record), soft_wrap=True, highlight=False)
            except OSError:  # its reader is gone
                self._quiet = True


def _record(requests: Sequence[ServedRequest]) -> dict[str, Any]:
    """The figures of a client's requests: their sums, and times from the first on."""
    now, first = time.perf_counter(), requests[0]
    emitted = sum(request.stats.emitted for request in requests)
    steps = sum(request.stats.steps for request in requests)
    seconds = sum(request.decode_seconds for request in requests)
    plain_seconds = sum(request.plain_seconds for request in requests)
    begun = [request.first_token for request in requests if request.first_token]
    errors = [(r.outcome, r.failure.message) for r in requests if r.failure]
    errors.sort(key=lambda error: error[0] == "cancelled")  # as others are where one has failed
    outcomes = dict.fromkeys(request.outcome or "" for request in requests)
    # As in the answer's usage: once for all choices of a prompt, since one of them has run it.
    by_prompt: dict[int, list[ServedRequest]] = {}
    for request in requests:
        by_prompt.setdefault(id(request.prompt), []).append(request)
    known = [
        [r.cached_tokens for r in some if r.cached_tokens is not None]
        for some in by_prompt.values()
    ]
    cached = [min(some) for some in known if some]
    return {
        "model": first.served.name,
        "outcome": errors[0][0] if errors else "/".join(outcomes),
        "choices": len(requests),
        "prompt_tokens": sum(len(some[0].prompt) for some in by_prompt.values()),
        "cached_tokens": sum(cached) if cached else None,
        "tokens": sum(request.generated for request in requests),
        "seconds": round(now - first.asked, 3),
        "first_token": round(min(begun) - first.asked, 3) if begun else None,
        "tokens_per_step": round(emitted / steps, 2) if steps else None,
        "gain": round(plain_seconds / seconds, 2) if plain_seconds and seconds else None,
        "error": errors[0][1] if errors else None,
    }


def _line(record: dict[str, Any]) -> Text:
    """A request's line."""
    when = f"{record['time'][11:19]}  "
    if record["outcome"] == "refused":
        what = " ".join(shown(record[name]) for name in ("code", "param") if record[name])
        told = f"{record['status']} {shown(record['path'])}"
        return Text.assemble((when, "dim"), (f"{told}  {what}".rstrip(), "red"))
    parts: list[str | tuple[str, str]] = [
        (when, "dim"),
        f"{record['prompt_tokens']:>6} + {record['tokens']:<5} tokens",
        f"  {record['seconds']:6.2f} s",
    ]
    if record["tokens_per_step"]:
        parts.append(f"  {record['tokens_per_step']:5.2f} tokens/step")
    if record["gain"]:
        parts.append((f"  {record['gain']:.2f}x", "green" if record["gain"] >= 1 else ""))
    if record["choices"] > 1:
        parts.append((f"  {record['choices']} choices", "dim"))
    if record["cached_tokens"]:
        parts.append((f"  {record['cached_tokens']} cached", "dim"))
    if record["error"]:
        parts.append((f"  {shown(record['error'])}", "red"))
    return Text.assemble(*parts)
