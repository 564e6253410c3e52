"""Convert a checkpoint for MLX: ``python convert.py --help``."""

from mlxspec.cli.convert import convert_command

if __name__ == "__main__":
    convert_command(prog_name="convert.py")
