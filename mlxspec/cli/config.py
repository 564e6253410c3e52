"""``mlxspec config``: sets the default model, aliases, and defaults of options."""

from __future__ import annotations

from typing import Any

import click

from ..errors import OptionError
from ..models.model_files import (
    DEMO,
    absolute_name,
    hub_repository,
    is_repository_name,
    local_path,
    no_such_model,
)
from ..terminal import one_line
from .common.model_choice import known_names, model_or_default
from .common.notes import reported, say
from .common.options import group, names_completed
from .common.output import print_rows
from .settings import (
    ALIAS,
    ALIAS_PREFIX,
    ENVIRONMENT_VARIABLE,
    KEYS,
    KNOWN,
    MODEL,
    SettingsFile,
    checked,
    config_path,
    load_config,
    resolved,
)

_completed = names_completed(lambda: [*KEYS, ALIAS_PREFIX])
_key = click.argument("key", help=f"One of {KNOWN}.", shell_complete=_completed)


@group("config", invoke_without_command=True, short_help="Set a default model, aliases, defaults.")
@click.pass_context
def config_command(ctx: click.Context) -> None:
    """Show or change your settings: the default model, aliases, and more.

    Without a subcommand, show all settings and the path of their file.

    \b
    Examples:
      mlxspec config
      mlxspec config set model mlx-community/Mistral-7B-Instruct-v0.3-4bit
      mlxspec config set alias.fast mlx-community/Qwen3-4B-Instruct-2507-4bit
      mlxspec generate --model fast "Name a river."
      mlxspec config unset max-tokens

    \b
    Settings:
      model          the default model
      max-tokens     the default of --max-tokens in generate, explain and chat
      temp           the default of --temp in generate, explain and chat
      system-prompt  the default of --system-prompt in chat
      alias.NAME     the model that NAME stands for, wherever a MODEL is named

    The default model is used when a command line names no model. It is the first of these that
    exists: the model in MLXSPEC_MODEL, the model set here, the directory mlx_model, and demo.
    Options on a command line override these settings. An alias takes precedence over a directory of
    the same name; ./NAME is the directory.

    The settings are in the file config.toml in your configuration directory, or in the directory
    that MLXSPEC_CONFIG_DIR names. You may edit the file; comments are kept.
    """
    if ctx.invoked_subcommand is None:
        with reported():
            _show(load_config())


# A value may begin with a dash, such as -1.
@config_command.command("set", context_settings={"ignore_unknown_options": True})
@_key
@click.argument("value", help="The value of KEY.", shell_complete=names_completed(known_names))
def set_command(key: str, value: str) -> None:
    """Set KEY to VALUE."""
    config, read = load_config(), checked(key, value)
    if key == MODEL:
        read = _model(read, config)
    elif key not in KEYS:
        read = resolved(_model(read, config))
    _write(key, read)
    say(f"{key}: {read}")


@config_command.command("get")
@_key
def get_command(key: str) -> None:
    """Print the value of KEY; the exit status is 1 if it is not set."""
    config = load_config()
    if key not in config:
        raise OptionError(f"{key} is not set: to set it, run mlxspec config set {key} VALUE")
    click.echo(one_line(config[key]))


@config_command.command("unset")
@_key
def unset_command(key: str) -> None:
    """Remove KEY from the settings."""
    if key == ALIAS:
        raise OptionError(f"{ALIAS}: name one of them, {ALIAS_PREFIX}NAME")
    _write(key, None)
    say(f"{key} is not set.")


def _show(config: dict[str, Any]) -> None:
    there = "" if config_path().exists() else " (does not exist yet)"
    print_rows(("file", f"{config_path()}{there}"), *config.items())
    if not config:
        say("Nothing is set. 'mlxspec config --help' lists the settings.")
    say(f"The default model is {model_or_default(None)}.")


def _model(name: str, config: dict[str, Any]) -> str:
    """A model's name in a form that is valid from every directory: paths are absolute."""
    if name == DEMO or ALIAS_PREFIX + name in config:
        return name
    if not local_path(name).is_dir() and not is_repository_name(hub_repository(name)[0]):
        raise OptionError(no_such_model(name))
    return absolute_name(name)


def _write(key: str, value: Any) -> None:
    """Set a setting in the file, or remove it if the value is None."""
    alias = key.removeprefix(ALIAS_PREFIX)
    changed = {key: value} if alias == key else {ALIAS: {alias: value}}
    remedy = f"set {ENVIRONMENT_VARIABLE} to another directory"
    file = SettingsFile(config_path(), changed, remedy=remedy)
    file.write(file.merged(file.read()))
