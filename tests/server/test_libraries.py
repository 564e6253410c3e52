"""Libraries that require a type get it, even from a model with random weights.

instructor, langchain-anthropic and guidance are tested if installed, and the Vercel AI SDK if
Node.js finds it (``NODE_PATH``). instructor and guidance need older versions of other packages, so
give them their own environment.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from tests.support.serving import Running, running_server, served_random

pytestmark = pytest.mark.slow

ASKED: list[Any] = [{"role": "user", "content": "Hello there. Answer with JSON."}]
MOST = 300  # tokens of an answer


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Ann", "Bob"]  # some libraries omit a string's bounds
    mood: Literal["fine", "tired"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    markers = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
    with running_server(served_random(markers)) as running:
        yield running


@pytest.fixture
def openai(server: Running) -> OpenAI:
    return server.client()


@pytest.fixture
def anthropic(server: Running) -> Anthropic:
    return Anthropic(base_url=server.address, api_key="none", max_retries=0)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor(openai: OpenAI, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(openai, mode=instructor.Mode[mode])
    how = {"model": "gpt-4o", "messages": ASKED, "max_tokens": MOST, "max_retries": 0}
    assert isinstance(client.chat.completions.create(response_model=Person, **how), Person)
    *_, last = client.chat.completions.create_partial(response_model=Person, **how)
    assert last.mood in ("fine", "tired")


def test_instructor_over_the_other_apis(openai: OpenAI, anthropic: Anthropic) -> None:
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(openai, mode=instructor.Mode.RESPONSES_TOOLS)
    how: dict[str, Any] = {"model": "gpt-4o", "response_model": Person, "max_retries": 0}
    made = client.responses.create(input="Hello there", max_output_tokens=MOST, **how)
    assert isinstance(made, Person)
    for mode in ("ANTHROPIC_TOOLS", "ANTHROPIC_REASONING_TOOLS"):
        client = instructor.from_anthropic(anthropic, mode=instructor.Mode[mode])
        made = client.messages.create(messages=[*ASKED], max_tokens=MOST, **how)
        assert isinstance(made, Person)


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain(server: Running, responses: bool, method: Any) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="gpt-4o",
        base_url=f"{server.address}/v1",
        api_key="none",  # type: ignore[arg-type]
        max_tokens=MOST,  # type: ignore[call-arg]
        max_retries=0,
        use_responses_api=responses,
    )
    made = model.with_structured_output(Person, method=method).invoke("Hello there")
    assert isinstance(made, Person)


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_over_anthropics_api(server: Running, method: str) -> None:
    ChatAnthropic = pytest.importorskip("langchain_anthropic").ChatAnthropic
    how = {"base_url": server.address, "api_key": "none", "max_tokens": MOST, "max_retries": 0}
    model = ChatAnthropic(model="claude-opus-4-8", **how)
    made = model.with_structured_output(Person, method=method).invoke("Hello there")
    assert isinstance(made, Person)


def pydantic_ai_models(server: Running) -> Iterator[Any]:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.address}/v1", api_key="none")
    yield OpenAIChatModel("gpt-4o", provider=provider)
    yield OpenAIResponsesModel("gpt-4o", provider=provider)
    other = AnthropicProvider(base_url=server.address, api_key="none")
    yield AnthropicModel("claude-opus-4-8", provider=other)


def test_pydantic_ai(server: Running) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput

    for model in pydantic_ai_models(server):
        for kind in (ToolOutput(Person), ToolOutput(Person, strict=False), NativeOutput(Person)):
            agent: Any = Agent(model, output_type=kind, retries=0)
            made = agent.run_sync("Hello there", model_settings={"max_tokens": MOST})
            assert isinstance(made.output, Person)


@pytest.mark.parametrize("kind", ["VLLMModel", "SglangModel"])
def test_guidance(server: Running, kind: str) -> None:
    guidance = pytest.importorskip("guidance")
    make = getattr(guidance.models.experimental, kind)

    def made(what: Any) -> Any:
        program = make("gpt-4o", base_url=f"{server.address}/v1", api_key="none", echo=False)
        with guidance.user():
            program += "Hello there"
        with guidance.assistant():
            program += what
        return program["x"]

    assert {*made(guidance.gen("x", regex="[ab]{3}", max_tokens=20))} <= {*"ab"}
    assert made(guidance.select(["one", "two"], name="x")) in ("one", "two")
    text = made(guidance.json("x", schema=Person, max_tokens=MOST))
    assert Person.model_validate_json(text)


PROGRAM = """
const { generateText, streamText, generateObject, tool, Output } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { z } = require("zod");
const baseURL = process.argv[2] + "/v1", apiKey = "none";
const openai = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({ name: "local", baseURL, apiKey });
const models = [
  openai.responses("gpt-4o"), openai.chat("gpt-4o"), openai.responses("gpt-5"),
  compatible("any"), createAnthropic({ baseURL, apiKey })("claude-opus-4-8"),
];
const schema = z.object({ name: z.enum(["Ann", "Bob"]), mood: z.enum(["fine", "tired"]) });
const tools = { find: tool({ description: "Finds.", inputSchema: schema }) };
(async () => {
  for (const model of models) {
    const how = { model, prompt: "Hello there", maxOutputTokens: 300, maxRetries: 0 };
    for (const toolChoice of ["required", { type: "tool", toolName: "find" }]) {
      const { toolCalls } = await generateText({ ...how, tools, toolChoice });
      const streamed = await streamText({ ...how, tools, toolChoice }).toolCalls;
      for (const [call] of [toolCalls, streamed]) console.log(JSON.stringify(call.input));
    }
    if (model.provider.startsWith("local")) continue;  // it would only ask for any object
    const { object } = await generateObject({ ...how, schema });
    const { output } = await generateText({ ...how, output: Output.object({ schema }) });
    for (const made of [object, output]) console.log(JSON.stringify(made));
  }
})();
"""


def test_the_ai_sdk(server: Running, tmp_path: Path) -> None:
    node = shutil.which("node")
    run: Callable[..., Any] = subprocess.run
    names = "['ai', 'zod', '@ai-sdk/openai', '@ai-sdk/openai-compatible', '@ai-sdk/anthropic']"
    looks = [node, "-e", f"{names}.map(require.resolve)"]
    if not node or run(looks, capture_output=True, check=False).returncode:
        pytest.skip("Node.js does not find the packages ai and @ai-sdk/…")
    program = tmp_path / "program.cjs"
    program.write_text(PROGRAM)
    done = run([node, program, server.address], capture_output=True, text=True, check=False)
    made = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(made) == 5 * 4 + 4 * 2, done.stderr
    assert all(map(Person.model_validate, made))
