"""The default decoder against prompt lookup, on short answers that copy from their prompts.

    python benchmarks/short_answers.py [REPEATS] [MODEL]

The sixty prompts, made from a seed, are of the six kinds of task that the demo model knows. Each is
the first request of two new default decoders: one that knows only step times, and one with the
experience that sixty other prompts of these kinds have left on disk. In each repeat the decoders
take turns on each prompt, in random order, in one process. The result is the median time of an
answer over the repeats, with and without the prompt. Outputs are compared token by token.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median

import mlxspec
from mlxspec import AutoDecoder, PromptLookupDecoder


def _words(text: str) -> list[str]:
    return text.split()


SEED, OTHERS = 17, 18
EACH = 10  # prompts of a kind
_MOST = 160  # tokens of an answer
_ADJECTIVES = _words("quick brown lazy quiet golden silver little happy old red green tall")
_NOUNS = _words("fox dog river house garden tree bird window stone teacher farmer ship")
_VERBS = _words("sees jumps_over follows watches finds likes carries paints leaves hears")
_PEOPLE = _words("Alice Henry Rosa Oscar Victor Grace Nina Paul Emma Walter Clara Felix")
_JOBS = _words("baker pilot judge gardener doctor teacher painter driver nurse singer")
_CITIES = _words("Paris Cairo Lisbon Denver Oslo Lima Prague Berlin Rome Dublin Madrid")
_NAMES = _words("total count value result index limit size rows items buffer offset width")


def _phrase(pick: random.Random) -> str:
    def thing() -> str:
        return f"{pick.choice(_ADJECTIVES)} {pick.choice(_NOUNS)}"

    return f"The {thing()} {pick.choice(_VERBS).replace('_', ' ')} the {thing()}."


def _facts(pick: random.Random, number: int) -> str:
    return " ".join(
        f"{name} is a {pick.choice(_JOBS)} from {pick.choice(_CITIES)} who is "
        f"{pick.randrange(20, 80)} years old."
        for name in pick.sample(_PEOPLE, number)
    )


def _code(pick: random.Random) -> tuple[str, str]:
    """A function's code, and a name in it."""
    first, second, third = pick.sample(_NAMES, 3)
    verb = pick.choice(("copy", "count", "find", "sort", "merge"))
    lines = [
        f"def {verb}_{third}({second}, {third}):",
        f"    {first} = {pick.randrange(10)}",
        f"    for item in {second}:",
        f"        if item > {third}:",
        f"            {first} += {pick.randrange(1, 5)}",
        f"    return {first}",
    ]
    return "\n".join(lines), first


def _items(pick: random.Random) -> tuple[str, int]:
    """Items as JSON, and the id of one of them."""
    ids = pick.sample(range(10, 1000), 2)
    items = ",\n".join(
        f'  {{\n    "id": {number},\n    "name": "{pick.choice(_PEOPLE)}",\n'
        f'    "city": "{pick.choice(_CITIES)}"\n  }}'
        for number in ids
    )
    return f"[\n{items}\n]", ids[0]


def prompts(seed: int) -> Iterator[tuple[str, str]]:
    """The prompts with their kinds."""
    pick = random.Random(seed)
    for _ in range(EACH):
        times = pick.randrange(2, 7)
        yield "repeat", f'Repeat the following phrase {times} times: "{_phrase(pick)}".'
        code, name = _code(pick)
        yield "copy code", f"Copy this code:\n```python\n{code}\n```"
        new = pick.choice([other for other in _NAMES if other not in code])
        yield "rename", f"Rename `{name}` to `{new}` in this code:\n```python\n{code}\n```"
        yield "quote", f"{_facts(pick, 2)}\n\nCopy the text."
        items, number = _items(pick)
        city = pick.choice(_CITIES)
        yield (
            "edit JSON",
            f'Set `city` to "{city}" for the item with id {number}:\n```json\n{items}\n```',
        )
        facts = _facts(pick, 3)
        yield "answer", f"{facts}\n\nHow old is {facts.split()[0]}? Quote the sentence."


