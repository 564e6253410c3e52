"""Chat templates for SentencePiece models that have Mistral's ``[INST]`` as a piece.

The ids of a templated conversation are those of the reference: BOS, then for each turn the ids
of its own text, encoded by itself.
"""

from collections.abc import Collection

_INSTRUCT = ("[INST]", "[/INST]")
_SYSTEM = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")

# A space after a piece's name belongs to the piece (SentencePiece puts one before every text),
# so that the spaces at the start of a turn's own text are kept.
_TEMPLATE = """\
{%- set state = namespace(system='', last_user=-1) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'system' -%}
    {%- set state.system = message['content'] -%}
  {%- elif message['role'] == 'user' -%}
    {%- set state.last_user = loop.index0 -%}
  {%- elif message['role'] != 'assistant' -%}
    {{- raise_exception('this model knows no role ' + message['role']) -}}
  {%- endif -%}
{%- endfor -%}
{{- bos_token -}}
<system>
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    {%- set text = message['content'] -%}
    <last question>
    {{- '[INST] ' + text + '<close>' -}}
  {%- elif message['role'] == 'assistant' -%}
    {{- ' ' + message['content'].rstrip(' ') + eos_token -}}
  {%- endif -%}
{%- endfor -%}
"""
_SYSTEM_AS_PIECES = """\
{%- if state.system -%}
  {{- '[SYSTEM_PROMPT] ' + state.system + '[/SYSTEM_PROMPT]' -}}
{%- endif -%}"""
_SYSTEM_IN_LAST_QUESTION = """\
{%- if state.system and loop.index0 == state.last_user -%}
      {%- set text = state.system + '\\n\\n' + text -%}
    {%- endif -%}"""


def instruct_template(control: Collection[str], user_defined: Collection[str]) -> str | None:
    """The Jinja template for a model with these pieces, None without an instruct format.

    ``[INST]`` as a control piece is Mistral's format from version 2 on: ``[INST] text[/INST]``,
    with the system prompt before the last question or, from version 7 on, in pieces of its own.
    As a user-defined piece it is plain text of the form ``[INST] text [/INST]``.
    """
    if set(control).issuperset(_INSTRUCT):
        close = "[/INST]"
    elif set(user_defined).issuperset(_INSTRUCT):
        close = " [/INST]"
    else:
        return None
    has_system_pieces = set(control).issuperset(_SYSTEM)
    return (
        _TEMPLATE.replace("<close>", close)
        .replace("<system>\n", f"{_SYSTEM_AS_PIECES}\n" if has_system_pieces else "")
        .replace("<last question>", "" if has_system_pieces else _SYSTEM_IN_LAST_QUESTION)
    )
