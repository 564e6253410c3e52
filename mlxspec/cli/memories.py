"""The memories that a command drafts from, kept over runs where the user wants that."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from threading import Timer
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import StoreError
from .common.notes import note

if TYPE_CHECKING:
    from ..corpus import KeptTexts, Memory, TokenizerIdentity

_QUIETLY = 1.0  # seconds that nobody wonders about


class Memories:
    """One memory for each tokenizer of a command, until the end of the ``with`` block.

    At the end what was remembered is on disk. It is sorted as well, unless an error or Ctrl-C ends
    the block, or Ctrl-C the sorting: the next run does that then.

    Args:
        keeps: False leaves what is kept alone, whatever the user's settings say.
        shared: whether several models are loaded, which may have one tokenizer.

    Attributes:
        keeps: as given.

    Raises:
        OptionError: the variable MLXSPEC_MEMORY has an impossible value.
    """

    def __init__(self, keeps: bool = True, shared: bool = False) -> None:
        from ..corpus import SWITCH, Settings, settings_in_force

        self.keeps = keeps
        self._settings = settings_in_force(note) if keeps else Settings()
        self._undecided = keeps and not os.environ.get(SWITCH)
        self._asked = False
        self._needs_identity = shared or self._settings.keeps_some
        self._memories: dict[bytes, Memory] = {}

    def of(self, tokenizer: Any, model: str = "") -> Memory | None:
        """The memory for a tokenizer; None where a decoder's own does as well.

        Args:
            tokenizer: a model's.
            model: what the user calls the model.
        """
        from ..corpus import Memory, identify

        self._asked = True
        if not self._needs_identity:
            return None
        identity = identify(tokenizer)
        if identity.fingerprint not in self._memories:
            kept = self._kept(identity, model) if self._settings.keeps(identity) else None
            self._memories[identity.fingerprint] = Memory(kept=kept, on_trouble=note)
        return self._memories[identity.fingerprint]

    def _kept(self, identity: TokenizerIdentity, model: str) -> KeptTexts | None:
        from ..corpus import open_kept

        try:
            return open_kept(identity, absolute(model), self._settings.max_tokens)
        except StoreError as error:
            note(f"{error}; answers are remembered until this command ends")
            return None

    def tell_once(self) -> None:
        """Say at a terminal that answers could be kept, once in a user's life.

        Whoever has a directory for them knows; so does who has been told, for whom it is made.
        """
        from ..corpus import memory_directory

        if not (self._asked and self._undecided and sys.stderr.isatty()):
            return
        with suppress(OSError):
            memory_directory().mkdir(mode=0o700, parents=True)
            note(
                "mlxspec can remember answers over runs and draft from them: mlxspec memory on "
                "(said once)"
            )

    def __enter__(self) -> Memories:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        for memory in self._memories.values():
            if memory.kept is None:
                continue
            if kind is None:
                _sort(memory)
            memory.close(patience=0)


def absolute(model: str) -> str:
    """A model's name, by which it is found from any directory."""
    from ..models.model_files import DEMO, local_path

    is_there = model != DEMO and local_path(model).exists()
    return os.path.abspath(local_path(model)) if is_there else model


def _sort(memory: Memory) -> None:
    """Let a memory sort what was remembered, and say so where that takes long."""
    line = "sorting what was remembered; Ctrl-C leaves that to the next run"
    timer = Timer(_QUIETLY, note, [line])
    timer.daemon = True
    timer.start()
    try:
        memory.close()
    except KeyboardInterrupt:
        note("what was remembered is kept, and sorted by the next run")
    finally:
        timer.cancel()
