"""Handmade steps with letters as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import RenderableType

from mlxspec.cli.explain import TextOf, drawn
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.tree import DraftTree


def letters(tokens: Sequence[int]) -> str:
    """Decode tokens that are character codes."""
    return "".join(map(chr, tokens))


def verified(tree: DraftTree, choices: str, argmaxes: str = "") -> VerifiedStep:
    """Verify a tree by the acceptance rule."""
    node, accepted = 0, []
    while (child := tree.child(node, ord(choices[node]))) is not None:
        accepted.append(child)
        node = child
    tokens = (*(tree.tokens[one] for one in accepted), ord(choices[node]))
    codes = tuple(map(ord, choices))
    return VerifiedStep(tree, codes, tuple(map(ord, argmaxes or choices)), tuple(accepted), tokens)


def lookahead_step() -> VerifiedStep:
    """A step with a window of 4 columns and 2 levels, and a guess of 3 tokens, 2 of them accepted.

    ========  =  =  =  =
    column    0  1  2  3
    ========  =  =  =  =
    level 0   a  x  y  z
    level 1   m  n  o  p
    argmax    M  N  O  P
    ========  =  =  =  =
    """
    tree = DraftTree.from_branches(
        ord("a"), [list(map(ord, branch)) for branch in ("bcd", "m", "xn", "xyo", "xyzp")]
    )
    after = {"a": "b", "b": "c", "c": "e", "m": "M", "n": "N", "o": "O", "p": "P"}
    choices = "".join(after.get(chr(token), "?") for token in tree.tokens)
    origins = tuple("guess" if chr(token) in "bcd" else "window" for token in tree.tokens[1:])
    return verified(replace(tree, origins=origins), choices)


def explained(*steps: VerifiedStep, text_of: TextOf = letters) -> Iterator[RenderableType]:
    """Draw steps that follow the prompt "Say a"."""
    prompt = [ord(letter) for letter in "Say a"]
    return drawn(steps, range(len(steps)), prompt, text_of)
