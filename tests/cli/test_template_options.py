"""Chat template arguments besides the prompt, compared with mlx-lm's commands."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from click.testing import CliRunner, Result
from mlx_lm.generate import main as mlx_lm_generate

import mlxspec
from mlxspec.cli.cache_prompt import cache_prompt_command
from mlxspec.cli.chat import chat_command
from mlxspec.cli.explain import explain_command
from mlxspec.cli.generate import generate_command
from mlxspec.generation.session import Session
from mlxspec.models.model_files import DEMO_DIRECTORY
from tests.support.scripted_model import write_scripted_model

PROMPT = 'Repeat the following phrase 2 times: "The red fox sees the river.".'
TEMPLATE = """\
{%- for message in messages -%}
  {%- if message['role'] == 'assistant' -%}
    {{- ' ' + message['content'] + eos_token -}}
  {%- else -%}
    {{- '[INST] ' + (mood or 'calm') + message['role'] + message['content'] + ' [/INST]' -}}
  {%- endif -%}
{%- endfor -%}
"""
"""A template that prints all its arguments."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("template") / "model"
    shutil.copytree(DEMO_DIRECTORY, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def run(command: object, *arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)), input=stdin)


def report(*arguments: object) -> dict:
    options = ("--decoder", "prompt-lookup", "--max-tokens", 20, "--json")
    result = run(generate_command, *options, *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--system-prompt", "Be brief."),
        ("--system-prompt", ""),
        ("--chat-template-config", '{"mood": "angry", "other": [1]}'),
        ("--prefill-response", "The red fox sees"),
        ("--prefill-response", "The red fox sees "),
        ("--system-prompt", "Be.", "--prefill-response", "The", "--chat-template-config", "{}"),
    ],
    ids=str,
)
def test_the_prompt_is_the_one_of_mlx_lm_s_command(
    model: Path,
    options: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []

    def stop(model: object, tokenizer: object, prompt: list[int], **_: object) -> str:
        given.extend(prompt)
        return ""

    monkeypatch.setattr(sys.modules["mlx_lm.generate"], "generate", stop)
    arguments = ["--model", str(model), "--prompt", PROMPT, *options]
    monkeypatch.setattr(sys, "argv", ["mlx_lm", *arguments])
    mlx_lm_generate()
    loaded, tokenizer = mlx_lm.load(str(model))
    loaded.set_dtype(mx.float32)
    theirs = [*mlx_lm.stream_generate(loaded, tokenizer, given, max_tokens=20)]
    ours = report(*arguments)
    assert ours["prompt_tokens"] == len(given)
    assert ours["tokens"] == [response.token for response in theirs]


@pytest.mark.slow
def test_a_begun_answer_goes_on_with_its_own_spaces() -> None:
    options = ("--model", "demo", "--prompt", PROMPT)
    whole = report(*options)["text"]
    begun = whole[: whole.index(" sees")]
    assert report(*options, "--prefill-response", begun)["text"].startswith(" sees the river.")


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("many", [False, True])
def test_a_form_holds_for_what_follows_the_beginning(tmp_path: Path, many: bool) -> None:
    form = ("--regex", " (sees|hears) the (river|owl)[.]", "--prefill-response", "The red fox")
    if not many:
        answer = report("--model", "demo", PROMPT, *form)
    else:
        file = tmp_path / "prompts.jsonl"
        file.write_text(json.dumps(PROMPT) + "\n")
        options = ("--model", "demo", "--decoder", "prompt-lookup", *form)
        answer = json.loads(run(generate_command, *options, "--prompts", file).stdout)
    assert answer["text"] == " sees the river."
    assert answer["finish_reason"] == "stop"


@pytest.mark.nightly
@pytest.mark.slow
def test_the_lines_of_a_file_get_them_where_they_lack_them(model: Path, tmp_path: Path) -> None:
    user, system = {"role": "user", "content": PROMPT}, {"role": "system", "content": "Mine."}
    lines = [{"prompt": PROMPT}, {"messages": [user]}, {"messages": [system, user]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": [1, 2]}]))
    given = ("--system-prompt", "Yours.", "--chat-template-config", '{"mood": "angry"}')
    options = ("--model", model, "--max-tokens", 20, "--decoder", "prompt-lookup")
    result = run(generate_command, *options, "--prompts", file, "--quiet", *given)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    mine = ("--system-prompt", "Mine.", *given[2:])
    alone = [report("--model", model, PROMPT, *options)["tokens"] for options in (given, mine)]
    assert [answer.get("tokens") for answer in answers] == [alone[0], alone[0], alone[1], None]
    assert "--system-prompt needs a chat template" in answers[3]["error"]
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1  # only the error's


@pytest.mark.slow
def test_a_cached_prompt_begins_with_the_system_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompt.safetensors"
    begun, end = PROMPT.split("sees")
    arguments = ("--model", "demo", "--prompt", begun, "--prompt-cache-file", file)
    assert run(cache_prompt_command, *arguments, "--system-prompt", "Be brief.").exit_code == 0

    tokenizer = mlx_lm.load(str(DEMO_DIRECTORY))[1]

    def text(content: str, *answer: str) -> str:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": content},
        ]
        messages += [{"role": "assistant", "content": one} for one in answer]
        how = {"tokenize": False, "continue_final_message": True}
        return tokenizer.apply_chat_template(messages, **how)

    cached = tokenizer.encode(text(begun), add_special_tokens=False)
    assert Session.load(file).tokens == cached
    answer = report("--prompt-cache-file", file, "sees" + end, "--prefill-response", "The red")
    following = text(PROMPT, "The red").removeprefix(text(begun))
    following_ids = tokenizer.encode(following, add_special_tokens=False)
    assert answer["prompt_tokens"] == len(cached) + len(following_ids)
    assert answer["text"].lstrip().startswith("fox")

    result = run(generate_command, "--prompt-cache-file", file, end, "--system-prompt", "Be brief.")
    assert result.exit_code == 1
    assert "--system-prompt and --prompt-cache-file are given together" in result.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_chat_and_explain_take_them(model: Path) -> None:
    options = ("--model", model, "--max-tokens", 20, "--decoder", "prompt-lookup", "--no-color")
    more = ("--system-prompt", "Be.", "--chat-template-config", '{"mood": "angry"}')
    answer = run(generate_command, *options, PROMPT, *more).stdout
    turns = f"{PROMPT}\n/model {model}\n/reset\n{PROMPT}\n"
    said = run(chat_command, *options, *more, stdin=turns).stdout
    assert said.split() == answer.split() * 2
    explained = run(explain_command, *options, PROMPT, *more)
    assert explained.exit_code == 0
    assert explained.stdout != run(explain_command, *options, PROMPT).stdout


@pytest.mark.parametrize("command", [generate_command, explain_command, chat_command])
@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("{", "'{' is not a JSON object"),
        ("[1]", "'[1]' is not a JSON object"),
        ("[" * 100_000, "is not a JSON object"),
    ],
)
def test_an_invalid_configuration_is_a_usage_error(
    command: object, config: str, complaint: str
) -> None:
    result = run(command, "--chat-template-config", config)
    assert result.exit_code == 2
    assert complaint in result.stderr


