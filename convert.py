"""Convert a checkpoint for MLX: ``python convert.py --help``."""

from mlxspec.__main__ import run

if __name__ == "__main__":
    run("mlxspec.cli.convert", "convert_command", "convert.py")
