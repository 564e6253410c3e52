"""Responses that requests may go back to, in memory, within bounds."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation around it.

    Attributes:
        response: as its client got it.
        given: the items that led to it, with those before an earlier response.
    """

    response: dict[str, Any]
    given: Sequence[dict[str, Any]]

    @property
    def items(self) -> tuple[dict[str, Any], ...]:
        """The conversation up to the end of the answer."""
        return (*self.given, *self.response["output"])


class _Kept(NamedTuple):
    """A response as JSON, a third of the size of the objects that it becomes.

    Attributes:
        response: the answer.
        items: ids and JSON of the conversation's items, up to the end of the answer.
        n_given: how many of the items led to it.
    """

    response: bytes
    items: list[tuple[str, bytes]]
    n_given: int

    @property
    def nbytes(self) -> int:
        return len(self.response) + sum(len(text) for _, text in self.items)


class ResponseStore:
    """The responses of late; those used last stay.

    Each partition finds its own alone. Nothing is written to disk. It may be called in any thread.

    Args:
        most: responses.
        most_bytes: of all of them as JSON, each with its conversation.

    Attributes:
        nbytes: of those that are kept, as JSON.
    """

    def __init__(self, most: int = 1000, most_bytes: int = 64 * 2**20) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._items: dict[tuple[str, str], tuple[bytes, int]] = {}
        """By partition and id: items, and in how many of its responses each one is."""
        self.nbytes = 0
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, partition: str, stored: StoredResponse) -> None:
        """Keep a response; it does not stay if it is larger than all may be."""
        items = []
        with self._changing:
            for item in stored.items:
                text, place = json.dumps(item).encode(), (partition, item["id"])
                known, count = self._items.get(place, (text, 0))
                text = known if known == text else text  # one for all responses of a conversation
                self._items[place] = text, count + 1
                items.append((place[1], text))
            kept = _Kept(json.dumps(stored.response).encode(), items, len(stored.given))
            self._kept[partition, stored.response["id"]] = kept
            self.nbytes += kept.nbytes
            while len(self._kept) > self._most or self.nbytes > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def response(self, partition: str, response_id: str) -> StoredResponse | None:
        """The response of this id; None if it is not kept, or another partition's."""
        key = partition, response_id
        with self._changing:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            kept = self._kept[key]
        given = [json.loads(text) for _, text in kept.items[: kept.n_given]]
        return StoredResponse(json.loads(kept.response), given)

    def item(self, partition: str, item_id: str) -> dict[str, Any] | None:
        """The item of this id in any of the partition's responses."""
        text, _ = self._items.get((partition, item_id), (b"null", 0))
        item: dict[str, Any] | None = json.loads(text)
        return item

    def delete(self, partition: str, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        with self._changing:
            if (partition, response_id) not in self._kept:
                return False
            self._drop((partition, response_id))
            return True

    def _drop(self, key: tuple[str, str]) -> None:
        dropped = self._kept.pop(key)
        self.nbytes -= dropped.nbytes
        for item_id, _ in dropped.items:
            place = key[0], item_id
            text, count = self._items.pop(place)
            if count > 1:
                self._items[place] = text, count - 1
