"""Finds a model's files on this machine or the Hub, and checks them before they are loaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import LoadError, printable
from ..terminal import one_line

if TYPE_CHECKING:
    import mlx.core as mx

# The files of a model and its tokenizer, without code and other formats.
_TOKENIZER_AND_SETTINGS = ["*.json", "*.jsonl", "*.jinja", "*.txt", "tokenizer.model"]
WEIGHTS = "model*.safetensors"
BESIDE = ("mtp.safetensors", "mtp/*.safetensors", "assistant/*.safetensors", "head/*.safetensors")
"""Where a model's trained head may be, if it is not among the model's weights."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/"
    r"(?!datasets/|spaces/|collections/|docs/|blog/|papers/)"
    r"(?P<repository>[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+)(?:/[^?#]*)?)?/?(?:[?#].*)?"
)


_SIMILAR = 0.75  # of the letters of both names must match; one letter of four may be wrong

# --- find the files ---

DEMO = "demo"
DEMO_DIRECTORY = Path(__file__).resolve().parents[1] / "demo_model"


def find_directory(
    path_or_repo: str | Path, revision: str | None, *, weights: Collection[str] = (WEIGHTS, *BESIDE)
) -> Path:
    """The directory with a model's files, downloaded if needed.

    Args:
        path_or_repo: as for :func:`mlxspec.load`.
        revision: branch, tag or commit of a repository.
        weights: patterns of the files with weights to download.

    Raises:
        LoadError: no directory or repository has this name, or the download fails.
    """
    if path_or_repo == DEMO:
        return DEMO_DIRECTORY
    path, name = local_path(path_or_repo), os.fspath(path_or_repo)
    try:
        if path.is_dir():
            return path
    except OSError as error:
        raise LoadError(f"{name}: {error.strerror}; check the name") from error
    repository, its_revision = hub_repository(name)
    if path.exists() or not is_repository_name(repository):
        raise LoadError(no_such_model(name))
    try:
        return download(repository, revision or its_revision, weights=weights)
    except LoadError as error:
        if near := _similar_directory(path):
            raise LoadError(f"{error}; or did you mean the directory {near}?") from error
        raise


def local_path(name: str | os.PathLike[str]) -> Path:
    """A name as a path, with ``~`` and ``~USER`` expanded if that user has a home directory."""
    return Path(os.path.expanduser(name))


def no_such_model(name: str) -> str:
    """The error for a name that is neither a directory's nor a repository's, with the remedy.

    It may be misspelt, a file's, or a name from another program, such as Ollama.
    """
    path = local_path(name)
    if _is_gguf(path):
        return (
            f"{name}: a GGUF file; convert it to a directory with gguf2mlx (pip install gguf2mlx; "
            "gguf2mlx --input FILE --output DIRECTORY)"
        )
    if os.path.isfile(path):  # False also if the name is too long
        return f"{name}: a file, not a model's directory; {_USE_MLX}"
    if near := _similar_directory(path):
        return f"{name}: no such directory; did you mean {near}?"
    return (
        f"{name}: no such directory, and not the name of a Hub repository (owner/name); {_USE_MLX}"
    )


def _is_gguf(path: Path) -> bool:
    if not os.path.isfile(path):  # a pipe would wait for a writer
        return False
    with suppress(OSError), path.open("rb") as file:
        return file.read(4) == b"GGUF"
    return False


def _similar_directory(path: Path) -> Path | None:
    """A directory beside ``path`` whose name differs little from its name."""
    with suppress(OSError):
        names = [other.name for other in path.parent.iterdir() if other.is_dir()]
        similar = get_close_matches(path.name, sorted(names), 1, _SIMILAR)
        return path.with_name(similar[0]) if similar else None
    return None


def absolute_name(name: str) -> str:
    """A model's name in a form that is valid from every directory: existing paths are absolute."""
    path = local_path(name)
    is_path = name not in ("", DEMO) and os.path.exists(path)
    return os.path.abspath(path) if is_path else name


def given_name(name: str | os.PathLike[str]) -> str:
    """A model's name for reports: the repository, or a directory's name without its path."""
    path = local_path(name)
    return path.resolve().name if path.is_dir() else hub_repository(os.fspath(name))[0]


def is_repository_name(name: str) -> bool:
    """Whether ``name`` is ``owner/name``, as on the Hub."""
    return _REPOSITORY.fullmatch(name) is not None


def hub_repository(name: str) -> tuple[str, str | None]:
    """The repository and the revision in the address of a Hub page.

    For a name that is not such an address, the name itself and None.
    """
    url = _HUB_URL.fullmatch(name)
    return (url["repository"], url["revision"]) if url else (name, None)