def main(repeats: int, model: str, directory: str) -> None:
    lookup = PromptLookupDecoder(model)
    asked, others = (
        [(kind, f"[INST] {text} [/INST]") for kind, text in prompts(seed)]
        for seed in (SEED, OTHERS)
    )
    for _, prompt in others:  # warms up
        list(lookup.stream(prompt, _MOST))
    costs = AutoDecoder(lookup.model, lookup.tokenizer).costs
    kept, used = Path(directory) / "kept", Path(directory) / "used"

    def first(cache: Path, keeps_experience: bool = True) -> AutoDecoder:
        """A decoder as in a new process."""
        os.environ["MLXSPEC_CACHE_DIR"] = str(cache)
        decoder = AutoDecoder(lookup.model, lookup.tokenizer)
        decoder.keeps_experience = keeps_experience
        decoder.costs = costs
        return decoder

    def experienced() -> AutoDecoder:
        """A decoder with experience from the other prompts, but not from the timed ones."""
        shutil.rmtree(used, ignore_errors=True)
        shutil.copytree(kept, used)
        return first(used)

    for _, prompt in others:
        list(first(kept).stream(prompt, _MOST))
    ways: dict[str, Callable[[], Callable[..., Iterator[mlxspec.GenerationResponse]]]] = {
        "plain": lambda: partial(lookup.stream, n_draft=0),
        "prompt lookup": lambda: lookup.stream,
        "auto, a first request": lambda: first(used, keeps_experience=False).stream,
        "auto, kept experience": lambda: experienced().stream,
    }
    times: dict[str, list[list[float]]] = {way: [[] for _ in asked] for way in ways}
    whole: dict[str, list[list[float]]] = {way: [[] for _ in asked] for way in ways}
    tokens: dict[str, int] = dict.fromkeys(ways, 0)
    steps: dict[str, int] = dict.fromkeys(ways, 0)
    order = random.Random(SEED)
    for _ in range(repeats):
        for index, (_, prompt) in enumerate(asked):
            outputs = {}
            for way in order.sample([*ways], len(ways)):
                stream = ways[way]()
                started = time.perf_counter()
                responses = list(stream(prompt, _MOST))
                last = responses[-1]
                whole[way][index].append(time.perf_counter() - started)
                times[way][index].append(last.generation_tokens / last.generation_tps)
                outputs[way] = [response.token for response in responses]
                tokens[way] += len(responses)
                steps[way] += last.stats.steps
            if any(output != outputs["plain"] for output in outputs.values()):
                print(f"outputs differ at prompt {index} (a near tie, or a fault)")
    kinds = [*dict.fromkeys(kind for kind, _ in asked)]
    for what, took in (("without the prompt", times), ("with the prompt", whole)):
        medians = {way: [median(one) for one in took[way]] for way in ways}
        print(f"{what + ', against lookup':<46}{'mean':>6}{'least':>7}{'≥ 0.97':>8}")
        for way in ways:
            pairs = zip(medians["prompt lookup"], medians[way], strict=True)
            ratios = [lookup_took / own for lookup_took, own in pairs]
            share = sum(ratio >= 0.97 for ratio in ratios) / len(ratios)
            rate = f"{way} ({tokens[way] / steps[way]:.2f} tokens per step)"
            print(f"{rate:<46}{geometric_mean(ratios):>6.2f}{min(ratios):>7.2f}{share:>8.0%}")
            for kind in kinds if way.startswith("auto") else ():
                own = [r for r, (name, _) in zip(ratios, asked, strict=True) if name == kind]
                print(f"  {kind:<44}{geometric_mean(own):>6.2f}{min(own):>7.2f}")
    print(f"{tokens['plain'] / len(asked) / repeats:.0f} tokens an answer")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        repeats = int(sys.argv[1]) if sys.argv[1:] else 3
        main(repeats, sys.argv[2] if sys.argv[2:] else "demo", place)
