"""Answer two questions at once in asyncio tasks: python async_stream.py [MODEL].

The model runs in a thread of the decoder and does not block the event loop. Both answers share
the model's steps. Cancelling a task ends its answer before the next step.
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
