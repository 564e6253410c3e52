"""What a rank knows before MLX is imported, and blocks that Ctrl-C waits for."""

import signal
from pathlib import Path

import pytest

from mlxspec.distributed.launch import launched_rank, uninterrupted
from tests.support.command_line import run


@pytest.mark.parametrize(
    ("hosts", "rank", "expected"),
    [
        ('[["10.0.0.1:5000"], ["10.0.0.2:5000"]]', "1", 1),
        ('[["10.0.0.1:5000"], ["10.0.0.2:5000"]]', None, None),
        ("\n", "0", None),  # what mlx.launch writes for one rank
        (None, "0", 0),  # another back end
        (None, None, None),
    ],
)
def test_the_rank_is_known_before_mlx_is_imported(
    hosts: str | None,
    rank: str | None,
    expected: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("MLX_RANK", rank), ("MLX_HOSTFILE", hosts and str(tmp_path / "hosts"))):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    if hosts:
        (tmp_path / "hosts").write_text(hosts)
    assert launched_rank() == expected


@pytest.mark.parametrize("option", ["--prompt-file", "--prompts"])
def test_a_prompt_that_would_never_end_is_refused(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_RANK", "0")
    assert "name a file" in run("generate", option, "-").output


def test_an_interrupt_comes_after_the_block() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        _interrupt_inside(reached)
    assert reached == ["end of the inner block", "end of the block"]


def test_without_an_interrupt_nothing_comes() -> None:
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _interrupt_inside(reached: list[str]) -> None:
    with uninterrupted():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            reached.append("end of the inner block")
        reached.append("end of the block")
    reached.append("behind the block")
