"""JSON that comes from users: whatever is read from it can be written again."""

from __future__ import annotations

import json
import re
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def load_json(text: str | bytes) -> Any:
    """The value of a JSON text; bytes are UTF-8.

    Half a surrogate pair (``"\\ud800"``), which no encoding can write, becomes a question mark.

    Raises:
        ValueError, RecursionError: it is no JSON, or nested too deeply.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    value = json.loads(text)
    if _SURROGATE.search(text):
        whole = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
        value = json.loads(whole)
    return value
