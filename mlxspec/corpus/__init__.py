"""Earlier answers, kept to draft from: in a process, or on disk over its runs. No MLX here."""

from .contents import Contents, Text, contents, earned_by_day, forget, kept_texts
from .kept import KeptTexts
from .memory import MAX_TOKENS, Memory
from .part import EARNED, SOURCES
from .settings import (
    SWITCH,
    About,
    Settings,
    data_directory,
    directory_name,
    kept_directories,
    load_settings,
    memory_directory,
    open_kept,
    save_settings,
    settings_in_force,
)
from .tokenizer_identity import TokenizerIdentity, Vocabulary, identify

__all__ = [
    "EARNED",
    "MAX_TOKENS",
    "SOURCES",
    "SWITCH",
    "About",
    "Contents",
    "KeptTexts",
    "Memory",
    "Settings",
    "Text",
    "TokenizerIdentity",
    "Vocabulary",
    "contents",
    "data_directory",
    "directory_name",
    "earned_by_day",
    "forget",
    "identify",
    "kept_directories",
    "kept_texts",
    "load_settings",
    "memory_directory",
    "open_kept",
    "save_settings",
    "settings_in_force",
]
