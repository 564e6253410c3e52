"""Chats with a real model: mlx-lm and each of mlxspec's decoders in turns, in one run.

    python benchmarks/real_model.py MODEL [--temp 0,0.8] [--kinds A,B] [--limit N] [--tokens N]

MODEL is a directory or a Hub repository; by default the environment variable MLXSPEC_REAL_MODEL
names it. The chats are in ``chats.jsonl``. A model without a chat template continues those of the
kind "base" instead.

"auto, cold" has no memory and learns nothing from one answer to the next: it begins each with the
costs in the cost file, as a new process does. "auto, after others" is one decoder for all chats,
with its memory in the process. Prefill does not count. Each answer is measured once, and the order
of the methods changes from answer to answer. Outputs are compared with plain decoding's. Above a
temperature of 0, mlx-lm's outputs are others, since its random numbers are; then only its speed is
compared.

Each answer is added to a file of results as soon as it has been measured. So a run that was
interrupted continues where it stopped, and a finished one shows its tables again. ``--record``
instead writes the model's answers as traces for ``mlxspec replay``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, geometric_mean
from time import perf_counter
from typing import Any

import mlxspec  # isort: skip  (before MLX, since it loads a BLAS)
import mlx.nn as nn
import mlx_lm
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.bench.measure import (
    BACKENDS,
    MLX_LM,
    PLAIN,
    Stream,
    TimedRun,
    encoded,
    first_difference,
    in_turn,
    machine_facts,
    model_facts,
    run,
)
from mlxspec.bench.prompts import BenchPrompt, limited, message, read_prompts
from mlxspec.bench.replay import replay
from mlxspec.cli.common.output import folding_table, print_tables, ratio
from mlxspec.corpus.answer_index import MAX_TOKENS, AnswerIndex
from mlxspec.drafting.costs import FixedCosts
from mlxspec.drafting.planner import Planner
from mlxspec.engine.params import SamplingParams
from mlxspec.generation.decoder import Decoder
from mlxspec.generation.drafter_factories import Auto
from mlxspec.models.model_files import given_name

CHATS = Path(__file__).with_name("chats.jsonl")
BASE = "base"
COLD, AFTER = "auto, cold", "auto, after others"
LOOKUP, LOOKAHEAD = "prompt-lookup", "lookahead"
METHODS = (MLX_LM, PLAIN, LOOKUP, LOOKAHEAD, COLD, AFTER)
SLOW = 0.97
WARM_UP = "Name three colours."

Answer = dict[str, Any]
"""A line of the results: an answer's place, its tokens, and each method's figures."""


class Methods:
    """The methods for one temperature, all with the same loaded model."""

    def __init__(
        self, model: nn.Module, tokenizer: TokenizerWrapper, sampling: SamplingParams
    ) -> None:
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self.cold = Decoder(model, tokenizer, Auto())
        decoder = Decoder(model, tokenizer, Auto(AnswerIndex()))
        self.after = decoder.with_separate_memory(
            MAX_TOKENS
        )  # without the experience that is kept on disk
        self.streams: dict[str, Stream] = {
            MLX_LM: self._mlx_lm,
            COLD: self._cold,
            AFTER: self.after.stream,
        }
        for name in (PLAIN, LOOKUP, LOOKAHEAD):
            self.streams[name] = BACKENDS[name](model, tokenizer)

    def _mlx_lm(self, prompt: list[int], *, sampling: SamplingParams, **options: Any) -> Any:
        on_progress = options.pop("on_progress")

        def before_first_token(done: int, total: int) -> None:
            if done < total:  # mlx-lm reports the whole prompt only after the first token
                on_progress(done, total)

        return mlx_lm.stream_generate(
            self.model,
            self.tokenizer,
            prompt,
            sampler=make_sampler(sampling.temp, sampling.top_p),
            prompt_progress_callback=before_first_token,
            **options,
        )

    def _cold(self, prompt: list[int], **options: Any) -> Any:
        """Answer as the first generation of a process, but with the model loaded and probed."""
        _ = self.cold.loaded.capability, self.cold.costs, self.cold.token_classes
        fresh = self.cold.with_separate_memory(0)
        del fresh.costs  # so that they are read from their file, without what steps have shown
        return fresh.stream(prompt, **options)

    def answers(self, prompt: list[int], tokens: int, turn: int) -> dict[str, TimedRun]:
        """Let all methods answer, in an order that depends on ``turn``."""
        return {
            name: run(self.streams[name], prompt, tokens, self.sampling)
            for name in in_turn([*METHODS], turn)
        }

    def warm_up(self) -> None:
        """Measure what is measured at first use, and compile; nothing is learned or remembered."""
        prompt = encoded(self.tokenizer, [message("user", WARM_UP)], False)
        streams = {**self.streams, AFTER: self.after.with_separate_memory(MAX_TOKENS).stream}
        for stream in streams.values():
            run(stream, prompt, 16, self.sampling)

    def remember(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Learn from an answer of an earlier run, as "auto, after others" did in that run."""
        factory, experience = self.after.drafter_factory, self.after.experience
        assert isinstance(factory, Auto)
        drafter = Planner(
            FixedCosts(self.after.costs.curve),
            factory.sources(self.after.token_classes, experience),
            experience=experience,
        )
        replay(prompt, output, drafter)


