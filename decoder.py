"""Generate text: ``python decoder.py --help``, or ``from decoder import PromptLookupDecoder``.

The two decoders are in ``mlxspec/generation/decoder.py``, and differ only in their drafters:
:class:`mlxspec.PromptLookupDecoder` copies what followed an n-gram before
(``mlxspec/drafting/prompt_lookup.py``), :class:`mlxspec.LookaheadDecoder` takes the model's own
guesses of the tokens ahead (``mlxspec/drafting/lookahead.py``). Both share the sampling
(:class:`mlxspec.engine.sampling.Chooser`) and the acceptance rule,
:func:`mlxspec.drafting.accept.accept`.
"""

import os
from typing import TYPE_CHECKING

from mlxspec.__main__ import run

if TYPE_CHECKING:
    from mlxspec import LookaheadDecoder, PromptLookupDecoder

__all__ = ["LookaheadDecoder", "PromptLookupDecoder"]


def __getattr__(name: str) -> object:
    """Import a decoder on first use, so that ``--help`` does not wait for MLX."""
    if name in __all__:
        import mlxspec

        return getattr(mlxspec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    if os.path.isdir("mlx_model"):  # what convert.py has written goes before the user's settings
        os.environ.setdefault("MLXSPEC_MODEL", "mlx_model")
    run("mlxspec.cli.generate", "generate_command", "decoder.py")
