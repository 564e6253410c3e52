"""Downloads from a stand-in for the Hub, each in a new process with an empty cache."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_hub import LocalHub, serve

pytestmark = pytest.mark.slow

# Print one JSON line per repository: the downloaded files' names, or the error.
SCRIPT = """
import json, sys, time
time.sleep = lambda seconds: None  # between attempts to reach a Hub that is not there
from mlxspec.errors import LoadError
from mlxspec.models.model_files import BESIDE, WEIGHTS, download
for request in sys.argv[1:]:
    repository, _, revision = request.partition("@")
    try:
        found = download(repository, revision or None, weights=(WEIGHTS, *BESIDE))
        print(json.dumps(sorted(path.name for path in found.iterdir())))
    except LoadError as error:
        print(json.dumps(str(error)))
"""


OTHERS = {
    "Tiny-GGUF": ("config.json", "tiny.Q4_K_M.gguf"),
    "old": ("config.json", "pytorch_model.bin"),
    "original": ("params.json", "consolidated.safetensors"),
    "readme": ("README.md", "config.json"),
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    directory = tmp_path_factory.mktemp("repository")
    names = [
        *("config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        *("modeling.py", "pytorch_model.bin", "consolidated.safetensors", "model.gguf"),
    ]
    for name in names:
        (directory / name).write_text(f"content of {name}")
    repositories = {"someone/tiny": directory, "someone/gated": directory}
    for kind, files in OTHERS.items():
        repositories[f"someone/{kind}"] = other = tmp_path_factory.mktemp(kind)
        for name in files:
            (other / name).write_text(f"content of {name}")
    with serve(LocalHub(repositories, gated={"someone/gated"})) as hub:
        yield hub


def download(endpoint: str, cache: Path, *requests: str) -> tuple[list, str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache)}
    environment["NO_PROXY"] = "127.0.0.1"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *requests],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_only_a_models_own_files_are_fetched_and_only_once(hub: LocalHub, tmp_path: Path) -> None:
    wanted = {
        *("config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    }
    hub.requests.clear()
    (names,), progress = download(hub.endpoint, tmp_path, "someone/tiny@main")
    assert set(names) == hub.files_sent() == wanted
    assert "Fetching 6 files" in progress
    hub.requests.clear()
    download(hub.endpoint, tmp_path, "someone/tiny")
    assert hub.files_sent() == set()


def test_repositories_that_cannot_be_had_are_named(hub: LocalHub, tmp_path: Path) -> None:
    (missing, gated, revision), _ = download(
        hub.endpoint, tmp_path, "someone/nothing", "someone/gated", "someone/tiny@nope"
    )
    assert missing.startswith("someone/nothing: no such directory or public repository")
    assert gated.startswith("someone/gated: the repository is gated")
    assert "hf auth login" in gated
    assert revision == "someone/tiny: the repository has no such revision"


def test_repositories_without_weights_for_mlx_are_refused(hub: LocalHub, tmp_path: Path) -> None:
    errors, _ = download(hub.endpoint, tmp_path, *(f"someone/{kind}" for kind in OTHERS))
    for kind, error in zip(OTHERS, errors, strict=True):
        assert error.startswith(f"someone/{kind}: no model*.safetensors")
        assert "huggingface.co/mlx-community/models" in error


def test_without_a_network_the_error_says_so(tmp_path: Path) -> None:
    (error,), _ = download("http://127.0.0.1:9", tmp_path, "someone/tiny")
    assert error.startswith("someone/tiny: ")
    assert "the Hub cannot be reached" in error
