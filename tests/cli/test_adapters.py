"""``--adapter-path``: adapters change the output and must not share caches with the base model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from click.testing import CliRunner, Result

from mlxspec.cli.bench import bench_command
from mlxspec.cli.cache_prompt import cache_prompt_command
from mlxspec.cli.calibrate import calibrate_command
from mlxspec.cli.chat import chat_command
from mlxspec.cli.explain import explain_command
from mlxspec.cli.generate import generate_command
from mlxspec.cli.inspect import inspect_command
from mlxspec.cli.serve import serve_command
from mlxspec.engine.calibration import cost_file
from mlxspec.models.model import load
from mlxspec.models.model_files import DEMO_DIRECTORY
from tests.support.adapters import write_adapters

PROMPT = 'Repeat the following phrase 3 times: "The red fox sees the river.".'
OPTIONS = ("--model", DEMO_DIRECTORY, "--max-tokens", 24)
PLAIN = ("--decoder", "prompt-lookup")


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("adapters") / "lora")


@pytest.fixture(scope="module")
def dora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("adapters") / "dora", dora=True)


def run(command: object, *arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)), input=stdin)


def tokens(*arguments: object) -> list[int]:
    result = run(generate_command, *OPTIONS, *PLAIN, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["tokens"]


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_output_is_mlx_lm_s_with_the_same_adapters(
    kind: str, request: pytest.FixtureRequest
) -> None:
    adapters = request.getfixturevalue(kind)
    model, tokenizer = mlx_lm.load(str(DEMO_DIRECTORY), adapter_path=str(adapters))
    model.set_dtype(mx.float32)
    messages = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    theirs = [*mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=24)]
    ours = tokens(PROMPT, "--adapter-path", adapters)
    assert ours == [response.token for response in theirs]
    assert ours != tokens(PROMPT)


@pytest.mark.nightly
@pytest.mark.slow
def test_chat_and_explain_put_them_in_too(lora: Path) -> None:
    said = run(generate_command, *OPTIONS, *PLAIN, PROMPT, "--adapter-path", lora).stdout
    chat = run(
        chat_command, *OPTIONS, *PLAIN, "--adapter-path", lora, "--no-color", stdin=PROMPT + "\n"
    )
    assert chat.stdout.strip() == said.strip()
    explained = run(explain_command, *OPTIONS, *PLAIN, PROMPT, "--adapter-path", lora)
    plain = run(explain_command, *OPTIONS, *PLAIN, PROMPT)
    assert explained.exit_code == plain.exit_code == 0
    assert explained.stdout != plain.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_a_chat_s_other_models_go_without_them(lora: Path) -> None:
    options = ("--model", "demo", "--max-tokens", 24, *PLAIN, "--adapter-path", lora, "--no-color")
    models = ["demo", str(DEMO_DIRECTORY), "demo"]
    turns = "".join(f"/model {model}\n/reset\n{PROMPT}\n" for model in models)
    plain, adapted = (
        run(generate_command, *OPTIONS, *PLAIN, PROMPT, *more).stdout.split()
        for more in ((), ("--adapter-path", lora))
    )
    said = run(chat_command, *options, stdin=turns).stdout
    assert said.split() == [*adapted, *plain, *adapted]


def test_their_step_times_have_a_file_of_their_own(lora: Path, dora: Path) -> None:
    files = [cost_file(load("demo", adapter_path=path)[0]) for path in (None, lora, dora)]
    assert len({file.model["digest"] for file in files}) == 3


def test_what_measures_a_model_measures_it_with_them(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path))
    loaded: list[object] = []

    def load_and_stop(*_: object, **options: object) -> None:
        loaded.append(options["adapters"])
        raise KeyboardInterrupt

    for module in ("model", "heads.loading"):
        monkeypatch.setattr(f"mlxspec.models.{module}.load_parts", load_and_stop)
    run(calibrate_command, "demo", "--adapter-path", lora)
    run(calibrate_command, "demo", "--adapter-path", lora, "--show")
    run(bench_command, "demo", "--adapter-path", lora)
    run(serve_command, "--model", "demo", "--adapter-path", lora, "--port", 0)
    run(inspect_command, "demo", "--adapter-path", lora)
    assert loaded == [lora] * 5


@pytest.mark.slow
def test_a_prompt_cache_remembers_its_adapters(lora: Path, dora: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.safetensors"
    begun, end = PROMPT[:40], PROMPT[40:]
    arguments = ("--model", DEMO_DIRECTORY, "--prompt", begun, "--prompt-cache-file", file)
    assert run(cache_prompt_command, *arguments, "--adapter-path", lora).exit_code == 0
    options = ("--model", DEMO_DIRECTORY, "--prompt-cache-file", file, *PLAIN)
    options = (*options, "--max-tokens", 24, "--json", end)

    def answer(*more: object) -> list[int]:
        return json.loads(run(generate_command, *options, *more).stdout)["tokens"]

    with_adapters = answer("--adapter-path", lora)
    for more in ((), ("--adapter-path", dora)):
        other = run(generate_command, *options, *more)
        assert other.exit_code == 1
        assert f"was made with --adapter-path {lora}: give the same" in other.stderr
    assert run(cache_prompt_command, *arguments, "--force").exit_code == 0
    assert answer() != with_adapters
    other = run(generate_command, *options, "--adapter-path", lora)
    assert other.stderr.endswith("was made with --adapter-path none: give the same here\n")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda path: shutil.rmtree(path), "No such file or directory"),
        (
            lambda path: (path / "adapter_config.json").unlink(),
            "config.json: cannot be read",
        ),
        (
            lambda path: (path / "adapters.safetensors").unlink(),
            "safetensors: cannot be read",
        ),
        (lambda path: (path / "adapter_config.json").write_text("{"), "not valid JSON"),
        (lambda path: (path / "adapter_config.json").write_text("{}"), "do not fit the model"),
        (lambda path: (path / "adapters.safetensors").write_bytes(b"x" * 50), "damaged"),
    ],
)
def test_a_bad_directory_is_one_line(
    lora: Path, tmp_path: Path, change: object, complaint: str
) -> None:
    path = Path(shutil.copytree(lora, tmp_path / "bad"))
    change(path)
    result = run(generate_command, *OPTIONS, *PLAIN, PROMPT, "--adapter-path", path)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert complaint in result.stderr
    assert "bad" in result.stderr


def test_nothing_is_downloaded_for_a_bad_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxspec.models.model_files.download", lambda *_: 1 / 0)
    result = run(generate_command, "a", "--model", "owner/name", "--adapter-path", "nowhere")
    assert "nowhere/adapter_config.json: cannot be read" in result.stderr


@pytest.mark.parametrize(
    ("command", "arguments", "complaint"),
    [
        (
            serve_command,
            ("--models", "all"),
            "apply only to MODEL, which is missing: name one",
        ),
        (chat_command, ("--server", "http://127.0.0.1:1"), "options for drafts, caches and "),
    ],
)
def test_where_they_do_not_go(
    command: object, arguments: tuple[str, ...], complaint: str, lora: Path
) -> None:
    result = run(command, *arguments, "--adapter-path", lora, stdin="")
    assert result.exit_code == 1
    assert complaint in result.stderr
