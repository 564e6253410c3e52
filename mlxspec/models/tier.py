"""The tiers of targets: what drafts a model can verify."""

from __future__ import annotations

import enum


class Tier(enum.Enum):
    """What a target can verify, the richest first."""

    TREE = "tree"
    """Branching drafts: KV caches, and positions that come from RoPE modules alone."""

    CHAIN = "chain"
    """Drafts in a row: every cache can be cut back."""

    REPLAY = "replay"
    """Drafts in a row, at a price: some state cannot be cut back (state-space and linear
    attention). It is restored after a rejection, and accepted tokens run once more."""

    PLAIN = "plain"
    """No drafts: several rows in one forward do not give what they give one by one."""
