"""The programs in ``examples/``, run on the bundled model as a user runs them."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import mlx_lm
import pytest

import mlxspec
from mlxspec import PromptLookupDecoder
from mlxspec.server.served_model import ServedModel
from tests.server.test_endpoints import PIECES, scripted_caller
from tests.support.demo import FLAT, demo, demo_decoder, given_costs
from tests.support.serving import Running, running_server

EXAMPLES = Path(mlxspec.__file__).parent.parent / "examples"
Run = Callable[..., tuple[str, dict[str, Any]]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="mlxspec is installed without its examples"),
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example; returns its output and its variables."""

    def run(
        name: str, *arguments: object, typed: str = "", server: Running | None = None
    ) -> tuple[str, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        if server:
            monkeypatch.setenv("OPENAI_BASE_URL", f"{server.address}/v1")
            monkeypatch.setenv("OPENAI_API_KEY", "none")
        variables = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out, variables

    return run


def plain(prompt: object, **options: Any) -> str:
    """Return the model's output without drafts."""
    return "".join(response.text for response in demo().stream(prompt, **options))  # type: ignore[arg-type]


def test_all_are_listed_and_tested() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert set(re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text())) == names
    assert set(re.findall(r'run\(\n?\s*"(\w+)"', Path(__file__).read_text())) == names


def test_generate(run: Run) -> None:
    output, variables = run("generate")
    answer, steps, accepted = output.rsplit("\n", 3)[:3]
    assert answer == plain(variables["prompt"], max_tokens=200)
    assert re.fullmatch(r"\d+ tokens in \d+ steps: \d+\.\d\d a step", steps)
    assert re.fullmatch(r"\d+% of the drafted tokens were accepted", accepted)


def test_stream(run: Run) -> None:
    output, variables = run("stream")
    answer, figures = output.rsplit("\n", 2)[:2]
    sampling = {"temp": 0.7, "top_p": 0.9, "seed": 1}
    assert answer == plain(variables["prompt"], max_tokens=200, **sampling)
    assert re.fullmatch(r"\d+ tokens/s, (stop|length)", figures)


def test_async_stream(run: Run) -> None:
    output, variables = run("async_stream")
    questions = variables["QUESTIONS"]
    alone = [plain([{"role": "user", "content": q}], max_tokens=100) for q in questions]
    pairs = zip(questions, alone, strict=True)
    assert output == "".join(f"{question}\n-> {text.strip()}\n\n" for question, text in pairs)


def test_chat(run: Run) -> None:
    line = 'Repeat the following phrase 2 times: "A day.".\n'
    output, variables = run("chat", typed=2 * line)
    kept = [tuple(map(int, pair)) for pair in re.findall(r"\[(\d+) of (\d+) prompt", output)]
    assert kept[0][0] == 0
    assert kept[0][1] <= kept[1][0] < kept[1][1]  # at least the first prompt
    assert [message["role"] for message in variables["messages"]] == ["user", "assistant"] * 2


def test_agent_session(run: Run) -> None:
    output, variables = run("agent_session")
    calls = [line.partition("  [")[0] for line in output.splitlines()]
    assert calls
    schema = json.loads(variables["ACTION"].text)
    for call in calls:
        jsonschema.validate(json.loads(call), schema)


def test_batch(run: Run) -> None:
    _, variables = run("batch")
    model, tokenizer = variables["model"], variables["tokenizer"]
    alone = [mlx_lm.generate(model, tokenizer, p, max_tokens=100) for p in variables["prompts"]]
    assert variables["answers"].texts == alone


def test_from_scratch(run: Run) -> None:
    printed, variables = run("from_scratch")
    decoder = PromptLookupDecoder(demo().model, demo().tokenizer)
    options = {"n_draft": variables["N_DRAFT"], "ngram_max": variables["NGRAM_MAX"]}
    *found, end = decoder.stream(variables["PROMPT"], max_tokens=200, **options)
    assert variables["output"] == [(response.token, response.from_draft) for response in found]
    assert end.finish_reason == "stop"
    text = "".join(one.text for one in found).lstrip()  # mlx-lm drops the first space
    assert re.sub(r"\x1b\[\d+m", "", printed).startswith(f"{text}\n")


def test_own_drafter(run: Run) -> None:
    output, variables = run("own_drafter")
    answer, figure = output.rsplit("\n", 2)[:2]
    assert answer == plain(variables["prompt"])
    assert float(figure.split()[0]) >= 1


def test_own_drafter_alone() -> None:
    drafter = runpy.run_path(str(EXAMPLES / "own_drafter.py"))["LastBigram"]
    decoder = demo_decoder(mlxspec.Decoder, drafter=drafter)
    *_, last = decoder.stream("one two three one two three one two three", max_tokens=30)
    assert last.stats.accepted > 0


def test_structured_output(run: Run) -> None:
    assert run("structured_output")[0] == "Wendy is 20 years old.\n"


def test_replay_logs(run: Run) -> None:
    output, _ = run("replay_logs", EXAMPLES / "chats.jsonl")
    speeds = re.findall(r"^(M2 Pro|M4 Pro): (\d\.\d\d) times", output, flags=re.MULTILINE)
    assert [chip for chip, _ in speeds] == ["M2 Pro", "M4 Pro"]
    assert all(float(speed) > 0.9 for _, speed in speeds)


def test_calibrate(run: Run) -> None:
    output, variables = run("calibrate")
    rows = [line.split() for line in output.splitlines()[-5:]]
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16]
    curve = variables["decoder"].costs.curve
    for drafted, cost, tokens, pays in rows:
        assert float(cost) == pytest.approx(curve(1 + int(drafted)), abs=0.006)
        assert float(tokens) == pytest.approx((1 - 0.8 ** (int(drafted) + 1)) / 0.2, abs=0.006)
        assert (pays == "pays") == (float(tokens) > float(cost))


def test_openai_client(run: Run) -> None:
    decoder = demo_decoder(mlxspec.AutoDecoder, memory_tokens=0)
    decoder.costs = given_costs(FLAT)
    with running_server(ServedModel("demo", decoder)) as server:
        output, _ = run("openai_client", server=server)
    found = re.search(r"\n(\d+) tokens, (\d+) of them accepted drafts\n$", output)
    assert found
    assert 0 < int(found[2]) < int(found[1])


def test_agent_server(run: Run, tmp_path: Path) -> None:
    with scripted_caller(tmp_path / "m", PIECES) as server:
        output, _ = run("agent_server", server=server)
    assert output == 'weather({"city": "Paris"}): sunny\nIt is sunny.\n'
