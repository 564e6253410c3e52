"""Texts to draft from: earlier answers, in memory or on disk, and stores, without MLX."""

from .answers import EARNED, SOURCES, KeptAnswers, TokenizerIdentity, identify, kept_answers
from .memory import MAX_TOKENS, Memory
from .settings import (
    SWITCH,
    Settings,
    data_directory,
    load_settings,
    memory_directory,
    save_settings,
    settings_in_force,
)
