"""Train an EAGLE-3 head for a model, and show how many of its drafts are right.

    python benchmarks/train_head.py [MODEL] [--to FOLDER]
    python benchmarks/train_head.py --show [MODEL] [--to FOLDER]

The first form writes the head into a folder, by default ``head`` in the model's own, where mlxspec
finds it. MODEL is a model with a chat template, as for ``mlxspec generate``; by default it is
``MLXSPEC_REAL_MODEL``, or else the demo model. Most of the time goes into the examples: the model's
answers to questions that this script makes of templates, and the model's states over open text,
which is the running Python's standard library and the descriptions of the installed packages. They
are kept in the same folder, 6 bytes per token and unit of the model's width, and are not made again
if training is repeated.

The head learns the model's distributions over the next tokens, not the text itself. It starts as
the best linear map, by least squares. Then depth 1 is trained alone, and at last the chain, which
is fed its own output as in decoding (the "training-time test" of EAGLE-3, Li et al. 2025,
arXiv 2503.01840).

Then, or alone with ``--show``, a table has the share of drafts that are right at each depth if
those before them are, and the mean number of tokens that a chain of five adds. The model continues
functions of modules that the head has not seen, and answers the first questions of
``benchmarks/chats.jsonl``, greedily. Functions are continued at temperature 1, too. There the draft
is drawn with the noise that draws the model's own token, or with noise of its own. "new" counts
only tokens that end no three tokens of the context again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import mlxspec  # before mlx.core, for OpenBLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.bench.prompts import read_prompts
from mlxspec.engine.heads import TrainedHead
from mlxspec.engine.hidden import HiddenStates
from mlxspec.engine.prompt_cache import digest_of_weights
from mlxspec.models.heads.chains import Eagle3
from mlxspec.models.heads.settings import args_of, text_of
from mlxspec.models.model_files import find_directory

_LENGTH = 256  # tokens of an example
_GROUP = 32  # examples that are made together
_ASKED = 170  # the most tokens of a question
_BATCH = 8  # examples
_CHATS = Path(__file__).with_name("chats.jsonl")
_DEPTHS = 3  # of the chain
_VOCABULARY = 4096  # tokens that it may draft; more cost more time and space than they bring
_OWN = 2  # attention heads that begin by attending to their own token
_TEMPERATURES = (0.0, 0.0, 0.7, 0.0, 1.0, 0.0, 0.0, 0.7, 0.0, 0.0)  # of the groups of answers

# MLX computes exp one number at a time on the CPU; NumPy is 50 times as fast.


def _softmax(x: mx.array) -> mx.array:
    values = np.array(x)
    values -= values.max(-1, keepdims=True)
    np.exp(values, out=values)
    values /= values.sum(-1, keepdims=True)
    return mx.array(values)


def _sigmoid(x: mx.array) -> mx.array:
    values = np.negative(np.array(x))
    np.exp(values, out=values)
    values += 1
    return mx.array(np.reciprocal(values, out=values))


softmax: Any = mx.custom_function(_softmax)
sigmoid: Any = mx.custom_function(_sigmoid)


@softmax.vjp
def _(_: mx.array, cotangent: mx.array, result: mx.array) -> mx.array:
    product = cotangent * result
    return product - result * product.sum(-1, keepdims=True)


@sigmoid.vjp
def _(_: mx.array, cotangent: mx.array, result: mx.array) -> mx.array:
    return cotangent * result * (1 - result)


def normed(x: Any) -> np.ndarray:
    return np.array(mx.fast.rms_norm(mx.array(x), None, 1e-6))


# The layers, over (batch, length, width), without caches.


def by_heads(x: mx.array, heads: int) -> mx.array:
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def attention(
    attend: nn.Module, x: mx.array, earlier: Sequence[tuple[mx.array, mx.array]] = ()
) -> tuple[mx.array, tuple[mx.array, mx.array]]:
    """Attend as depth ``len(earlier)`` of a chain does, counted from 0.

    At depth d, position p sees the keys of depth 0 up to p - d, which are the model's, and then the
    key of depth 1 at p - d + 1, and so on, up to its own.

    Returns:
        the output, and keys and values for the depths that follow.
    """
    batch, length, _ = x.shape
    groups = attend.n_heads // attend.n_kv_heads
    queries = attend.rope(by_heads(attend.q_proj(x), attend.n_heads)) * attend.scale
    queries = queries.reshape(batch, attend.n_kv_heads, groups, length, -1)
    keys = attend.rope(by_heads(attend.k_proj(x), attend.n_kv_heads))
    values = by_heads(attend.v_proj(x), attend.n_kv_heads)
    steps = [(key[:, :, None], value[:, :, None]) for key, value in (*earlier, (keys, values))]
    depth = len(earlier)
    hidden = mx.array(np.triu(np.full((length, length), -1e9, np.float32), 1 - depth))
    scores = [queries @ steps[0][0].swapaxes(-1, -2) + hidden]
    for step in range(1, depth + 1):
        key = delayed(steps[step][0], depth - step)
        scores.append((queries * key).sum(-1, keepdims=True))
    weights = softmax(mx.concatenate(scores, axis=-1))
    output = weights[..., :length] @ steps[0][1]
    for step in range(1, depth + 1):
        weight = weights[..., length + step - 1 : length + step]
        output = output + weight * delayed(steps[step][1], depth - step)
    output = output.reshape(batch, attend.n_heads, length, -1).swapaxes(1, 2)
    return attend.o_proj(output.reshape(batch, length, -1)), (keys, values)


def delayed(x: mx.array, by: int) -> mx.array:
    """Entries that come ``by`` positions later; positions are the last axis but one."""
    if not by:
        return x
    widths = [(0, 0)] * x.ndim
    widths[-2] = (by, 0)
    return mx.pad(x[..., :-by, :], widths)


def swiglu(mlp: nn.Module, x: mx.array) -> mx.array:
    gate = mlp.gate_proj(x)
    return mlp.down_proj(gate * sigmoid(gate) * mlp.up_proj(x))


def chain(head: Eagle3, embedded: mx.array, read: mx.array, depths: int) -> list[mx.array]:
    """The head's states at each depth and pair, as if all drafts before were right.

    Args:
        embedded: the embeddings of t[p + 1], (batch, length, width).
        read: the model's states at p, side by side.
        depths: how many.
    """
    layer, x = head.layers[0], head.fc(read)
    embedded = layer.input_layernorm(embedded)
    earlier: list[tuple[mx.array, mx.array]] = []
    outputs = []
    for _ in range(depths):
        residual = layer.hidden_norm(x)
        inputs = mx.concatenate([embedded, residual], axis=-1)
        attended, seen = attention(layer.self_attn, inputs, earlier)
        earlier.append(seen)
        x = residual + attended
        x = x + swiglu(layer.mlp, layer.post_attention_layernorm(x))
        outputs.append(x)
        x = delayed(x, 1)
    return outputs


# The examples.

_FREE = (
    "Explain {} to a child.",
    "What should I know about {}?",
    "Write a short story about {}.",
    "Give me five tips about {}.",
    "Write a poem about {}.",
    "Why does {} matter? Answer in two paragraphs.",
    "Compare {} with {}.",
    "Write an e-mail to a friend about {}.",
    "What are the advantages and disadvantages of {}?",
    "I want to write a blog post about {}. Suggest an outline.",
    "How did people think about {} a hundred years ago?",
    "List ten facts about {}.",
    "Write a dialogue between two people who talk about {}.",
    "Ask me three questions about {}, and explain why you ask them.",
    "Describe {} in detail.",
    "Write a letter of complaint that mentions {}.",
    "Plan a day that has to do with {}.",
    "What is the history of {}?",
    "Write a speech about {} and {}.",
    "How would you teach a course on {}?",
)
_TOPICS = re.split(
    r"[|\n]",
    """\
