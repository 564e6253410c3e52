"""``python -m mlxspec``: the ``mlxspec`` command."""

from .cli.start import main

if __name__ == "__main__":
    main()
