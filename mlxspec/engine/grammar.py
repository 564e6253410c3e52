"""Constraints as token masks: which tokens may come next at each node of a draft, and which must.

The library llguidance parses. One matcher follows the output. For a draft, it moves along each
branch and back, so every row of a step gets the mask of its own context.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import llguidance
import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..drafting.drafter import DraftTree
from ..errors import OptionError
from ..models.tokenizer import token_bytes
from .compiling import compiled, in_one_line
from .compiling_process import ByteTokens
from .params import Constraint, Phase, Phases

_KEPT = 64  # compiled constraints per tokenizer
_WORD = 32  # tokens in a word of a mask
_MOST_FORCED = 1024  # tokens: forced text can have any length, and each step asks again

_ANCHOR = "☺"  # no token merges it with what follows
_UNKNOWN = "\ufffd".encode()


class Vocabulary:
    """A model's tokens in llguidance's form, and the constraints compiled for them.

    Args:
        tokenizer: the model's, of any kind.
        vocab_size: the number of token ids that the model knows.

    Raises:
        OptionError: the tokenizer lacks a token that ends an output, or one for some character.
    """

    def __init__(self, tokenizer: TokenizerWrapper, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.ends = [token for token in sorted(tokenizer.eos_token_ids) if token < vocab_size]
        if not self.ends:
            raise OptionError(
                "constraint: the tokenizer has no token that ends an output; set eos_token_ids"
            )
        own = tokenizer.eos_token_id
        if own in self.ends:  # first the one that the model was trained with
            self.ends.sort(key=lambda token: token != own)
        special = _special_tokens(tokenizer, vocab_size) | {*self.ends}
        known = min(vocab_size, len(tokenizer))
        bytes_of = [_bytes_of(tokenizer, token) for token in range(known)]
        bytes_of += [b""] * (vocab_size - known)
        self._texts = [b"" if token in special else b for token, b in enumerate(bytes_of)]
        characters = {*map(chr, range(32, 127))} - {b.decode("latin-1") for b in self._texts}
        if characters:
            raise OptionError(
                f"constraint: the tokenizer has no token for {min(characters)!r} alone, and "
                "constraints need one for every ASCII character; use a model with another tokenizer"
            )
        self._encode = _encoder(tokenizer)
        self.tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(
                ByteTokens(bytes_of, sorted(special), self.ends[0], self._encode_bytes)
            ),
            n_vocab=vocab_size,
            eos_token=self.ends,
        )
        texts = {token: bytes_of[token].decode("latin-1") for token in sorted(special)}
        outline = {"size": vocab_size, "ends": self.ends, "special": texts}
        self.compiled = lru_cache(_KEPT)(partial(compiled, tokens=self.tokens, outline=outline))

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper, vocab_size: int) -> Vocabulary:
        """The vocabulary of a tokenizer, which keeps it; raises as the class does."""
        key = vocab_size, frozenset(tokenizer.eos_token_ids)
        kept = getattr(tokenizer, "_mlxspec_vocabulary", None)
        if kept is None or kept[0] != key:
            kept = key, cls(tokenizer, vocab_size)
            tokenizer._mlxspec_vocabulary = kept
        found: Vocabulary = kept[1]
        return found

    def encode(self, text: str) -> list[int]:
        """Encode a text that continues a line, as tokens of exactly its bytes.

        The tokenizer's own encoding is preferred: of the text alone, or after an anchor that keeps
        the tokenizer from inserting a space.
        """
        wanted = text.encode()
        ids = self._encode(text)
        if not self._stands_for(ids, wanted):
            anchor, anchored = self._encode(_ANCHOR), self._encode(_ANCHOR + text)
            ids = anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else []
        return ids if self._stands_for(ids, wanted) else self.tokens.greedy_tokenize(text)

    def _encode_bytes(self, text: bytes) -> list[int]:
        # llguidance's constructor encodes a test text and ignores the result.
        return self.encode(text.decode()) if hasattr(self, "tokens") else []

    def _stands_for(self, ids: Sequence[int], text: bytes) -> bool:
        known = all(0 <= token < len(self._texts) and self._texts[token] for token in ids)
        return known and b"".join(self._texts[token] for token in ids) == text

    def matcher(self, constraint: Constraint) -> llguidance.LLMatcher:
        """A matcher at the beginning of a constraint; raises as :func:`compiled` does."""
        return self.compiled(constraint).deep_copy()


def _special_tokens(tokenizer: TokenizerWrapper, vocab_size: int) -> set[int]:
    """Tokens without text: control tokens, and markers of reasoning and tool calls."""
    special = {*tokenizer.all_special_ids}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special |= {token for token, one in added.items() if getattr(one, "special", False)}
    names: list[str] = ["[ARGS]"]
    if tokenizer.has_thinking:
        names += tokenizer.think_start, tokenizer.think_end
    if tokenizer.has_tool_calling:
        names += tokenizer.tool_call_start, tokenizer.tool_call_end
    markers = (token_of(tokenizer, name) for name in names)
    special |= {token for token in markers if token is not None}
    return {token for token in special if 0 <= token < vocab_size}


def token_of(tokenizer: TokenizerWrapper, marker: str) -> int | None:
    """The token of a marker; None if it is not a single token."""
    token: int | None = tokenizer.get_vocab().get(marker)
    return token


def _bytes_of(tokenizer: TokenizerWrapper, token: int) -> bytes:
    text = token_bytes(tokenizer, token)
    return b"" if _UNKNOWN in text else text  # part of a character, with unknown bytes


def _encoder(tokenizer: TokenizerWrapper) -> Callable[[str], list[int]]:
    """A function that encodes a text as it is, in any thread."""
    backend = getattr(tokenizer._tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    own = copy.deepcopy(backend)  # others may change the settings of the tokenizer's own
    own.no_padding()
    own.no_truncation()
    return lambda text: list(own.encode(text, add_special_tokens=False).ids)


class Grammar:
    """A constraint compiled for a vocabulary, for any number of generations.

    Args:
        constraint: what outputs must satisfy.
        vocabulary: the model's.

    Raises:
        OptionError: as for :func:`mlxspec.engine.compiling.compiled`.
    """

    def __init__(self, constraint: Constraint | Phases, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        phases = (Phase(constraint),) if isinstance(constraint, Constraint) else constraint
        self.beginnings = [_beginning(phase, vocabulary) for phase in phases]
        """Per phase, the place at its beginning."""

    def begin(self) -> GrammarState:
        """The state before an output's first token."""
        return GrammarState(self)