bread|bicycles|volcanoes|the moon|bees|photography|chess|rivers|trains|vaccines|magnets|olive oil
budgeting|rain|owls|compost|violins|databases|honesty|batteries|the Roman Empire|sleep
job interviews|solar panels|tea|glaciers|public libraries|swimming|recycling|earthquakes|jazz
cooking rice|remote work|gardening|whales|hashing|unit tests|recursion|sorting|coffee|teamwork
castles|the heart|dinosaurs|kites|wool|bridges|saving money|house plants|an old clock
a lost letter|a small robot|a market town|autumn|a mountain village|Japan|Brazil|Kenya|Norway
learning a language|public speaking|a birthday party|a delayed delivery|a broken window
a school trip|a new colleague|a dentist's appointment|electric cars|windmills|a fox and a crow""",
)
_ON_CODE = (
    "Write a docstring for this code.",
    "Explain this code step by step.",
    "Find mistakes in this code and correct them.",
    "Write unit tests for this code.",
    "Rewrite this code in JavaScript.",
    "Rename the variables, and return the whole code.",
    "Write a function that uses this code, with an example.",
    "Add comments to this code.",
)
_ON_PROSE = (
    "Summarise this text.",
    "Rewrite this text in simple words.",
    "What are the main points of this text?",
    "Extract the most important terms of this text as a JSON list.",
    "Write three questions about this text, with answers.",
    "Turn this text into a list.",
    "Write an e-mail that explains this.",
    "Repeat this text, with the spelling corrected.",
)
_FUNCTION = r"^def (?:.+\n)+(?:\n? .*\n)*"