def download(repository: str, revision: str | None, *, weights: Collection[str]) -> Path:
    """Download a repository's missing model files, with a progress bar; return the local copy.

    Args:
        repository: ``owner/name``.
        revision: branch, tag or commit; the main branch by default.
        weights: patterns of the files with weights. If there are none, only the settings and the
            tokenizer are downloaded.

    Raises:
        LoadError: the repository or revision does not exist, has no weights for MLX, or requires an
            accepted licence or a login; or the network or the disk fails.
    """
    from huggingface_hub import snapshot_download

    patterns = [*_TOKENIZER_AND_SETTINGS, *weights]
    try:
        directory = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the HTTP library differs between versions of huggingface-hub
        reason = one_line(error) or type(error).__name__
        problem = _DOWNLOAD_PROBLEMS.get(
            type(error).__name__, f"the download failed ({reason}); run it again to resume it"
        )
        raise LoadError(f"{repository}: {problem}") from error
    if weights and not any(file for pattern in weights for file in directory.glob(pattern)):
        raise LoadError(f"{repository}: no {WEIGHTS}, or the Hub cannot be reached; {_USE_MLX}")
    return directory


_DOWNLOAD_PROBLEMS = {
    "GatedRepoError": "the repository is gated; accept its terms there and log in with "
    "`hf auth login`",
    "RepositoryNotFoundError": "no such directory or public repository (a private one needs "
    "`hf auth login`)",
    "RevisionNotFoundError": "the repository has no such revision",
    "LocalEntryNotFoundError": "not on this machine, and the Hub cannot be reached; check the name "
    "and the network",
}

_USE_MLX = (
    "use a model for MLX, in safetensors and not GGUF (gguf2mlx converts it), such as those of "
    "https://huggingface.co/mlx-community/models, or convert an original with `mlxspec convert`"
)

# --- check the files ---


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        LoadError: the file cannot be read, or has other content.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path}: not a JSON object")
    return content


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json``, with the EOS ids of ``generation_config.json`` if it has any.

    Raises:
        LoadError: a file is missing or damaged, or the model needs Python code from its repository.
    """
    if not (directory / "config.json").is_file():
        if (directory / "adapter_config.json").is_file():
            raise LoadError(
                f"{directory}: adapters, not a model; name their model, together with "
                "--adapter-path if mlx_lm.lora wrote them, or merge PEFT's into it "
                "(merge_and_unload)"
            )
        raise LoadError(f"{directory}: no config.json; {_USE_MLX}")
    config = read_json_object(directory / "config.json")
    if config.get("model_file") is not None:
        raise LoadError(
            f"{directory}: the model needs Python code from its repository "
            f"({config['model_file']}), which mlxspec never runs; if you trust it, load it with "
            "mlx_lm.load and pass the result to mlxspec"
        )
    generation = directory / "generation_config.json"
    if generation.is_file() and (eos := read_json_object(generation).get("eos_token_id")):
        config["eos_token_id"] = eos
    return config


def check_weights(directory: Path) -> list[mx.array]:
    """Check that all of a model's weight files are present and complete.

    Returns:
        the tensors, which are not evaluated.

    Raises:
        LoadError: a file is missing, truncated or damaged.
    """
    paths = sorted(directory.glob(WEIGHTS))
    if not paths:
        raise LoadError(f"{directory}: no {WEIGHTS}; {_USE_MLX}")
    for name in sorted(set(read_weight_map(directory).values())):
        if not (directory / name).is_file():
            raise LoadError(f"{directory}: the weights file {name} is missing; fetch it again")
    return [tensor for path in paths for tensor in check_weights_file(path).values()]


def read_weight_map(directory: Path) -> dict[str, str]:
    """The file of each tensor, from the index of a model's weights; empty if there is no index.

    Raises:
        LoadError: the index is damaged.
    """
    index = directory / "model.safetensors.index.json"
    listed = read_json_object(index).get("weight_map", {}) if index.is_file() else {}
    if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
        raise LoadError(f"{index}: weight_map must map tensors to file names; fetch it again")
    return listed


def check_weights_file(path: Path) -> dict[str, mx.array]:
    """Like :func:`check_weights`, for one safetensors file; returns the tensors by name."""
    import mlx.core as mx
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np"):  # unlike MLX, checks the header and the length
            return cast("dict[str, mx.array]", mx.load(str(path)))
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (SafetensorError, RuntimeError, ValueError) as error:
        if "unsupported dtype" in str(error):
            kind = str(error).split()[-1]
            with safe_open(path, "np") as file:
                names = (n for n in file.keys() if file.get_slice(n).get_dtype() == kind)  # noqa: SIM118
                raise LoadError(
                    f"{path}: the tensor {printable(next(names))} has the type {kind}, which MLX "
                    "cannot read; use a version of the model in 16 or 32 bits, which "
                    "`mlxspec convert -q` quantises"
                ) from error
        raise LoadError(f"{path}: truncated or damaged; fetch or convert it again") from error
