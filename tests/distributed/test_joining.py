"""Ranks that cannot join or have different weights: one line names them and the reason."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import pytest

from mlxspec.distributed import ranks
from mlxspec.distributed.channel import ring_addresses
from mlxspec.errors import MlxspecError
from tests.distributed.conftest import ROOT, SECONDS, free_ports, launched

RANK = "from mlxspec.__main__ import main; main()"


def host_file(folder: Path, content: Any) -> str:
    path = folder / "hosts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "only one rank: give mlx.launch -n 2 or more"),
        ([], "only one rank: give mlx.launch -n 2 or more"),  # MLX would divide by zero
        ([["10.0.0.1:5000"]], "only one rank: give mlx.launch -n 2 or more"),
        ([["10.0.0.1:99999"], ["10.0.0.2:5001"]], "99999 is not a port"),
        ([["10.0.0.1:0"], ["10.0.0.2:5001"]], "0 is not a port"),
        ([["10.0.0.1:5000"], ["10.0.0.1:5000"]], "several ranks have the address 10.0.0.1:5000"),
        ([["10.0.0.1"], ["10.0.0.2"]], "hosts.json: not a list of each rank's addresses"),
        ({"hosts": 2}, "hosts.json: not a list of each rank's addresses"),
        ([1, 2], "hosts.json: not a list of each rank's addresses"),
        ([[1], [2]], "hosts.json: not a list of each rank's addresses"),
        ("[", "hosts.json: not a list of each rank's addresses"),
        (None, "hosts.json: not a list of each rank's addresses"),
    ],
)
def test_a_host_file_that_mlx_cannot_use_is_refused(
    content: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = host_file(tmp_path, content)
    if content is None:
        Path(file).unlink()
    monkeypatch.setenv("MLX_HOSTFILE", file)
    monkeypatch.setenv("MLX_RANK", "0")
    with pytest.raises(MlxspecError) as error, ranks.taking_part():
        pass
    assert message in str(error.value)


def test_the_addresses_of_all_ranks_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    assert ring_addresses() == []
    hosts = [["10.0.0.1:5000", "10.0.1.1:5001"], ["10.0.0.2:5002", "10.0.1.2:5003"]]
    monkeypatch.setenv("MLX_HOSTFILE", host_file(tmp_path, hosts))
    assert ring_addresses() == hosts


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_join_says_so(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_group() -> NoReturn:
        raise RuntimeError("[ring] Couldn't connect (error: 111)")

    def end_with(line: str) -> NoReturn:  # since the other ranks print no exceptions
        raise SystemExit(line)

    monkeypatch.setattr(mx.distributed, "init", no_group)
    monkeypatch.setattr(ranks, "end_with", end_with)
    monkeypatch.setenv("MLX_RANK", str(rank))
    hosts = host_file(tmp_path, [["10.0.0.1:5000"], ["10.0.0.2:5001"]])
    monkeypatch.setenv("MLX_HOSTFILE", hosts)
    expected = (MlxspecError, "rank 0 at 10.0.0.1:5000 cannot join the others")
    if rank:
        expected = (SystemExit, "Error: rank 1 at 10.0.0.2:5001 cannot join the others")
    with pytest.raises(expected[0]) as error, ranks.taking_part():
        pass
    assert str(error.value).startswith(expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("taken", [False, True])
def test_rank_0_names_the_rank_that_it_waits_for_or_the_port_that_is_taken(
    taken: bool, tmp_path: Path
) -> None:
    port = free_ports(2)
    hosts = host_file(tmp_path, [[f"127.0.0.1:{port}"], [f"127.0.0.1:{port + 1}"]])
    late = f"from mlxspec.distributed import ranks; ranks._SECONDS_TO_JOIN = 0.1; {RANK}"
    with socket.create_server(("127.0.0.1", port)) as server:
        if not taken:
            server.close()
        with subprocess.Popen(
            [sys.executable, "-c", late, "generate", "--prompt", "a"],
            cwd=ROOT,
            env={**os.environ, "MLX_RANK": "0", "MLX_HOSTFILE": hosts},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as rank_0:
            assert rank_0.stderr
            line = rank_0.stderr.readline()
            if not taken:
                rank_0.kill()
            rest = rank_0.stderr.read()
    assert rest == ""
    if taken:
        assert line.startswith(f"Error: rank 0 at 127.0.0.1:{port} cannot join the others")
        assert "mlx.launch --starting-port" in line
        assert rank_0.returncode == 1
    else:
        assert line == f"Waiting for rank 1 at 127.0.0.1:{port + 1}\n"


def test_other_weights_or_settings_have_another_fingerprint(
    small_model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(small_model, tmp_path / "copy")
    known = {ranks.fingerprint(small_model)}
    assert {ranks.fingerprint(copy)} == known
    weights, config = copy / "model.safetensors", copy / "config.json"
    whole = weights.read_bytes()
    for place in (len(whole) // 2, len(whole) - 1):
        # A changed matrix differs everywhere; here, in more than a sample's distance.
        changed = bytearray(whole)
        for at in range(place - len(whole) // ranks._SAMPLES, place + 1):
            changed[at] ^= 1
        weights.write_bytes(changed)
        known.add(ranks.fingerprint(copy))
    weights.write_bytes(whole)
    config.write_text(config.read_text().replace("1e-05", "1e-06"))
    known.add(ranks.fingerprint(copy))
    assert len(known) == 4


@pytest.mark.slow
def test_a_rank_with_another_revision_of_the_weights_is_refused(
    small_model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import os; os.chdir({str(tmp_path)!r} + '/' + os.environ['MLX_RANK']); {RANK}"
    )
    for rank in "01":
        shutil.copytree(small_model, tmp_path / rank / "model")
    weights = tmp_path / "1" / "model" / "model.safetensors"
    changed = {name: tensor * 1.01 for name, tensor in mx.load(str(weights)).items()}
    mx.save_safetensors(str(weights), changed, {"format": "mlx"})
    command = (str(script), "generate", "--model", "./model", "--prompt", "a")
    with launched(*command) as launcher:
        output, errors = launcher.communicate(timeout=SECONDS)
    assert output == ""
    assert "Error: ./model: rank 1 has other weights or another config.json than rank 0" in errors
    assert errors.count("Error") == 1