def modules() -> tuple[list[str], list[str]]:
    """The standard library's sources: those to learn from, and those held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    learned: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith("site-packages/"):
            continue
        text = path.read_bytes().decode(errors="ignore")  # some tests have other encodings
        (learned if zlib.crc32(name.encode()) % 20 else held_out).append(text)
    return learned, held_out


def pages(texts: Sequence[str]) -> list[str]:
    """Descriptions of the installed packages, and the topics of Python's help."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).glob("*.dist-info/METADATA")):
        text = path.read_bytes().decode(errors="ignore").partition("\n\n")[2]
        if len(text) > 1000:
            found.append(text)
    for text in texts:
        if "topics = {" in text[:300]:
            found += re.split(r"\n    '[\w-]+': r?'''", text)[1:]
    return found


def questions(
    texts: Sequence[str], descriptions: Sequence[str], random: np.random.Generator
) -> Iterator[tuple[str, str]]:
    """Endless questions, each after its kind: half are free, the others have code or prose."""

    def any_of(choices: Sequence[Any]) -> Any:
        return choices[int(random.integers(len(choices)))]

    while True:
        kind = random.integers(10)
        if kind < 5:
            question = any_of(_FREE)
            names = [any_of(_TOPICS) for _ in range(question.count("{}"))]
            yield "free", question.format(*names)
        elif kind < 8:
            found = list(re.finditer(_FUNCTION, any_of(texts), re.MULTILINE))
            if found and len(part := any_of(found)[0][:600]) >= 80:
                yield "code", f"{any_of(_ON_CODE)}\n\n```python\n{part.strip()}\n```"
        else:
            paragraphs = [
                stripped
                for part in re.split(r"\n\s*\n", any_of(descriptions))
                if 150 < len(stripped := part.strip()) < 600
                and stripped.count(" ") > 20
                and not re.search(r"[|=`<]{2}|::", stripped)
            ]
            if paragraphs:
                yield "prose", f"{any_of(_ON_PROSE)}\n\n{' '.join(any_of(paragraphs).split())}"


def groups(tokenizer: Any, texts: Sequence[str], descriptions: Sequence[str]) -> list[np.ndarray]:
    """Questions in groups, (``_GROUP``, length), so that a group can be answered together."""
    random = np.random.default_rng(1)
    by_length: dict[tuple[str, int], list[list[int]]] = {}
    for kind, question in dict.fromkeys(islice(questions(texts, descriptions, random), 12000)):
        message = [{"role": "user", "content": question}]
        tokens = tokenizer.apply_chat_template(message, add_generation_prompt=True)
        if len(tokens) <= _ASKED:
            by_length.setdefault((kind, len(tokens)), []).append(tokens)
    of_kind: dict[str, list[np.ndarray]] = {"free": [], "code": [], "prose": []}
    for (kind, _), asked in by_length.items():
        for first in range(0, len(asked) - _GROUP + 1, _GROUP):
            of_kind[kind].append(np.array(asked[first : first + _GROUP]))
    for same in of_kind.values():
        random.shuffle(same)
    found: list[np.ndarray] = []
    for kind in cycle(("free", "code", "free", "prose")):
        if of_kind[kind]:
            found.append(of_kind[kind].pop(0))
        elif not any(of_kind.values()):
            break
    return found


