import io
import time

from rich.console import Console

from mlxspec.cli.prefill_progress import PrefillProgress


def shown(interactive: bool, delay: float, duration: float) -> str:
    """What appears of a prefill of one chunk that takes ``duration`` seconds."""
    stream = io.StringIO()
    console = Console(file=stream, width=40, force_terminal=interactive, _environ={})
    with PrefillProgress(console, delay) as progress:
        progress(0, 100)
        time.sleep(duration)
        progress(100, 100)
    return stream.getvalue()


def wait_for_the_bar(stream: io.StringIO) -> None:
    """Until it is there, however busy the machine; a test that waits too long fails."""
    while "0/100" not in stream.getvalue():
        time.sleep(0.01)


def test_a_long_prefill_shows_a_bar_before_its_first_chunk_ends():
    stream = io.StringIO()
    console = Console(file=stream, width=40, force_terminal=True, _environ={})
    with PrefillProgress(console, delay=0.01) as progress:
        progress(0, 100)
        wait_for_the_bar(stream)
        progress(100, 100)


def test_a_short_prefill_shows_nothing():
    assert shown(interactive=True, delay=10, duration=0) == ""


def test_what_is_no_terminal_gets_nothing():
    assert shown(interactive=False, delay=0.01, duration=0.1) == ""


def test_an_interrupted_prefill_leaves_no_bar_behind():
    stream = io.StringIO()
    console = Console(file=stream, width=40, force_terminal=True, _environ={})
    try:
        with PrefillProgress(console, delay=0.01) as progress:
            progress(0, 100)
            wait_for_the_bar(stream)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    text = stream.getvalue()
    assert text.endswith("\x1b[2K")  # the line is erased
    time.sleep(0.3)
    assert stream.getvalue() == text
