"""The layers of the package: which subpackage may import which."""

from __future__ import annotations

import ast
from pathlib import Path

import mlxspec

PACKAGE = Path(mlxspec.__file__).parent
# Each may import only those before it. CONTRIBUTING.md has the same order.
LAYERS = (
    *("errors", "files", "cache_files", "jsonl", "process", "terminal"),
    *("corpus", "drafting", "models", "engine", "distributed"),
    *("generation", "compat", "convert", "bench", "server", "cli"),
)
WITHOUT_MLX = (
    "cache_files",
    "corpus",
    "drafting",
    "errors",
    "files",
    "jsonl",
    "process",
    "terminal",
)


def imports(path: Path) -> list[str]:
    """Return the absolute names of all imports in a file, except those for annotations alone."""
    package = ("mlxspec", *path.relative_to(PACKAGE).parts[:-1])
    found: list[str] = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return found


def layer_of(module: str) -> str | None:
    """Return a module's subpackage; None for the top level and for other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == "mlxspec" and len(parts) > 1 and parts[1] in LAYERS else None


def test_every_file_is_in_a_layer() -> None:
    names = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir()}
    assert names - {"__init__", "__main__", "__pycache__", "py", "demo_model"} == set(LAYERS)


def test_no_import_runs_upwards() -> None:
    upwards = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in PACKAGE.rglob("*.py")
        if (
            own := layer_of(".".join(("mlxspec", *path.relative_to(PACKAGE).with_suffix("").parts)))
        )
        for module in imports(path)
        if (other := layer_of(module)) and LAYERS.index(other) > LAYERS.index(own)
    ]
    assert upwards == []


def test_no_files_import_each_other() -> None:
    """There are no import cycles of any length."""
    files = {
        ".".join(("mlxspec", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    needs = {name: {m for m in imports(path) if m in files} for name, path in files.items()}
    while leaves := [name for name, needed in needs.items() if not needed & needs.keys()]:
        for name in leaves:
            del needs[name]
    assert sorted(needs) == []


def test_the_lower_layers_do_not_import_mlx() -> None:
    for layer in WITHOUT_MLX:
        for path in [*PACKAGE.glob(f"{layer}.py"), *(PACKAGE / layer).rglob("*.py")]:
            own = [m for m in imports(path) if m == "mlx" or m.startswith(("mlx.", "mlx_lm"))]
            assert own == [], path
