"""A user's program, for type checks only: `make lint` runs mypy on it.

Each ignore comment marks a line that a type checker must reject. mypy reports the comment as unused
if the line passes.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator
from typing import assert_type

from typing_extensions import Unpack

import mlxspec
from mlxspec import (
    AnswerIndex,
    AutoDecoder,
    FileError,
    GenerationOptions,
    GenerationResponse,
    GenerationResult,
    LoadError,
    LookaheadDecoder,
    MlxspecError,
    OptionError,
    PromptError,
    PromptLookupDecoder,
    Session,
)

Responses = Generator[GenerationResponse, None, None]
ERRORS: list[type[MlxspecError]] = [
    LoadError,
    FileError,
    OptionError,
    PromptError,
]


def report(done: int, total: int) -> None:
    logging.info("%d of %d", done, total)


def ask(question: str, **options: Unpack[GenerationOptions]) -> str:
    messages = [{"role": "user", "content": question}]
    return "".join(r.text for r in decoder.stream(messages, **options))


decoder = AutoDecoder("demo", memory_tokens=1000)
AutoDecoder("demo", memory_token=1000)  # type: ignore[call-arg]
AutoDecoder("demo", memory=AnswerIndex(10))
ask("Hello?", temp=0.5, seed=1)
ask("Hello?", tmep=0.5)  # type: ignore[call-arg]

assert_type(decoder.stream("text", 5, temp=0.5, session=Session(), on_progress=report), Responses)
decoder.stream([1, 2], max_tokens=5, stop=["a"], chat_template_kwargs={"enable_thinking": False})
decoder.stream("text", max_token=5)  # type: ignore[call-arg]
decoder.stream("text", on_progress=print)
decoder.stream("text", on_progress=lambda done: None)  # type: ignore[arg-type, misc]
decoder.stream("text", temp="warm")  # type: ignore[arg-type]
decoder.stream(5)  # type: ignore[arg-type]
assert_type(decoder.generate("text", 5, color=False, top_p=0.9), GenerationResult)
decoder.generate("text", 5, topp=0.9)  # type: ignore[call-arg]

lookup = PromptLookupDecoder("demo")
assert_type(lookup.stream("text", n_draft=5, seed=None), Responses)
lookup.stream("text", ndraft=5)  # type: ignore[call-arg]
assert_type(lookup.prompt_lookup("text", 5, temp=0.5, top_k=3), GenerationResult)
lookup.prompt_lookup("text", topk=3)  # type: ignore[call-arg]
LookaheadDecoder("demo").lookahead("text", window_size=5, top_k=3)
LookaheadDecoder("demo").lookahead("text", W=5, N=4, G=5, pool_from_prompt=False)
LookaheadDecoder("demo").lookahead("text", window_size="auto")  # type: ignore[arg-type]
LookaheadDecoder("demo").lookahead("text", windowsize=5)  # type: ignore[call-arg]

model, tokenizer = mlxspec.load("demo")
assert_type(mlxspec.generate(model, tokenizer, "text", verbose=True, max_tokens=5, temp=1.0), str)
mlxspec.generate(model, tokenizer, "text", draft_model=model, num_draft_tokens=3)
mlxspec.generate(model, tokenizer, "text", prompt_progress_callback=report)
assert_type(mlxspec.stream_generate(model, tokenizer, [1, 2], 5, seed=3), Responses)
mlxspec.stream_generate(model, tokenizer, "text", prompt_progress_callback=3)  # type: ignore[arg-type]
mlxspec.stream_generate(model, tokenizer, "text", sede=3)  # type: ignore[call-arg]
mlxspec.batch_generate(model, tokenizer, [[1, 2], [3]], max_tokens=[5, 6])
mlxspec.batch_generate(model, tokenizer, [[1, 2]], temperature=1.0)  # type: ignore[call-arg]

for response in decoder.stream("text"):
    assert_type(response.text, str)
    assert_type(response.stats.acceptance_rate, float)
    print(response.txt)  # type: ignore[attr-defined]


async def main() -> None:
    stream = decoder.astream("text", 5, temp=0.5, n_draft=3)
    assert_type(stream, AsyncGenerator[GenerationResponse, None])
    async for response in stream:
        assert_type(response.text, str)
    decoder.astream("text", tmep=0.5)  # type: ignore[call-arg]


asyncio.run(main())