def generate(
    hidden: HiddenStates, prompts: np.ndarray, length: int, temperature: float, word: int
) -> tuple[np.ndarray, np.ndarray]:
    """Continue prompts of one length, up to ``length`` tokens.

    The noise of each position is that of :func:`noise`.

    Returns:
        tokens, (prompts, length), and the states that a head reads, side by side, for each.
    """
    cache = make_prompt_cache(hidden.model)
    row, tokens, read = prompts, [prompts], []
    for position in range(prompts.shape[1], length + 1):
        logits = hidden.model(mx.array(row), cache=cache)[:, -1]
        read.append(side_by_side(hidden, len(prompts)))
        if position < length:
            values = np.array(logits.astype(mx.float32))
            if temperature:
                values = values / temperature + noise(word, position, values.shape)
            row = values.argmax(-1)[:, None]
            tokens.append(row)
    return np.concatenate(tokens, axis=1), np.concatenate(read, axis=1)


def side_by_side(hidden: HiddenStates, rows: int) -> np.ndarray:
    """The last forward's states that a head reads, (rows, length, their widths)."""
    read = mx.concatenate(hidden.of_layers, axis=-1).astype(mx.float16)
    return np.array(read).reshape(rows, -1, read.shape[-1])


def noise(word: int, position: int, shape: tuple[int, ...]) -> np.ndarray:
    """Gumbel noise, (rows, vocabulary)."""
    return np.random.default_rng([word, position]).gumbel(size=shape).astype(np.float32)