def _beginning(phase: Phase, vocabulary: Vocabulary) -> _Place:
    # A tokenizer may have markers that the model lacks.
    exits = {token: to for token, to in phase.exits.items() if token < vocabulary.vocab_size}
    phase, constraint = phase._replace(exits=exits), phase.constraint
    if constraint is None:
        return _Place(phase, None)
    moves_back = not _ONE_WAY.search(constraint.text)
    return _Place(phase, vocabulary.matcher(constraint), moves_back=moves_back)


# With these attributes of rules, a matcher cannot take tokens back.
_ONE_WAY = re.compile(r"\b(?:max_tokens|stop)\s*=")


class _Place(NamedTuple):
    """An output's place in a grammar.

    Attributes:
        phase: the current phase.
        matcher: the matcher of the phase's constraint; None in free text.
        fresh: whether the phase's first token is still to come.
        ended: whether the output has ended.
        moves_back: whether the matcher can take tokens back; otherwise nothing is drafted.
    """

    phase: Phase
    matcher: llguidance.LLMatcher | None
    fresh: bool = True
    ended: bool = False
    moves_back: bool = True


class GrammarState:
    """Follows an output through a grammar.

    Between two calls, its place is after the last accepted token, even if it has checked drafts.
    All methods raise an OptionError if the constraint takes too much to follow.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._ends = grammar.vocabulary.ends
        self._end_set = frozenset(self._ends)
        self._vocab_size = grammar.vocabulary.vocab_size
        self._place = self._beginning_of(0)
        self._path: list[tuple[_Place, bool]] = []
        """Per unaccepted token, the place before it, and whether its matcher consumed the token."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance along tokens that were chosen under the masks."""
        for token in tokens:
            if not self._advance(token, for_good=True):
                raise OptionError(f"the constraint does not allow the token {token}")
        self._path.clear()

    def forced(self) -> tuple[int, ...]:
        """The tokens that must come next, whatever the model predicts; empty if it has a choice."""
        phase, matcher, fresh, ended, moves_back = self._place
        if matcher is None or ended or not moves_back or (fresh and phase.exits):
            return ()
        tokens = matcher.compute_ff_tokens()[:_MOST_FORCED]
        taken = matcher.try_consume_tokens(tokens) if tokens else 0
        complete = matcher.is_stopped() and matcher.is_accepting()
        if taken:
            matcher.rollback(taken)
        return (*tokens[:taken], *(self._ends[:1] if complete else ()))

    def allowed(self, tree: DraftTree) -> DraftTree:
        """The nodes of a draft that the constraint allows."""
        if len(tree) == 1:
            return tree
        return tree.kept([may_come for _, may_come in self._walk(tree.tokens, tree.parents)])

    def masks(self, tree: DraftTree) -> mx.array | None:
        """Which tokens may follow each node.

        Returns:
            bool, (rows, vocabulary), all True after a node that is not allowed itself. None if all
            tokens may follow all nodes.
        """
        words = np.full((len(tree), -(-self._vocab_size // _WORD)), -1, dtype=np.int32)
        masked = [
            self._mask_into(words[node])
            for node, may_come in self._walk(tree.tokens, tree.parents)
            if may_come
        ]
        if not any(masked):
            return None
        bits = mx.array(words)[..., None] >> mx.arange(_WORD, dtype=mx.int32) & 1
        return bits.reshape(len(tree), -1)[:, : self._vocab_size].astype(mx.bool_)

    def _walk(self, tokens: Sequence[int], parents: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Visit each node of a draft, then return to the root.

        Yields:
            each node, and whether it is allowed; if not, the state is somewhere above it.
        """
        ways: list[list[int] | None] = [[]]  # from the root to each allowed node
        here: list[int] = []
        try:
            yield 0, True
            for node in range(1, len(tokens)):
                above = ways[parents[node]]
                if above is not None:
                    while here != above[: len(here)]:
                        self._retreat()
                        here.pop()
                    for passed in above[len(here) :]:
                        self._advance(tokens[passed])
                    here = [*above, node] if self._advance(tokens[node]) else [*above]
                ways.append([*here] if here[-1:] == [node] else None)
                yield node, ways[node] is not None
        finally:
            while self._path:
                self._retreat()

    def _beginning_of(self, number: int) -> _Place:
        place = self._grammar.beginnings[number]
        return place._replace(matcher=place.matcher and place.matcher.deep_copy())

    def _advance(self, token: int, for_good: bool = False) -> bool:
        """Advance by a token, or return False without a change if it is not allowed."""
        place = self._place
        phase, matcher, fresh, ended, moves_back = place
        # A draft may hold any integer; an id that the model lacks would break the matcher.
        if ended or not 0 <= token < self._vocab_size:
            return False
        consumed = False
        if token in phase.exits and (matcher is None or fresh):
            self._place = self._beginning_of(phase.exits[token])
        elif token in self._end_set:
            if not (phase.may_end if matcher is None else matcher.is_accepting()):
                return False
            self._place = place._replace(ended=True)
        elif matcher is not None:
            if not (moves_back or for_good):
                return False
            if matcher.try_consume_tokens([token]) != 1:
                _check(matcher)
                return False
            consumed = moves_back
            if fresh:
                self._place = place._replace(fresh=False)
        self._path.append((place, consumed))
        return True

    def _retreat(self) -> None:
        """Take the last token back."""
        place, consumed = self._path.pop()
        if consumed and place.matcher is not None:
            place.matcher.rollback(1)
        self._place = place

    def _mask_into(self, words: np.ndarray) -> bool:
        """Write which tokens may come next, a bit each; return whether any may not."""
        phase, matcher, fresh, ended, _ = self._place
        if ended:
            return False
        if matcher is None:
            if phase.may_end:
                return False
            for token in self._ends:
                words[token // _WORD] &= ~_bit(token)
            return True
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        _check(matcher)
        if fresh:
            for token in phase.exits:
                words[token // _WORD] |= _bit(token)
        if not words.any():
            raise OptionError(_STUCK)
        return True


_STUCK = "the model's tokens cannot continue the constrained output: change the constraint"


def _bit(token: int) -> int:
    """The token's bit in a word of a mask, which is signed."""
    bit = 1 << token % _WORD
    return bit - 2**_WORD if bit >> (_WORD - 1) else bit


def _check(matcher: llguidance.LLMatcher) -> None:
    """Raise an error if a matcher has failed or is stuck."""
    if matcher.is_error():
        raise OptionError(
            f"the constraint takes too much to follow ({in_one_line(matcher.get_error())}): "
            "make it simpler"
        )
    if matcher.is_stopped() and not matcher.is_accepting():
        raise OptionError(_STUCK)
