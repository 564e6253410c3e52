"""Names from a file in a one-line message."""

_LONGEST = 120


def printable(name: object) -> str:
    """A name as it may go to a terminal: without control characters, not too long."""
    return ascii(str(name)[:_LONGEST])[1:-1]
