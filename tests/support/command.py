"""The ``mlxspec`` command, which writes each rank's process id to a folder first."""

import os
import sys
from pathlib import Path

from mlxspec.__main__ import main

if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    (folder / f"rank {os.environ['MLX_RANK']}").write_text(str(os.getpid()))
    if seconds := os.environ.get("TEST_SECONDS_SILENT"):
        from mlxspec.distributed import channel

        channel._SECONDS_SILENT, channel._SECONDS_BETWEEN_BEATS = float(seconds), 0.5
    main()
