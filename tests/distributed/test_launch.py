"""A rank's environment before MLX is imported, and blocks that defer Ctrl-C."""

import signal

import pytest

from mlxspec.distributed.launch import launched_rank, uninterrupted
from tests.support.command_line import run


@pytest.mark.parametrize(("rank", "expected"), [("1", 1), ("0", 0), (None, None)])
def test_the_rank_is_known_before_mlx_is_imported(
    rank: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank is None:
        monkeypatch.delenv("MLX_RANK", raising=False)
    else:
        monkeypatch.setenv("MLX_RANK", rank)
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
    usual = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) is not usual
    assert signal.getsignal(signal.SIGINT) is usual


def _interrupt_inside(reached: list[str]) -> None:
    with uninterrupted():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            reached.append("end of the inner block")
        reached.append("end of the block")
    reached.append("behind the block")