@dataclass(frozen=True)
class Asked:
    """One question of a chat."""

    chat: int
    turn: int
    kind: str
    temp: float
    prompt: list[int]

    @property
    def key(self) -> tuple[int, int, float]:
        return self.chat, self.turn, self.temp


def questions(
    chats: Mapping[int, BenchPrompt],
    tokenizer: TokenizerWrapper,
    temp: float,
    texts: Mapping[tuple[int, int, float], str],
) -> Iterator[Asked]:
    """The questions of all chats in turn; a later one follows plain decoding's answers.

    Args:
        chats: the chats by their places in the file.
        texts: plain decoding's answers by key; they are read while the questions are asked.
    """
    for chat, prompt in chats.items():
        messages = list(prompt.messages)
        for turn, question in enumerate((*prompt.follow_ups, "")):
            tokens = encoded(tokenizer, messages, prompt.raw)
            asked = Asked(chat, turn, prompt.category, temp, tokens)
            yield asked
            answer = message("assistant", texts[asked.key].strip())
            messages += [answer, message("user", question)]


def measured(methods: Methods, asked: Asked, tokens: int, number: int) -> Answer:
    """Measure all methods on one question."""
    runs = methods.answers(asked.prompt, tokens, number)
    expected = runs[PLAIN].tokens
    figures: dict[str, Any] = {}
    for name in METHODS:
        one, difference = runs[name], None
        compared = name != MLX_LM or not asked.temp
        if compared:
            difference = first_difference(
                methods.model, asked.prompt, expected, one.tokens, methods.sampling
            )
        figures[name] = {
            "tokens": len(one.tokens),
            "seconds": round(one.seconds, 4),
            "prefill_seconds": round(one.prefill_seconds, 4),
            "steps": one.stats.steps if one.stats else len(one.tokens),
            "equal": difference is None if compared else None,
            "near_tie": difference.near_tie if difference else None,
        }
    return {
        "chat": asked.chat,
        "turn": asked.turn,
        "kind": asked.kind,
        "temp": asked.temp,
        "prompt_tokens": len(asked.prompt),
        "text": runs[PLAIN].text,
        "output": expected,
        "methods": figures,
    }


# --- the tables ---


def rate(answer: Answer, name: str) -> float:
    """A method's tokens per second."""
    of = answer["methods"][name]
    return float(of["tokens"] / of["seconds"])


def figures(answers: Sequence[Answer], name: str) -> dict[str, Any]:
    """Sum up a method; ratios are geometric means over the answers."""
    own = [answer["methods"][name] for answer in answers]
    compared = [of["equal"] for of in own if of["equal"] is not None]
    found: dict[str, Any] = {
        "tokens_per_second": geometric_mean(rate(answer, name) for answer in answers),
        "tokens_per_step": sum(of["tokens"] for of in own) / sum(of["steps"] for of in own),
        "equal": sum(compared),
        "compared": len(compared),
        "near_ties": sum(bool(of["near_tie"]) for of in own),
    }
    for base in (MLX_LM, PLAIN, LOOKUP):
        ratios = [rate(answer, name) / rate(answer, base) for answer in answers]
        found[f"vs {base}"] = geometric_mean(ratios)
        found[f"below {SLOW} of {base}"] = fmean(ratio < SLOW for ratio in ratios)
        found[f"slowest vs {base}"] = min(ratios)
    return found


