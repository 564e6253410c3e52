"""Answer two questions at once in tasks of asyncio: python async_stream.py [MODEL].

A thread of the decoder runs the model, so the event loop goes on meanwhile. Both answers share
the model's steps. A task that is cancelled ends its answer before the next step.
"""

import asyncio
import sys

from mlxspec import AutoDecoder

QUESTIONS = [
    'Repeat the following phrase 3 times: "Good morning.".',
    "Rosa is a gardener from Lisbon who is 27 years old.\n\nCopy the text.",
]


async def answer(decoder: AutoDecoder, question: str) -> str:
    text = ""
    messages = [{"role": "user", "content": question}]
    async for response in decoder.astream(messages, max_tokens=100):
        text += response.text  # send it to a web page, for example
    return text


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    decoder = AutoDecoder(model)
    answers = await asyncio.gather(*(answer(decoder, question) for question in QUESTIONS))
    for question, text in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n-> {text.strip()}\n")


if __name__ == "__main__":
    asyncio.run(main())
