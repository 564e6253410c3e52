"""Model repositories on the Hugging Face Hub."""

import re
from pathlib import Path

from ..errors import LoadError

# What a model and its tokenizer are loaded from; no repository's code, no other formats.
_TOKENIZER_AND_SETTINGS = [
    "*.json",
    "*.jsonl",
    "*.jinja",
    "*.txt",
    "tokenizer.model",
]
_WEIGHTS = ["model*.safetensors", "weights*.npz"]
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_repository_name(name: str) -> bool:
    """Whether ``name`` is ``owner/name``, as on the Hub."""
    return _REPOSITORY.fullmatch(name) is not None


def is_downloaded(repository: str) -> bool:
    """Whether a repository's settings and weights are on this machine, as far as a look tells."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        patterns = _TOKENIZER_AND_SETTINGS + _WEIGHTS
        directory = Path(
            snapshot_download(repository, allow_patterns=patterns, local_files_only=True)
        )
    except (OSError, ValueError, HfHubHTTPError):
        return False
    has_weights = any(any(directory.glob(pattern)) for pattern in _WEIGHTS)
    return has_weights and (directory / "config.json").is_file()


def download(repository: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local copy of a repository's model files, fetched or completed with a progress bar.

    Args:
        repository: ``owner/name``.
        revision: branch, tag or commit; the main branch by default.
        weights: False leaves the weights out, for which the tokenizer has no use.

    Raises:
        LoadError: there is no such repository or revision, it asks for a licence or a login,
            or the network or the disk does not allow the download.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = _TOKENIZER_AND_SETTINGS + (_WEIGHTS if weights else [])
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise LoadError(
            f"{repository}: the repository is gated; accept its terms at huggingface.co and "
            "log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise LoadError(
            f"{repository}: neither a local directory nor a repository on the Hub that can be "
            "read (a private one needs `hf auth login`)"
        ) from error
    except RevisionNotFoundError as error:
        raise LoadError(f"{repository}: the repository has no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:
        raise LoadError(
            f"{repository}: neither a local directory nor downloaded before, and the Hub cannot "
            "be reached; check the name and the network"
        ) from error
    except Exception as error:  # the HTTP library differs between versions of huggingface-hub
        reason = str(error).strip().splitlines()
        raise LoadError(
            f"{repository}: the download failed ({reason[0] if reason else type(error).__name__}); "
            "what has arrived is kept, try again"
        ) from error