def report(answers: Sequence[Answer], about: Mapping[str, Any]) -> dict[str, Any]:
    """Sum up all answers, by temperature, over all kinds and by kind."""
    by_temp: dict[str, Any] = {}
    for temp in dict.fromkeys(answer["temp"] for answer in answers):
        own = [answer for answer in answers if answer["temp"] == temp]
        kinds = {
            kind: [answer for answer in own if answer["kind"] == kind]
            for kind in dict.fromkeys(answer["kind"] for answer in own)
        }
        by_temp[str(temp)] = {
            "answers": len(own),
            "methods": {name: figures(own, name) for name in METHODS},
            "kinds": {
                kind: {
                    "answers": len(members),
                    "methods": {name: figures(members, name) for name in METHODS},
                }
                for kind, members in kinds.items()
            },
        }
    return {**about, "temperatures": by_temp}


def tables(found: Mapping[str, Any]) -> Iterator[Any]:
    """The report as tables."""
    model, machine = found["model"], found["machine"]
    yield f"{model['name']}, {model['dtype']}; {machine['chip']}, {machine['system']}"
    yield f"mlxspec {machine['mlxspec']}, mlx-lm {machine['mlx_lm']}; {found['date']}"
    for temp, of in found["temperatures"].items():
        yield f"\ntemperature {temp}, {of['answers']} answers of at most {found['tokens']} tokens"
        bases = (MLX_LM, PLAIN, LOOKUP)
        headings = [f"{word} {base}" for base in bases for word in ("vs", f"below {SLOW} of")]
        table = folding_table("method", "tokens/s", "tokens/step", "equal", *headings)
        for name, one in of["methods"].items():
            cells = [
                f"{one['tokens_per_second']:.1f}",
                f"{one['tokens_per_step']:.2f}",
                f"{one['equal']} of {one['compared']}" if one["compared"] else "–",
            ]
            for base in bases:
                cells += [ratio(one[f"vs {base}"]), f"{one[f'below {SLOW} of {base}']:.0%}"]
            table.add_row(name, *cells)
        yield table
        caption = f"speed relative to {MLX_LM}, geometric means"
        by_kind = folding_table("kind", "answers", *METHODS[1:], caption=caption)
        for kind, one in of["kinds"].items():
            speeds = (ratio(one["methods"][name][f"vs {MLX_LM}"]) for name in METHODS[1:])
            by_kind.add_row(kind, str(one["answers"]), *speeds)
        yield by_kind


# --- the command ---


def read_results(path: Path, about: dict[str, Any]) -> list[Answer]:
    """The answers of an earlier run with the same settings; starts the file if there is none.

    Raises:
        SystemExit: the file is from other settings.
    """
    if not path.exists():
        path.write_text(json.dumps(about) + "\n", encoding="utf-8")
        return []
    whole = path.read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):  # the run was interrupted while it wrote
        path.write_text("".join(lines := lines[:-1]), encoding="utf-8")
    head, *answers = [json.loads(line) for line in lines] or [{}]
    for name in ("model", "machine", "tokens", "seed", "top_p", "chats"):
        if head.get(name) != about[name]:
            sys.exit(
                f"{path} has the results of another {name}: name another file with --results, "
                "or remove it"
            )
    about["date"] = head["date"]
    return answers


def measure_all(
    asked: argparse.Namespace,
    chats: Mapping[int, BenchPrompt],
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    about: dict[str, Any],
) -> list[Answer]:
    """Measure what the file of results lacks; returns all answers."""
    answers = read_results(asked.results, about)
    done = {(one["chat"], one["turn"], one["temp"]): one for one in answers}
    texts = {key: one["text"] for key, one in done.items()}
    total = len(asked.temps) * sum(1 + len(chat.follow_ups) for chat in chats.values())
    started, new = perf_counter(), 0
    with asked.results.open("a", encoding="utf-8") as file:
        for temp in asked.temps:
            sampling = SamplingParams(
                temp=temp, top_p=asked.top_p if temp else 1.0, seed=asked.seed
            )
            methods = Methods(model, tokenizer, sampling)
            warm = False
            for question in questions(chats, tokenizer, temp, texts):
                if question.key in done:
                    methods.remember(question.prompt, done[question.key]["output"])
                    continue
                if not warm:
                    methods.warm_up()
                    warm = True
                answer = measured(methods, question, asked.tokens, len(answers))
                answers.append(answer)
                texts[question.key] = answer["text"]
                file.write(json.dumps(answer, ensure_ascii=False) + "\n")
                file.flush()
                new += 1
                left = (total - len(answers)) * (perf_counter() - started) / new / 60
                speeds = "  ".join(
                    f"{name} {rate(answer, name) / rate(answer, MLX_LM):.2f}"
                    for name in METHODS[1:]
                )
                say(f"{len(answers)}/{total} {question.kind}: {speeds}; {left:.0f} min left")
    return answers


