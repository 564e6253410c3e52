"""A small model that two or three ranks can split, and ``mlx.launch``."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from mlxspec.models.model_files import DEMO_DIRECTORY
from tests.support.examples import LONG
from tests.support.random_models import COMMON
from tests.support.rank import HYBRIDS

ROOT = Path(__file__).resolve().parents[2]
# Run mlx.launch without its busy loop: it selects on the ranks' standard input, which is always
# writable. No test writes there.
LAUNCHER = """
from mlx._distributed_utils import launch
select = launch.select
launch.select = lambda readers, _, other, seconds: select(readers, [], other, min(seconds, 0.05))
launch.main()
"""
SECONDS = 120


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers that ranks split by tensor parallelism."""
    args = {
        "model_type": "llama",
        "hidden_size": 192,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "rms_norm_eps": 1e-5,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return saved(args, tmp_path_factory.mktemp("distributed") / "small")


@pytest.fixture(scope="session")
def small_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random hybrid model of six layers that ranks run as a pipeline."""
    hybrid = HYBRIDS["pipeline"]
    args = {**COMMON, **hybrid.config, "model_type": hybrid.model_type, "vocab_size": 4096}
    args |= {"num_hidden_layers": 6, "tie_word_embeddings": False}
    return saved(args, tmp_path_factory.mktemp("distributed") / "hybrid")


def saved(args: dict[str, Any], directory: Path) -> Path:
    """Write a random float32 model and the bundled model's tokenizer to a directory."""
    directory.mkdir()
    mx.random.seed(1)
    model_class, args_class = _get_classes(args)
    weights = dict(tree_flatten(model_class(args_class.from_dict(args)).parameters()))
    # Few tokens win, so that the output repeats itself; EOS tokens are not among them.
    weights["lm_head.weight"] *= mx.where(mx.arange(4096)[:, None] % 200 == 7, 3.0, 0.1)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(args))
    for file in DEMO_DIRECTORY.glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive free ports."""
    while True:
        with ExitStack() as held, suppress(OSError, OverflowError):
            first = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            port: int = first.getsockname()[1]
            for more in range(1, count):
                held.enter_context(socket.create_server(("127.0.0.1", port + more)))
            return port


@contextmanager
def launched(*command: str, n: int = 2) -> Iterator[subprocess.Popen[str]]:
    """Run a Python script as several ranks under ``mlx.launch``, with the ring back end."""
    ranks = ["-n", str(n), "--backend", "ring", "--starting-port", str(free_ports(n))]
    # At the end of its standard input, mlx.launch would read in a busy loop: keep it open.
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *ranks, "--python", sys.executable, *command],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            # The scripts of mlx.launch break if its path has a space.
            "TMPDIR": "/tmp",
            # Otherwise each rank would compile the same functions with a C++ compiler.
            **({} if LONG else {"MLX_DISABLE_COMPILE": "1"}),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()
