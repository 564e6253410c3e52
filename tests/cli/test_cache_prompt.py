"""``mlxspec cache-prompt``, and generating from its files and mlx-lm's."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result
from mlx_lm.cache_prompt import main as mlx_lm_cache_prompt
from mlx_lm.generate import main as mlx_lm_generate

from mlxspec.cli.cache_prompt import CachedPrompt, cache_prompt_command
from mlxspec.cli.generate import generate_command
from mlxspec.errors import FileError
from mlxspec.models.model_files import DEMO_DIRECTORY

pytestmark = pytest.mark.slow

BEGINNING = 'Repeat the following phrase 4 times: "The red fox sees'
END = ' the river.".'


def run(command: object, *arguments: object) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)))


def cached(file: Path, *arguments: object) -> None:
    options = ("--model", DEMO_DIRECTORY, "--prompt", BEGINNING, "--prompt-cache-file", file)
    result = run(cache_prompt_command, *options, *arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""


def generated(file: Path, *arguments: object) -> dict:
    options = ("--prompt-cache-file", file, "--max-tokens", 12, "--decoder", "prompt-lookup")
    options = ("--model", DEMO_DIRECTORY, *options)
    result = run(generate_command, *options, "--prompt", END, "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def of_mlx_lm(
    main: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *arguments: object
) -> str:
    """Return the output of an mlx-lm command."""
    monkeypatch.setattr(sys, "argv", ["mlx_lm", *map(str, arguments)])
    capsys.readouterr()
    main()
    return capsys.readouterr().out


def test_files_go_both_ways_between_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    cached(ours)
    options = ("--model", DEMO_DIRECTORY, "--prompt", BEGINNING, "--prompt-cache-file", theirs)
    of_mlx_lm(mlx_lm_cache_prompt, monkeypatch, capsys, *options)
    options = ("--prompt", END, "--max-tokens", 12, "--verbose", "False")
    texts = [
        of_mlx_lm(
            mlx_lm_generate, monkeypatch, capsys, *options, "--prompt-cache-file", file
        ).removesuffix("\n")
        for file in (ours, theirs)
    ]
    assert texts[0] == texts[1] != ""
    own, foreign = generated(ours), generated(theirs)
    assert own["text"] == foreign["text"] == texts[0].removeprefix(" ")
    # Our files list their tokens, so drafts come from the cached text as well.
    assert own["prompt_tokens"] > foreign["prompt_tokens"]
    assert own["stats"]["steps"] <= foreign["stats"]["steps"]


def test_raw_text_and_token_ids_go_on_without_a_second_bos(tmp_path: Path) -> None:
    whole = "The red fox sees the river. The red fox sees"
    file = tmp_path / "raw.safetensors"
    options = ("--model", "demo", "--raw", "--prompt-cache-file", file)
    result = run(cache_prompt_command, *options, "--prompt", "The red fox sees the river.")
    assert result.exit_code == 0
    after = generated(file, "--raw", "--prompt", "The red fox sees", "--model", "demo")
    options = ("--model", "demo", "--raw", "--prompt", whole, "--json", "--max-tokens", 12)
    fresh = json.loads(run(generate_command, *options, "--decoder", "prompt-lookup").stdout)
    assert after["prompt_tokens"] == fresh["prompt_tokens"]
    assert after["text"] == fresh["text"]


def test_a_quantised_file_goes_on_quantised(tmp_path: Path) -> None:
    file = tmp_path / "q.safetensors"
    cached(file, "--kv-bits", 8, "--quantized-kv-start", 0)
    assert generated(file)["generation_tokens"] > 0
    assert generated(file, "--kv-bits", 8)["generation_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ("--model", "owner/other"),
            "was made with --model .*demo.*: give the same here",
        ),
        (("--prompt-cache-file", "nowhere.safetensors"), "no such file; make it with"),
    ],
)
def test_wrong_files_and_models_are_one_line(
    tmp_path: Path, arguments: tuple[str, ...], error: str
) -> None:
    file = tmp_path / "c.safetensors"
    cached(file)
    options = ("--model", DEMO_DIRECTORY, "--prompt-cache-file", file, "--prompt", END)
    result = run(generate_command, *options, *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert re.search(error, result.stderr)


def test_a_place_that_cannot_be_written_is_an_error_before_the_model_is_loaded(
    tmp_path: Path,
) -> None:
    options = (
        "--model",
        "owner/none",
        "--prompt",
        "a",
        "--prompt-cache-file",
        tmp_path / "a" / "b.safetensors",
    )
    result = run(cache_prompt_command, *options)
    assert result.exit_code == 1
    assert "b.safetensors: cannot be written" in result.stderr


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_only_a_prompt_cache_is_replaced_and_only_with_force(
    tmp_path: Path, force: tuple[str, ...]
) -> None:
    cache, weights = tmp_path / "cache.safetensors", tmp_path / "model.safetensors"
    cached(cache)
    shutil.copy(DEMO_DIRECTORY / "model.safetensors", weights)
    before = weights.read_bytes()
    options = ("--model", "demo", "--prompt", "a", *force, "--prompt-cache-file")
    result = run(cache_prompt_command, *options, weights)
    assert result.exit_code == 1
    assert (
        result.stderr == f"Error: {weights}: exists and is not a prompt cache; name another file\n"
    )
    assert weights.read_bytes() == before
    result = run(cache_prompt_command, *options, cache)
    assert result.exit_code == (0 if force else 1)
    assert ("--force" in result.stderr) != bool(force)


def test_a_file_is_compared_by_the_model_not_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(DEMO_DIRECTORY)
    file = made_by("demo", tmp_path / "c.safetensors")
    for model in ("demo", str(DEMO_DIRECTORY), str(tmp_path / "link")):
        CachedPrompt(str(file), model, None)
    copy = shutil.copytree(DEMO_DIRECTORY, tmp_path / "copy")
    with pytest.raises(FileError, match="was made with --model demo: give the same here"):
        CachedPrompt(str(file), str(copy), None)


def test_a_file_goes_with_its_model_to_another_place(tmp_path: Path) -> None:
    file = tmp_path / "c.safetensors"
    first, moved = tmp_path / "first", tmp_path / "moved"
    shutil.copytree(DEMO_DIRECTORY, first)
    cached(file, "--model", first)
    expected = generated(file, "--model", first)["tokens"]
    first.rename(moved)
    assert generated(file, "--model", moved)["tokens"] == expected
    assert generated(file, "--model", "demo")["tokens"] == expected


@pytest.mark.parametrize("name", ["norm.weight", "layers.5.mlp.down_proj.weight"])
def test_a_file_of_other_weights_is_refused_at_the_same_place(tmp_path: Path, name: str) -> None:
    file, model = tmp_path / "c.safetensors", tmp_path / "model"
    shutil.copytree(DEMO_DIRECTORY, model)
    cached(file, "--model", model)
    weights = mx.load(str(model / "model.safetensors"))
    weights[f"model.{name}"] *= 1.01
    mx.eval(weights)
    mx.save_safetensors(str(model / "model.safetensors"), weights, {"format": "mlx"})
    asked = ("--model", model, "--prompt-cache-file", file, "--prompt", END)
    result = run(generate_command, *asked)
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: {file} was made with other weights: make it again with 'mlxspec cache-prompt'\n"
    )
    shutil.copytree(DEMO_DIRECTORY, tmp_path / "first")
    cached(file, "--model", tmp_path / "first", "--force")
    result = run(generate_command, *asked)
    assert result.exit_code == 1
    expected = f"Error: {file} was made with --model {tmp_path / 'first'}: give the same here\n"
    assert result.stderr == expected


@pytest.mark.parametrize("name", ["book.foo", "book", "."])
def test_a_name_that_generate_would_not_find_is_refused(tmp_path: Path, name: str) -> None:
    options = ("--model", "demo", "--prompt", "a", "--prompt-cache-file", tmp_path / name)
    result = run(cache_prompt_command, *options)
    assert result.exit_code == 1
    assert result.stderr.endswith(": choose a name *.safetensors\n")
    assert list(tmp_path.iterdir()) == []


def made_by(model: str, file: Path) -> Path:
    """Write a cache file with this model's name and, as by mlx-lm, no digest of its weights."""
    cached(file)
    arrays, metadata = mx.load(str(file), return_metadata=True)
    del metadata["0.weights"]
    mx.save_safetensors(str(file), arrays, {**metadata, "0.model": model})
    return file


@pytest.mark.parametrize("model", ["owner/none", "~nouser/x", "x" * 100_000, "\x1b[31mred", "a\0"])
def test_the_model_that_a_file_names_is_not_loaded_unasked(tmp_path: Path, model: str) -> None:
    file = made_by(model, tmp_path / "c.safetensors")
    result = run(generate_command, "--prompt-cache-file", file, "--prompt", END)
    assert result.exit_code == 1
    expected = r"Error: .+ was made with --model .{1,200}: give the same here\n"
    assert re.fullmatch(expected, result.stderr)
    assert "\x1b" not in result.stderr


def test_settings_of_a_tokenizer_that_are_damaged_do_not_matter(tmp_path: Path) -> None:
    file = tmp_path / "c.safetensors"
    expected = generated(made_by(str(DEMO_DIRECTORY), file))
    for config in ("[" * 100_000, '{"eos_token": [1]}', "null"):
        arrays, metadata = mx.load(str(file), return_metadata=True)
        mx.save_safetensors(str(file), arrays, {**metadata, "0.tokenizer_config": config})
        assert generated(file)["text"] == expected["text"]
