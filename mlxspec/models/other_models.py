"""Names and files of models that are no models of MLX, and what to use in their place."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from urllib.parse import quote

_LISTED = "https://huggingface.co/mlx-community/models"
_GGUF = b"GGUF"  # the beginning of such a file
_NAMES_GGUF = re.compile(r"(^|[-_. ])gguf($|[-_.: ])", re.IGNORECASE)
# What follows a model's name in names of GGUF files and repositories: "-GGUF", ".Q4_K_M.gguf".
_KIND = re.compile(r"[-_. ](gguf|i?q[1-8]([-_.]|$)|b?f(16|32)([-_.]|$)).*", re.IGNORECASE)
_OLLAMA = re.compile(r"([\w.-]+/)?([\w.-]+):[\w.-]+")
_HOSTED = re.compile(r"(chatgpt|gpt-[345]|o[1345](-|$)|claude|gemini)", re.IGNORECASE)
_BARE = re.compile(r"[\w.-]+")
_HUB_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/"
    r"(?!datasets/|spaces/|collections/|docs/|blog/|papers/)"
    r"(?P<repository>[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+)(?:/[^?#]*)?)?/?(?:[?#].*)?"
)


def hub_repository(name: str) -> tuple[str, str | None]:
    """A repository's name and revision, where ``name`` is its page on the Hub; or else ``name``."""
    url = _HUB_URL.fullmatch(name)
    return (url["repository"], url["revision"]) if url else (name, None)


def is_gguf(path: Path) -> bool:
    """Whether a file is one of llama.cpp's, whatever its name is."""
    try:
        with path.open("rb") as file:
            return file.read(len(_GGUF)) == _GGUF
    except OSError:
        return False


def names_gguf(name: str) -> bool:
    """Whether a name says that it stands for GGUF files."""
    return _NAMES_GGUF.search(name) is not None


def instead_of_gguf(name: str) -> str:
    """What a GGUF model is, and what to use in its place."""
    return f"in GGUF format, which is llama.cpp's and Ollama's; {_in_place_of(Path(name).name)}"


def instead_of(name: str, kind: str) -> str:
    """What to do about a name that is neither a path nor a repository.

    Args:
        name: as it was given.
        kind: what is not there of that name.
    """
    ollama = _OLLAMA.fullmatch(name)
    if name.startswith(("http://", "https://")):
        return "no address of a model on huggingface.co; name a repository there as owner/name"
    if names_gguf(name):
        return f"no such {kind}, and a model {instead_of_gguf(name)}"
    if _HOSTED.match(name):
        return (
            f"no such {kind}, and a model that only its maker serves has no files to load; use an "
            f"open one, as {_LISTED} lists them"
        )
    if ollama:
        return f"a name of Ollama's; {_in_place_of(ollama[2])}"
    missing = f"no such {kind}, and no name of a Hub repository (owner/name)"
    return f"{missing}; {_in_place_of(name)}" if _BARE.fullmatch(name) else missing


def instead_of_files(files: Collection[str], name: str) -> str | None:
    """What to use in place of a repository or a directory without weights for MLX.

    Args:
        files: the names of what it has.
        name: its own.

    Returns:
        None where nothing in it tells.
    """
    if any(file.startswith("consolidated") for file in files):
        return (
            "the maker's original checkpoint; convert it with `mlxspec convert --torch-path "
            "DIRECTORY`"
        )
    if any(file.lower().endswith(".gguf") for file in files):
        return f"a model {instead_of_gguf(name)}"
    if any(re.fullmatch(r"pytorch_model.*\.bin|.*\.pth?", file) for file in files):
        return "it has PyTorch's weights; use a version of the model with safetensors"
    return None


def _in_place_of(name: str) -> str:
    """How to find a model for MLX."""
    plain = _KIND.sub("", Path(name).stem if name.lower().endswith(".gguf") else name)
    return (
        f"use one for MLX, as {_LISTED}?search={quote(plain)} lists them, or convert the original: "
        "mlxspec convert --hf-path OWNER/NAME -q"
    )