def record(
    asked: argparse.Namespace,
    chats: Mapping[int, BenchPrompt],
    model: nn.Module,
    tokenizer: TokenizerWrapper,
) -> None:
    """Write the model's greedy answers as traces, for :mod:`mlxspec.bench.replay`.

    Chats of a kind are answered together, since that takes less time. Those that the file has
    already are left out.
    """
    path: Path = asked.record
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {json.loads(line)["id"] for line in lines}
    by_kind: dict[str, dict[int, BenchPrompt]] = {}
    for number, chat in chats.items():
        if _trace_id(number) not in known:
            by_kind.setdefault(chat.category, {})[number] = chat
    with path.open("a", encoding="utf-8") as file:
        for kind, members in by_kind.items():
            for trace in _answered(members, model, tokenizer, asked.tokens):
                line = {"category": kind, "model": given_name(asked.model), **trace}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            say(f"{kind}: {len(members)} chats")


def _trace_id(number: int) -> str:
    return f"chat-{number}"


def _answered(
    chats: Mapping[int, BenchPrompt], model: nn.Module, tokenizer: TokenizerWrapper, tokens: int
) -> Iterator[dict[str, Any]]:
    """Answer several chats in shared forwards; the messages and which of them the model wrote."""
    talks = {number: list(chat.messages) for number, chat in chats.items()}
    completions: dict[int, list[int]] = {number: [] for number in chats}
    for turn in range(1 + max(len(chat.follow_ups) for chat in chats.values())):
        members = [number for number, chat in chats.items() if turn <= len(chat.follow_ups)]
        for number in members if turn else ():
            talks[number].append(message("user", chats[number].follow_ups[turn - 1]))
        prompts = [encoded(tokenizer, talks[number], chats[number].raw) for number in members]
        answers = mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=tokens)
        for number, text in zip(members, answers.texts, strict=True):
            completions[number].append(len(talks[number]))
            talks[number].append(message("assistant", text.strip()))
    for number in chats:
        yield {
            "id": _trace_id(number),
            "messages": talks[number],
            "completions": completions[number],
        }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    about, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", default=os.environ.get("MLXSPEC_REAL_MODEL"))
    add("--chats", type=Path, default=CHATS, help="the chats, as for mlxspec bench --prompts")
    add("--temp", default="0,0.8", help="the temperatures, separated by commas")
    add("--top-p", type=float, default=0.95, help="above a temperature of 0")
    add("--seed", type=int, default=0)
    add("--tokens", type=int, default=128, help="the most tokens of an answer")
    add("--kinds", help="only these kinds of chats, separated by commas")
    add("--limit", type=int, help="at most so many chats of each kind")
    add("--results", type=Path, default=Path("real_model.jsonl"), help="the file of results")
    add("--record", type=Path, metavar="FILE", help="write greedy answers as traces")
    add("--json", action="store_true", help="print the figures as JSON")
    asked = parser.parse_args()
    if not asked.model:
        parser.error("no model: name one, or set MLXSPEC_REAL_MODEL")
    asked.temps = [float(temp) for temp in asked.temp.split(",")]
    return asked


def chosen_chats(asked: argparse.Namespace, is_base: bool) -> dict[int, BenchPrompt]:
    """The chats that the options choose, by their places in the file.

    Raises:
        SystemExit: there are none.
    """
    whole = read_prompts(asked.chats)
    chats = [chat for chat in whole if chat.raw == is_base]
    kinds = [kind.strip() for kind in asked.kinds.split(",")] if asked.kinds else None
    chosen = [chat for chat in chats if kinds is None or chat.category in kinds]
    if not chosen:
        offered = ", ".join(dict.fromkeys(chat.category for chat in chats))
        sys.exit(f"no chats of the kinds {asked.kinds!r}: choose from {offered or 'none'}")
    return {whole.index(chat): chat for chat in limited(chosen, asked.limit)}


def main() -> None:
    asked = parse()
    loaded = mlxspec.load(asked.model)
    chats = chosen_chats(asked, is_base=not loaded[1].has_chat_template)
    if asked.record:
        record(asked, chats, *loaded)
        return
    about = {
        "model": model_facts(loaded[0], asked.model),
        "machine": machine_facts(),
        "date": date.today().isoformat(),
        "tokens": asked.tokens,
        "seed": asked.seed,
        "top_p": asked.top_p,
        "chats": asked.chats.name,
    }
    found = report(measure_all(asked, chats, loaded[0], loaded[1], about), about)
    if asked.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        print_tables(tables(found))


if __name__ == "__main__":
    main()