@pytest.mark.parametrize(
    "options",
    [("--system-prompt", "a"), ("--chat-template-config", "{}"), ("--prefill-response", "a")],
)
def test_a_model_without_a_template_is_one_line(finite: Path, options: tuple[str, str]) -> None:
    result = run(generate_command, "a", "--model", finite, *options)
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: {options[0]} needs a chat template, which --raw, token ids and some models lack: "
        "leave it out\n"
    )


def test_a_template_that_refuses_them_is_one_line(endless: Path, tmp_path: Path) -> None:
    model = shutil.copytree(endless, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    refusing = "{% if 'b' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
    settings["chat_template"] = "{{ messages[0].content }}" + refusing
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    result = run(generate_command, "a", "--model", model, "--system-prompt", "b")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: the chat template failed (no): ")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_wrong_configuration_is_one_line_of_a_process() -> None:
    start = "from mlxspec.__main__ import main; main()"
    config = ("--chat-template-config", '{"tokenize": false}')
    done = subprocess.run(
        [sys.executable, "-c", start, "generate", "a", *config],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "content", ["{% for part in m.content %}{{ part.text }}{% endfor %}", "{{ m.content + '' }}"]
)
def test_a_question_reaches_templates_of_texts_and_of_parts(tmp_path: Path, content: str) -> None:
    """The model continues the piece that it was asked for last; without a question, it begins."""
    model = write_scripted_model(tmp_path / "model", ("one", " two", " three"), ends=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = f"{{% for m in messages %}}{content}{{% endfor %}}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    contents = "one", [{"type": "text", "text": "one"}]
    messages = [[{"role": "user", "content": one}] for one in contents]
    (tmp_path / "asked.jsonl").write_text(
        "".join(json.dumps({"messages": one}) + "\n" for one in messages)
    )
    decoder = mlxspec.AutoDecoder(*mlxspec.load(model))
    said = [decoder.generate(one, 5).text for one in messages]
    said.append(
        json.loads(run(generate_command, "-m", model, "--json", "-p", "one").stdout)["text"]
    )
    lines = run(generate_command, "-m", model, "--prompts", tmp_path / "asked.jsonl").stdout
    said += [json.loads(line)["text"] for line in lines.splitlines()]
    assert [text.strip() for text in said] == ["two three"] * 5
