"""Stores: texts on disk that drafts are drawn from, searched without loading them. No MLX here."""

from ..memory.tokenizer_identity import TokenizerIdentity, Vocabulary, identify
from .building import add_to_store, build_store
from .learner import LEARNED_TOKENS, Learner
from .store import Store, StoreInfo, open_store

__all__ = [
    "LEARNED_TOKENS",
    "Learner",
    "Store",
    "StoreInfo",
    "TokenizerIdentity",
    "Vocabulary",
    "add_to_store",
    "build_store",
    "identify",
    "open_store",
]
