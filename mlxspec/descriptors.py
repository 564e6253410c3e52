"""Standard input, output and error that are closed: something else must not take their numbers."""

from __future__ import annotations

import os


def occupy_standard_descriptors() -> None:
    """Open the null device on each of the descriptors 0, 1 and 2 that is closed.

    The next file to be opened would get its number. MLX takes the number 0 for a failure, and
    what is written to standard output or error would end up in the file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(descriptor, True)
