"""Texts to draft from: earlier answers, in memory or on disk, and stores, without MLX."""

from .answers import (
    EARNED,
    SOURCES,
    SWITCH,
    KeptAnswers,
    Settings,
    TokenizerIdentity,
    data_directory,
    identify,
    kept_answers,
    load_settings,
    memory_directory,
    save_settings,
    settings_in_force,
)
from .memory import MAX_TOKENS, Memory
