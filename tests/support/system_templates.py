"""Chat templates in the shapes of well-known models, which take system messages differently."""

from __future__ import annotations

from mlxspec.models.chat_template import instruct_template

_TURN = "<{{ m.role }}>{{ m.content }}"
_PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"
_LOOP = "{% for m in messages %}"
_FIRST = "{% if loop.first and m.role in ('system', 'developer') %}<system>{{ m.content }}{% el"
_POPPED = """\
{% if messages[0].role == 'system' %}{% set system, messages = messages[0].content, messages[1:] %}\
{% else %}{% set system = '' %}{% endif %}"""
_ALTERNATE = """\
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}"""

STAYS = {
    "any role, as ChatML and Llama 3": f"{_LOOP}{_TURN}{{% endfor %}}",
    "any role, parts only": f"{_LOOP}<{{{{ m.role }}}}>{_PARTS}{{% endfor %}}",
    "known roles, as Qwen 3": (
        f"{_LOOP}{{% if m.role in ('system', 'user', 'assistant') %}}{_TURN}"
        "{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
    ),
}
"""Templates that take system messages anywhere."""

FIRST = {
    "raises, as Qwen 3.5": (
        f"{_LOOP}{_FIRST}if m.role == 'system' %}}{{{{ raise_exception('must be first') }}}}"
        f"{{% else %}}{_TURN}{{% endif %}}{{% endfor %}}"
    ),
    "silent, as SmolLM 3 and gpt-oss": (
        f"{_LOOP}{_FIRST}if m.role in ('user', 'assistant') %}}{_TURN}{{% endif %}}{{% endfor %}}"
    ),
    "parts only, raises": (
        f"{_LOOP}{{% if m.role == 'system' and not loop.first %}}{{{{ raise_exception('no') }}}}"
        f"{{% endif %}}<{{{{ m.role }}}}>{_PARTS}{{% endfor %}}"
    ),
    "parts of users, system as text": (
        f"{_LOOP}{_FIRST}if m.role == 'system' %}}{{{{ raise_exception('no') }}}}{{% else %}}"
        f"<{{{{ m.role }}}}>{_PARTS}{{% endif %}}{{% endfor %}}"
    ),
    "alternation in which a late one counts as an answer, as Gemma 3": (
        f"{_POPPED}{{% if system %}}<system>{{{{ system }}}}{{% endif %}}"
        f"{_LOOP}{_ALTERNATE}{_TURN}{{% endfor %}}"
    ),
    "the last one wins, as DeepSeek V2": (
        "{% set last = messages | selectattr('role', 'equalto', 'system') | list %}"
        "{% if last %}<system>{{ last[-1].content }}{% endif %}"
        f"{_LOOP}{{% if m.role != 'system' %}}{_TURN}{{% endif %}}{{% endfor %}}"
    ),
    "needs a question, raises": (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
        f"{{{{ raise_exception('no question') }}}}{{% endif %}}{_LOOP}{_FIRST}if m.role == 'system'"
        f" %}}{{{{ raise_exception('no') }}}}{{% else %}}{_TURN}{{% endif %}}{{% endfor %}}"
    ),
}
"""Templates that take a single system message, at the beginning."""

NONE = {
    "raises, and alternation, as Gemma 2": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        f"{_LOOP}{_ALTERNATE}{_TURN}{{% endfor %}}"
    ),
    "silent": f"{_LOOP}{{% if m.role != 'system' %}}{_TURN}{{% endif %}}{{% endfor %}}",
    "parts only, silent": (
        f"{_LOOP}{{% if m.role != 'system' %}}<{{{{ m.role }}}}>{_PARTS}{{% endif %}}{{% endfor %}}"
    ),
    "its own markers, raises": (
        f"{_LOOP}{{% if m.role == 'user' %}}<user>{{{{ m.content + '' }}}}"
        "{% elif m.role == 'assistant' %}<assistant>{{ m.content + '' }}"
        "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
    ),
}
"""Templates without system messages."""

MISTRAL = str(instruct_template({"[INST]", "[/INST]"}, ()))
"""The system message comes before the last question."""
