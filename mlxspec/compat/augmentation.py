"""Speculation for programs that call mlx-lm's generation functions, without changing them."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import OptionError
from ..generation.response import GenerationResponse
from ..models.model import load
from ..models.model_files import DEMO
from . import generation

_mlx_lm = import_module("mlx_lm.generate")  # mlx_lm.generate is a function
_its_load = _mlx_lm.load  # the original, even after it is replaced
_PACKAGE = __name__.partition(".")[0]

_active: list[Augmentation] = []
_warned: set[str] = set()


def augment() -> Augmentation:
    """Make mlx-lm's ``generate``, ``stream_generate`` and ``batch_generate`` speculate.

    The functions are replaced in all imported modules, under any name, and in mlx-lm itself for
    modules imported later. Their output stays the same. ``load`` also accepts "demo", the bundled
    model. If mlxspec does not support a call's arguments or model, mlx-lm's own function serves
    the call, with a warning, once for each reason.

    Not covered are functions kept outside modules (in a class, in ``partial``), and calls of
    ``generate_step`` and ``BatchGenerator``. So ``mlx_lm.server`` only speculates for requests that
    it does not batch: requests with a seed, ``--kv-bits`` or a draft model, and all requests to a
    model whose caches cannot be batched.

    Returns:
        a handle to undo it, which is also a context manager. If :func:`augment` was called several
        times, undoing the last handle restores mlx-lm's functions.
    """
    handle = Augmentation()
    if not _active:
        _exchange(_STAND_INS)
    _active.append(handle)
    return handle


class Augmentation:
    """A handle to undo :func:`augment`."""

    def undo(self) -> None:
        """Put mlx-lm's functions back, unless another augmentation still needs them replaced."""
        if self in _active:
            _active.remove(self)
            if not _active:
                _exchange({own: theirs for theirs, own in _STAND_INS.items()})

    def __enter__(self) -> Augmentation:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def _exchange(replacements: Mapping[Any, Any]) -> None:
    """Replace functions in all modules but mlxspec's own."""
    by_identity = {id(old): new for old, new in replacements.items()}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == _PACKAGE:
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in by_identity:
                setattr(module, name, by_identity[id(value)])


def _known(*functions: Callable[..., Any]) -> set[str]:
    """The names of mlx-lm's arguments; mlx-lm itself refuses others."""
    return {name for function in functions for name in signature(function).parameters}


_STREAM_ARGUMENTS = _known(
    _mlx_lm.stream_generate, _mlx_lm.generate_step, _mlx_lm.speculative_generate_step
)
_BATCH_ARGUMENTS = _known(_mlx_lm.batch_generate, _mlx_lm.BatchGenerator)


@functools.wraps(_mlx_lm.stream_generate)
def _stream_generate(*args: Any, **options: Any) -> Generator[GenerationResponse, None, None]:
    responses = None
    if options.keys() <= _STREAM_ARGUMENTS:
        with _warned_if_it_fails():
            responses = generation.stream_generate(*args, **options)
    yield from responses or generation.plainly(*args, **options)


@functools.wraps(_mlx_lm.generate)
def _generate(
    model: Any, tokenizer: Any, prompt: Any, verbose: bool = False, **options: Any
) -> str:
    return generation.joined(_stream_generate(model, tokenizer, prompt, **options), verbose)


@functools.wraps(_mlx_lm.batch_generate)
def _batch_generate(*args: Any, **options: Any) -> Any:
    run: Callable[[], Any] = functools.partial(generation.generate_in_batch, *args, **options)
    if options.keys() <= _BATCH_ARGUMENTS:
        with _warned_if_it_fails():
            given = signature(generation.batch_generate).bind(*args, **options)
            run = generation.prepared(**given.arguments)
    return run()


@functools.wraps(_its_load)
def _load(path_or_hf_repo: str, *args: Any, **options: Any) -> Any:
    own = path_or_hf_repo == DEMO and not Path(DEMO).is_dir()
    return (load if own else _its_load)(path_or_hf_repo, *args, **options)


_STAND_INS = {
    _its_load: _load,
    _mlx_lm.stream_generate: _stream_generate,
    _mlx_lm.generate: _generate,
    _mlx_lm.batch_generate: _batch_generate,
}


@contextmanager
def _warned_if_it_fails() -> Iterator[None]:
    """Turn an error into a warning, once for each reason: mlx-lm then serves the call.

    The block must end before the generation begins. A later error goes to the caller, whose own
    processor may have raised it.
    """
    try:
        if mx.distributed.init().size() > 1:
            raise OptionError("the model is split over several machines: use mlxspec generate")
        yield
    except Exception as error:  # mlx-lm may support the model or argument that causes it
        reason = " ".join(str(error).split()) or type(error).__name__
        kind = re.sub(r"\d+", "#", reason)
        if kind not in _warned:
            _warned.add(kind)
            warnings.warn(f"mlx-lm generates without speculation: {reason}", stacklevel=2)
