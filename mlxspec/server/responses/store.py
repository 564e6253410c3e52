"""Responses that requests may go back to, in memory, within bounds."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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
        self._kept: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()
        self._items: dict[tuple[str, str], tuple[dict[str, Any], int]] = {}
        """By partition and id: items, and in how many of its responses each one is."""
        self.nbytes = 0
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, partition: str, stored: StoredResponse) -> None:
        """Keep a response; it does not stay if it is larger than all may be."""
        nbytes = len(json.dumps([stored.response, *stored.given]))
        with self._changing:
            self._kept[partition, stored.response["id"]] = stored, nbytes
            self.nbytes += nbytes
            for item in stored.items:
                _, count = self._items.get((partition, item["id"]), (item, 0))
                self._items[partition, item["id"]] = item, count + 1
            while len(self._kept) > self._most or self.nbytes > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def response(self, partition: str, response_id: str) -> StoredResponse | None:
        """The response of this id; None if it is not kept, or another partition's."""
        key = partition, response_id
        with self._changing:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def item(self, partition: str, item_id: str) -> dict[str, Any] | None:
        """The item of this id in any of the partition's responses."""
        item, _ = self._items.get((partition, item_id), (None, 0))
        return item

    def delete(self, partition: str, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        with self._changing:
            if (partition, response_id) not in self._kept:
                return False
            self._drop((partition, response_id))
            return True

    def _drop(self, key: tuple[str, str]) -> None:
        stored, nbytes = self._kept.pop(key)
        self.nbytes -= nbytes
        for item in stored.items:
            place = key[0], item["id"]
            kept, count = self._items.pop(place)
            if count > 1:
                self._items[place] = kept, count - 1