def make_examples(
    hidden: HiddenStates, tokenizer: Any, folder: Path, answers: int, texts: int
) -> None:
    """Write groups of examples into a folder, except those that are there.

    A file has ``tokens``, (``_GROUP``, ``_LENGTH``), ``states``, what the head reads of each, and
    ``start``, where the answers begin.
    """
    learned, _ = modules()
    descriptions = pages(learned)
    folder.mkdir(parents=True, exist_ok=True)
    asked = groups(tokenizer, learned, descriptions)
    for index, prompts in enumerate(asked[: answers // _GROUP]):
        if not (path := folder / f"own-{index:03}.npz").exists():
            temperature = _TEMPERATURES[index % len(_TEMPERATURES)]
            tokens, states = generate(hidden, prompts, _LENGTH, temperature, index)
            write_examples(path, tokens, states, prompts.shape[1])
    random = np.random.default_rng(2)
    chosen = [learned[index] for index in random.permutation(len(learned))[:150]]
    chosen += [descriptions[index] for index in random.permutation(len(descriptions))[:250]]
    stream: list[int] = []
    for index in random.permutation(len(chosen)):
        stream += [*tokenizer.encode(chosen[index][:6000]), tokenizer.eos_token_id]
    rows = np.array(stream[: len(stream) // _LENGTH * _LENGTH]).reshape(-1, _LENGTH)
    rows = rows[random.permutation(len(rows))]
    for index in range(texts // _GROUP):
        if not (path := folder / f"text-{index:03}.npz").exists():
            tokens = rows[index * _GROUP :][:_GROUP]
            parts = [generate(hidden, few, _LENGTH, 0.0, 0)[1] for few in np.split(tokens, 8)]
            write_examples(path, tokens, np.concatenate(parts), _LENGTH)


def write_examples(path: Path, tokens: np.ndarray, states: np.ndarray, start: int) -> None:
    np.savez(path.with_suffix(".tmp.npz"), tokens=tokens, states=states, start=start)
    path.with_suffix(".tmp.npz").rename(path)
    print(f"{path}", flush=True)


class Examples:
    """All examples in a folder.

    Attributes:
        tokens: (examples, ``_LENGTH``).
        states: what the head reads of each token, divided by ``scale``.
        answers: whether a token is in an answer.
        counted: whether a token is learned from: those after an answer's end are not.
        scale: the root mean square of each of the states' channels, which differ a hundredfold.
        norm: the weight of the model's final norm.
    """

    def __init__(self, folder: Path, hidden: HiddenStates, end: int) -> None:
        files = [np.load(path) for path in sorted(folder.glob("*[0-9].npz"))]
        self.tokens = np.concatenate([file["tokens"] for file in files]).astype(np.int32)
        read = [file["states"].reshape(*file["tokens"].shape, -1) for file in files]
        self.states = np.concatenate(read)
        starts = np.concatenate([np.full(len(file["tokens"]), file["start"]) for file in files])
        place = np.arange(_LENGTH)
        self.answers = place >= starts[:, None]
        ended = (self.tokens == end) & self.answers
        self.counted = ended.cumsum(axis=1) - ended == 0
        mean = np.mean([np.square(row[1:], dtype=np.float32).mean(0) for row in self.states], 0)
        self.scale = np.sqrt(mean)
        for row in self.states:
            row /= self.scale
        # The final norm is where each model's class has it, so its weight is found by its effect.
        hidden.model(mx.array(self.tokens[:1]))
        before, after = normed(hidden.of_layers[-1]), np.array(hidden.final)
        self.norm = (before * after).sum(0) / np.square(before).sum(0)

    def final(self, rows: Any) -> np.ndarray:
        """The model's states after its final norm, (rows, ``_LENGTH``, width)."""
        width = len(self.norm)
        return normed(self.states[rows, :, -width:] * self.scale[-width:]) * self.norm

    def frequent(self, count: int, vocabulary: int) -> np.ndarray:
        """The most frequent tokens of answers, in order.

        Of those in no answer, the first are taken: tokenizers have frequent tokens first.
        """
        found = np.bincount(self.tokens[self.counted & self.answers], minlength=vocabulary)
        return np.sort(np.argsort(-found, kind="stable")[:count])


# Training.


def begin(
    head: Eagle3, embedding: Callable[[mx.array], mx.array], examples: Examples, rows: np.ndarray
) -> None:
    """Set the head to the best linear map from what it reads to the model's next state.

    ``fc`` has the part of the model's states. The token's part goes through attention heads that
    attend to their own position: a direction in which all inputs are nearly equal gives their
    queries and keys, whose fastest pairs under RoPE agree at distance 0 alone.
    """
    attend, layer, width = head.layers[0].self_attn, head.layers[0], head.width
    size = attend.q_proj.weight.shape[0] // attend.n_heads
    counted = examples.counted[rows, 2:]
    embedded = normed(embedding(mx.array(examples.tokens[rows, 2:])))[counted]
    following = examples.final(rows)[:, 2:][counted]
    read = examples.states[rows, 1:-1][counted].astype(np.float32)

    def solve(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        square = x.T @ x + len(x) / 100 * np.eye(x.shape[1], dtype=np.float32)
        return np.linalg.solve(square, x.T @ y)

    own = embedded - read @ solve(read, embedded)
    of_token = solve(own, following)
    # The directions of the output that matter most, as many as those heads can write to.
    _, _, directions = np.linalg.svd(own @ of_token, full_matrices=False)
    directions = directions[: _OWN * size]
    of_token = directions @ of_token.T
    of_states = solve(read, following - embedded @ of_token.T @ directions)
    features = read @ of_states
    scale = np.sqrt(np.mean(features**2))
    head.fc.weight = mx.array(of_states.T)
    head.norm.weight = mx.full(width, np.sqrt(np.mean(following**2)))
    layer.hidden_norm.weight = mx.full(width, scale)
    inputs = np.concatenate([embedded, scale * normed(features)], axis=1)
    constant = solve(inputs, np.ones((len(inputs), 1)))[:, 0]
    sharpness = np.zeros(size)
    sharpness[:4] = 0.5 * np.sqrt(16 / attend.scale)
    looking = np.tile(np.outer(sharpness, constant), (_OWN, 1))
    for projection in (attend.q_proj, attend.k_proj):
        projection.weight[: _OWN * size] = mx.array(looking.astype(np.float32))
    attend.v_proj.weight[: _OWN * size] = mx.array(np.pad(of_token, [(0, 0), (0, width)]))
    others = attend.o_proj.weight.shape[1] - _OWN * size
    attend.o_proj.weight = mx.array(np.pad(directions.T, [(0, 0), (0, others)]))
    layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)


def train(
    head: Eagle3,
    examples: Examples,
    drafted: np.ndarray,
    epochs: int,
    random: np.random.Generator,
    save: Callable[[], None],
) -> None:
    """Train a head, at first with depth 1 alone, and in the last third of epochs with the chain.

    Args:
        drafted: the rows of the model's output layer for the tokens that the head may draft.
        save: called now and then, and at the end.
    """
    epoch = len(examples.tokens) // _BATCH
    steps = epoch * epochs

    def loss(
        embedded: mx.array, states: mx.array, wanted: mx.array, counted: mx.array, depths: int
    ) -> mx.array:
        total = mx.array(0.0)
        for depth, output in enumerate(chain(head, embedded, states, depths)):
            logits = head.lm_head(head.norm(output[:, depth:]))
            # Its gradient is that of the cross entropy, for less time.
            error = mx.stop_gradient(softmax(logits) - wanted[:, depth:]) * counted[:, depth:]
            total = total + 0.8**depth * (error * logits).sum()
        return total / wanted.shape[0] / wanted.shape[1]

    gradients = nn.value_and_grad(head, loss)
    optimizer = optim.MultiOptimizer(
        [
            optim.Muon(optim.linear_schedule(0.03, 0.0, steps), weight_decay=0.0),
            optim.Adam(optim.linear_schedule(1e-3, 0.0, steps), betas=[0.9, 0.95]),
        ],
        [lambda name, weight: weight.ndim == 2 and name != "lm_head.weight"],
    )
    started = time.perf_counter()
    for step in range(steps):
        if step % epoch == 0:
            order = random.permutation(len(examples.tokens))
        rows = order[step % epoch * _BATCH :][:_BATCH]
        depths = 1 if step < epoch * (epochs - epochs // 3) else _DEPTHS
        _, found = gradients(
            head.embed(mx.array(examples.tokens[rows, 1:])),
            mx.array(examples.states[rows, :-1].astype(np.float32)),
            softmax(mx.array(examples.final(rows)[:, 1:] @ drafted.T)),
            mx.array(examples.counted[rows, 1:, None]),
            depths,
        )
        optimizer.update(head, found)
        mx.eval(head.parameters(), optimizer.state)
        if step % 50 == 49:
            save()
            print(f"step {step + 1} of {steps}, {time.perf_counter() - started:.0f} s", flush=True)
    save()


# What it achieves.

_SHOWN = 5  # depths
_WRITTEN = 160  # tokens of a continuation
_RIGHT = tuple[np.ndarray, np.ndarray]  # (starts, depths): is the draft right; (starts): is it new


def functions(tokenizer: Any, texts: Sequence[str], count: int, length: int) -> np.ndarray:
    """Prompts that end with the first line of a function, (count, length)."""
    prompts = []
    for text in texts:
        found = list(re.finditer(r"^ *def .*:\n", text, re.MULTILINE))
        for match in found[len(found) // 3 :: max(1, len(found) // 3)]:
            tokens = tokenizer.encode(text[: match.end()])
            if len(tokens) > length:
                prompts.append([tokens[0], *tokens[1 - length :]])
    return np.array(prompts[:: max(1, len(prompts) // count)][:count])


def right(
    head: Eagle3,
    hidden: HiddenStates,
    prompts: np.ndarray,
    temperature: float = 0.0,
    coupled: bool = True,
) -> _RIGHT:
    """Let the model continue prompts, and see which drafts are right at each depth."""
    word, width = 1000, prompts.shape[1]
    tokens, read = generate(hidden, prompts, width + _WRITTEN, temperature, word)
    embedded = head.embed(mx.array(tokens[:, 1:]))
    starts = np.arange(width - 1, tokens.shape[1] - 1 - _SHOWN)
    results = []
    states = mx.array(read[:, :-1].astype(np.float32))
    for depth, output in enumerate(chain(head, embedded, states, _SHOWN)):
        drafted = []
        for pair in starts + depth:
            logits = np.array(head.logits(output[:, pair]))
            if temperature:
                own = word if coupled else word + 1
                logits = logits / temperature + noise(own, int(pair) + 2, logits.shape)
            drafted.append(logits.argmax(-1))
        results.append(np.stack(drafted, axis=1) == tokens[:, starts + depth + 2])
    new = np.ones(tokens.shape, bool)
    for row, line in enumerate(tokens.tolist()):
        seen = set()
        for index in range(2, len(line)):
            new[row, index] = (three := tuple(line[index - 2 : index + 1])) not in seen
            seen.add(three)
    return np.stack(results, axis=-1).reshape(-1, _SHOWN), new[:, starts + 2].reshape(-1)


def show(head: Eagle3, hidden: HiddenStates, tokenizer: Any) -> None:
    """Print the table."""
    print(f"{'prompts':11} {'drafts':11} {'counted':8}", end="")
    print("".join(f"{depth:6}" for depth in range(1, _SHOWN + 1)), " tokens")

    def line(kind: str, way: str, found: Sequence[_RIGHT]) -> None:
        correct, new = (np.concatenate(parts) for parts in zip(*found, strict=True))
        for counted, rows in (("all", correct), ("new", correct[new])):
            reached = np.cumprod(rows, axis=1).mean(0)
            shares = reached / np.maximum(np.insert(reached, 0, 1.0)[:-1], 1e-9)
            figures = "".join(f"{share:6.2f}" for share in shares)
            print(f"{kind:11} {way:11} {counted:8}{figures}{reached.sum():8.2f}", flush=True)

    prompts = functions(tokenizer, modules()[1], 32, 64)
    ways = {"greedy": (0.0, True), "same noise": (1.0, True), "own noise": (1.0, False)}
    for way, (temperature, coupled) in ways.items():
        line("functions", way, [right(head, hidden, prompts, temperature, coupled)])
    by_category: dict[str, list[_RIGHT]] = {}
    for chat in read_prompts(_CHATS):
        if not chat.raw:
            tokens = tokenizer.apply_chat_template(chat.messages, add_generation_prompt=True)
            found = right(head, hidden, np.array([tokens]))
            by_category.setdefault(chat.category, []).append(found)
    for category, parts in by_category.items():
        line(category, "greedy", parts)


def settings(target: dict[str, Any]) -> dict[str, Any]:
    """The head's ``config.json``: one layer, with half of the target's attention heads."""
    width, heads, layers = (
        target[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    own = max(4, heads // 2)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "eagle3",
        "hidden_size": width,
        "intermediate_size": width // 2,
        "num_hidden_layers": 1,
        "num_attention_heads": own,
        "num_key_value_heads": own,
        "head_dim": target.get("head_dim") or width // heads,
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": (target.get("rope_parameters") or target)["rope_theta"],
        "max_position_embeddings": target.get("max_position_embeddings", 8192),
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": min(_VOCABULARY, target["vocab_size"] // 4),
        "tie_word_embeddings": False,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [layers // 3 + 1, 2 * layers // 3 + 1, layers],
        "torch_dtype": "float16",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("MLXSPEC_REAL_MODEL", "demo")
    parser.add_argument("model", nargs="?", default=default)
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="of the head")
    parser.add_argument("--show", action="store_true", help="only show what a trained head drafts")
    per_group = f"examples, in groups of {_GROUP}"
    parser.add_argument("--answers", type=int, default=1024, metavar="N", help=per_group)
    parser.add_argument("--texts", type=int, default=256, metavar="N", help=per_group)
    parser.add_argument("--epochs", type=int, default=6, metavar="N", help="over all examples")
    arguments = parser.parse_args()
    model, tokenizer = mlxspec.load(arguments.model)
    if not tokenizer.has_chat_template:
        parser.error(f"{arguments.model} has no chat template: name a model that answers questions")
    folder = arguments.to or find_directory(arguments.model, None) / "head"
    weights, file = folder / "model.safetensors", folder / "config.json"
    target = text_of(vars(args_of(model)))
    config = settings(target)
    if arguments.show:
        config = json.loads(file.read_text())
    mx.random.seed(0)
    head = Eagle3(config, target)
    TrainedHead(head, model)  # binds it
    hidden = HiddenStates(model, head.reads)
    if not arguments.show:
        kept = folder / f"examples-{digest_of_weights(model)[:12]}"  # another model's differ
        make_examples(hidden, tokenizer, kept, arguments.answers, arguments.texts)
        examples = Examples(kept, hidden, tokenizer.eos_token_id)
        frequent = examples.frequent(config["draft_vocab_size"], target["vocab_size"])
        outputs = hidden.logits(mx.eye(head.width)[None])[0]  # the output layer's weights
        drafted = np.array(outputs.astype(mx.float32))[:, frequent].T
        head.d2t = mx.array((frequent - np.arange(len(frequent))).astype(np.int32))
        head.lm_head.weight = mx.array(drafted)
        random = np.random.default_rng(0)
        print(f"{examples.counted.sum()} tokens to learn from", flush=True)
        begin(head, head.embed, examples, random.permutation(len(examples.tokens))[:256])

        def save() -> None:
            tensors = dict(tree_flatten(head.parameters()))
            tensors["fc.weight"] = tensors["fc.weight"] / mx.array(examples.scale)
            halves = {
                name: tensor if name == "d2t" else tensor.astype(mx.float16)
                for name, tensor in tensors.items()
            }
            mx.save_safetensors(str(weights), halves, metadata={"format": "mlx"})
            file.write_text(json.dumps(config, indent=4) + "\n")

        train(head, examples, drafted, arguments.epochs, random, save)
    head.load_weights(str(weights))
    show(head, hidden, tokenizer)


if __name__ == "__main__":
    main()
