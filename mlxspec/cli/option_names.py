"""The API's names of options, as the command line has them."""

from __future__ import annotations

import re

import click


def in_option_names(message: str) -> str:
    """An error of the API with ``--top-k`` for ``top_k``, for each option of the running command.

    A name of one word is taken for an option's only where the message begins with it.
    """
    context = click.get_current_context(silent=True)
    for option in context.command.params if context else ():
        if isinstance(option, click.Option) and option.name:
            spelled = next((name for name in option.opts if name.startswith("--")), None)
            place = rf"(?<![\w./'-]){option.name}(?![\w./'-])"
            if "_" not in option.name:
                place = rf"^{option.name}(?= is | holds )"
            message = re.sub(place, spelled or option.name, message)
    return message
