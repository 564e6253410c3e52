"""Constraints as token masks: which tokens may follow each node of a draft, and which must.

The library llguidance parses the output. One of its matchers follows the output, and copies of it
follow the branches of a draft, so each row of a step gets the mask for its own context.
"""

from __future__ import annotations

import copy
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import llguidance
import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..drafting.tree import DraftTree
from ..errors import OptionError
from ..models.reasoning import reasoning_markers, token_of
from ..models.tokenizer import token_bytes
from .compiling import compiled, in_one_line
from .compiling_process import ByteTokens
from .params import Constraint, Phase, Phases

_MOST_KEPT = 64 << 20  # bytes of compiled constraints per tokenizer, by the estimate below
# A compiled choice of texts takes 43 to 70 bytes for each of its characters.
_BYTES_PER_CHARACTER, _LEAST_BYTES = 64, 1 << 18
_MOST_FORCED = 1024  # tokens to return at once, since forced text can have any length

_ANCHOR = "☺"  # no token merges it with the text after it
_UNKNOWN = "\ufffd".encode()


class Vocabulary:
    """A model's tokens in llguidance's form, and the constraints compiled for them.

    Args:
        tokenizer: the model's tokenizer, of any kind.
        vocab_size: the number of token ids that the model knows.

    Raises:
        OptionError: the tokenizer lacks a token that ends an output, or one for an ASCII character.

    Attributes:
        nbytes: an estimate of the bytes of the compiled constraints that are kept.
    """

    def __init__(self, tokenizer: TokenizerWrapper, vocab_size: int) -> None:
        self.nbytes = 0
        self.vocab_size = vocab_size
        self.ends = [token for token in sorted(tokenizer.eos_token_ids) if token < vocab_size]
        if not self.ends:
            raise OptionError(
                "constraint: the tokenizer has no token that ends an output; set eos_token_ids"
            )
        eos_token = tokenizer.eos_token_id
        if eos_token in self.ends:  # put first the token that the model was trained with
            self.ends.sort(key=lambda token: token != eos_token)
        special = _special_tokens(tokenizer, vocab_size) | {*self.ends}
        known = min(vocab_size, len(tokenizer))
        bytes_of = [_bytes_of(tokenizer, token) for token in range(known)]
        bytes_of += [b""] * (vocab_size - known)
        self._texts = [b"" if token in special else b for token, b in enumerate(bytes_of)]
        characters = {*map(chr, range(32, 127))} - {b.decode("latin-1") for b in self._texts}
        if characters:
            raise OptionError(
                f"constraint: the tokenizer has no token for just {min(characters)!r}, but "
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
        self._compile = partial(compiled, tokens=self.tokens, outline=outline)
        self._compiled: OrderedDict[Constraint, llguidance.LLMatcher] = OrderedDict()
        """The last used constraints, compiled; the least recently used comes first."""
        self._keeping = threading.Lock()

    @staticmethod
    def kept_on(tokenizer: TokenizerWrapper) -> Vocabulary | None:
        """The vocabulary that :meth:`of` has kept on a tokenizer, if any."""
        kept = getattr(tokenizer, "_mlxspec_vocabulary", None)
        return kept[1] if kept else None

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper, vocab_size: int) -> Vocabulary:
        """The vocabulary of a tokenizer, kept on the tokenizer; raises what the class raises."""
        key = vocab_size, frozenset(tokenizer.eos_token_ids)
        kept = getattr(tokenizer, "_mlxspec_vocabulary", None)
        if kept is None or kept[0] != key:
            kept = key, cls(tokenizer, vocab_size)
            tokenizer._mlxspec_vocabulary = kept
        vocabulary: Vocabulary = kept[1]
        return vocabulary

    def encode(self, text: str) -> list[int]:
        """Encode a text that continues a line, as tokens of exactly its bytes.

        If possible, they are what the tokenizer itself makes of the text, alone or after an anchor,
        which keeps the tokenizer from inserting a space.
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
        matcher = self._compiled.get(constraint) or self._compile(constraint)
        with self._keeping:
            if constraint not in self._compiled:
                self._compiled[constraint] = matcher
                self.nbytes += _compiled_bytes(constraint)
            self._compiled.move_to_end(constraint)
            while len(self._compiled) > 1 and self.nbytes > _MOST_KEPT:
                self.nbytes -= _compiled_bytes(self._compiled.popitem(last=False)[0])
        return matcher.deep_copy()


def _compiled_bytes(constraint: Constraint) -> int:
    return max(_LEAST_BYTES, _BYTES_PER_CHARACTER * len(constraint.text))


def _special_tokens(tokenizer: TokenizerWrapper, vocab_size: int) -> set[int]:
    """The tokens without text: control tokens, and the markers of reasoning and tool calls."""
    special = {*tokenizer.all_special_ids}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special |= {token for token, entry in added.items() if getattr(entry, "special", False)}
    names: list[str] = ["[ARGS]"]
    names += reasoning_markers(tokenizer) or ()
    if tokenizer.has_tool_calling:
        names += tokenizer.tool_call_start, tokenizer.tool_call_end
    markers = (token_of(tokenizer, name) for name in names)
    special |= {token for token in markers if token is not None}
    return {token for token in special if 0 <= token < vocab_size}


def _bytes_of(tokenizer: TokenizerWrapper, token: int) -> bytes:
    text = token_bytes(tokenizer, token)
    return b"" if _UNKNOWN in text else text  # the unknown bytes of a part of a character


def _encoder(tokenizer: TokenizerWrapper) -> Callable[[str], list[int]]:
    """A function that encodes a text without adding or removing anything, in any thread."""
    backend = getattr(tokenizer._tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    encoder = copy.deepcopy(backend)  # other code may change the original's settings
    encoder.no_padding()
    encoder.no_truncation()
    return lambda text: list(encoder.encode(text, add_special_tokens=False).ids)


class Grammar:
    """Matches an output against a constraint, token by token.

    Args:
        vocabulary: the model's vocabulary.

    Raises:
        OptionError: as for :func:`mlxspec.engine.compiling.compiled`. The methods also raise it if
            matching the constraint takes too much time or memory.
    """

    def __init__(self, constraint: Constraint | Phases, vocabulary: Vocabulary) -> None:
        self._ends, self._vocab_size = vocabulary.ends, vocabulary.vocab_size
        phases = (Phase(constraint),) if isinstance(constraint, Constraint) else constraint
        self._beginnings = [_beginning(phase, vocabulary) for phase in phases]
        """For each phase, the place at its beginning."""
        self._most_free = math.inf
        """How many tokens free text may have in which the output must not end."""
        self._place = self._beginning_of(0)
        """The place after the last accepted token."""

    def begin(self, max_tokens: float = math.inf) -> Grammar:
        """The same constraint, before the first token of another output.

        Reasoning takes at most half of ``max_tokens``, so that the rest is left for the answer.
        """
        other = copy.copy(self)
        other._most_free = max_tokens / 2
        other._place = self._beginning_of(0)
        return other

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance along tokens that were chosen under the masks."""
        for token in tokens:
            place = self._after(self._place, token)
            if place is None:
                raise OptionError(f"the constraint does not allow the token {token}")
            self._place = place

    def forced(self) -> tuple[int, ...]:
        """The tokens that must come next, whatever the model predicts; empty if several may."""
        phase, matcher, length, ended = self._place
        if matcher is None or ended or (not length and phase.exits):
            return ()
        tokens = matcher.compute_ff_tokens()[:_MOST_FORCED]
        if tokens:
            matcher = matcher.deep_copy()
            tokens = tokens[: matcher.try_consume_tokens(tokens)]
        complete = matcher.is_stopped() and matcher.is_accepting()
        return (*tokens, *self._ends[:1]) if complete else tuple(tokens)

    def allowed(self, tree: DraftTree) -> DraftTree:
        """The nodes of a draft that the constraint allows."""
        return tree.filtered([place is not None for place in self._places(tree)])

    def masks(self, tree: DraftTree) -> mx.array | None:
        """Which tokens may follow each node.

        Returns:
            bool, (rows, vocabulary); all True after a node that is not allowed itself. None if any
            token may follow any node.
        """
        masks = np.ones((len(tree), self._vocab_size), dtype=np.bool_)
        for mask, place in zip(masks, self._places(tree), strict=True):
            if place:
                self._mask_into(mask, place)
        return None if masks.all() else mx.array(masks)

    def _places(self, tree: DraftTree) -> Iterator[_Place | None]:
        """The place after each node of a draft, None for a node that is not allowed.

        Each place is valid only until the next one is taken.
        """
        places: list[_Place | None] = [self._place]
        yield self._place
        last_child = {parent: node for node, parent in enumerate(tree.parents)}
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            place = places[parent]
            if place and place.matcher and (parent == 0 or node != last_child[parent]):
                # A copy takes time in proportion to the output, so the last child takes over its
                # parent's matcher.
                place = place._replace(matcher=place.matcher.deep_copy())
            places.append(place and self._after(place, tree.tokens[node]))
            yield places[node]

    def _beginning_of(self, number: int) -> _Place:
        place = self._beginnings[number]
        return place._replace(matcher=place.matcher and place.matcher.deep_copy())

    def _after(self, place: _Place, token: int) -> _Place | None:
        """The place after a token, None if the token is not allowed. It takes over the matcher."""
        phase, matcher, length, ended = place
        # A draft may hold any integer; an id outside the vocabulary would break the matcher.
        if ended or not 0 <= token < self._vocab_size:
            return None
        if token in phase.exits and (matcher is None or not length):
            return self._beginning_of(phase.exits[token])
        if self._must_exit(place):
            return None
        if token in self._ends:
            may_end = phase.may_end if matcher is None else matcher.is_accepting()
            return place._replace(ended=True) if may_end else None
        if matcher is not None and matcher.try_consume_tokens([token]) != 1:
            _check(matcher)
            return None
        return place._replace(length=length + 1)

    def _must_exit(self, place: _Place) -> bool:
        """Whether only a token that starts another phase may follow a place."""
        phase, matcher, length, _ = place
        bounded = matcher is None and not phase.may_end and phase.exits
        return bool(bounded) and length >= self._most_free

    def _mask_into(self, mask: np.ndarray, place: _Place) -> None:
        """Write into ``mask``, (vocabulary,), which tokens may follow a place."""
        phase, matcher, length, ended = place
        if self._must_exit(place):
            mask[:] = False
            mask[[*phase.exits]] = True
        elif matcher is None:
            mask[self._ends] = ended or phase.may_end
        elif not ended:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            mask[:] = np.unpackbits(bits, count=len(mask), bitorder="little")
            _check(matcher)
            if not length:
                mask[[*phase.exits]] = True
            if not mask.any():
                raise OptionError(_STUCK)


def _beginning(phase: Phase, vocabulary: Vocabulary) -> _Place:
    # The ids of a tokenizer's markers may exceed the model's vocabulary.
    exits = {token: to for token, to in phase.exits.items() if token < vocabulary.vocab_size}
    matcher = vocabulary.matcher(phase.constraint) if phase.constraint else None
    return _Place(phase._replace(exits=exits), matcher)


class _Place(NamedTuple):
    """An output's place in a grammar.

    Attributes:
        phase: the current phase.
        matcher: the matcher of the phase's constraint; None in free text.
        length: the number of the phase's tokens so far.
        ended: whether the output has ended.
    """

    phase: Phase
    matcher: llguidance.LLMatcher | None
    length: int = 0
    ended: bool = False


_STUCK = "the model's tokens cannot continue the constrained output: change the constraint"


def _check(matcher: llguidance.LLMatcher) -> None:
    """Raise OptionError if a matcher has failed or no token can follow."""
    if matcher.is_error():
        raise OptionError(
            f"the constraint is too costly to follow ({in_one_line(matcher.get_error())}): "
            "make it simpler"
        )
    if matcher.is_stopped() and not matcher.is_accepting():
        raise OptionError(_STUCK)
