import signal

import pytest

from mlxspec.distributed.launch import uninterrupted


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
