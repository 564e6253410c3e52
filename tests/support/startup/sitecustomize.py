"""Lets the tests' processes start sooner: Python imports this file before it runs a program.

At each import transformers reads 1,700 of its files, twice: half of the time that a command takes
to load a model. With this, one process reads them, and the others read what it has found.
"""

import os
import sys


class _Finder:
    """Changes one module of transformers as it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "transformers.utils.import_utils":
            return None
        sys.meta_path.remove(self)
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.create_import_structure_from_path = _kept(
                module.create_import_structure_from_path, os.environ["TESTS_STARTUP_FILE"]
            )

        spec.loader.exec_module = exec_module
        return spec


def _kept(read, file):
    def read_once(path):
        path = os.fspath(path)
        folder = os.path.dirname(path) if os.path.isfile(path) else path
        if os.path.basename(folder) != "models":
            return read(folder)
        import pickle

        try:
            with open(file, "rb") as kept:
                return pickle.load(kept)
        except FileNotFoundError:
            found = read(folder)
            with open(f"{file}.{os.getpid()}", "wb") as new:
                pickle.dump(found, new)
            os.replace(new.name, file)
            return found

    return read_once


if "TESTS_STARTUP_FILE" in os.environ:
    sys.meta_path.insert(0, _Finder())
