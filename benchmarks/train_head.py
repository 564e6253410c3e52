"""Train the EAGLE-3 head of the demo model, and show how many of its drafts are right.

    python benchmarks/train_head.py [FOLDER]
    python benchmarks/train_head.py --show [FOLDER]

The first form writes the head into a folder, by default ``mlxspec/demo_model/head``. It learns
the demo model's distributions over the next tokens (not the text itself) on the running Python's
standard library, on short tasks, and on what the model writes. It starts as the best linear map,
by least squares. Then depth 1 is trained alone, and at last the chain, which is fed its own output
as in decoding (the "training-time test" of EAGLE-3, Li et al. 2025, arXiv 2503.01840).

Then, or alone with ``--show``, a table has the share of drafts that are right at each depth if
those before them are, and the mean number of tokens that a chain of five adds. The model continues
functions of modules that the head has not seen, and the bench's free prompts, greedily and at
temperature 1. There the draft is drawn with the noise that draws the model's own token, or with
noise of its own. "new" counts only tokens that end no three tokens of the context again.
"""

from __future__ import annotations

import argparse
import json
import re
import sysconfig
import time
import zlib
from collections.abc import Iterator, Sequence
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

from mlxspec.bench.prompts import bundled_prompts
from mlxspec.models.heads.chains import Eagle3

_FOLDER = Path(mlxspec.__file__).parent / "demo_model" / "head"
_LENGTH = 256  # tokens of an example
_BATCH = 8  # examples
_FILES = 600
_TEXTS, _ANSWERS = 1024, 512  # examples
_TEMPERATURES = (0.0, 0.7, 1.0, 1.0)  # of the answers
_EPOCHS, _CHAIN_EPOCHS = 3, 1  # over all examples: with depth 1 alone, and with the chain
_DEPTHS = 3  # of the chain
_VOCABULARY = 1024  # the most frequent tokens; more cost more time than they bring
_OWN = 2  # attention heads that begin by attending to their own token
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "eagle3",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "vocab_size": 4096,
    "draft_vocab_size": _VOCABULARY,
    "tie_word_embeddings": False,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
    "torch_dtype": "bfloat16",
}


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


def normed(x: mx.array) -> mx.array:
    return mx.fast.rms_norm(x, None, _CONFIG["rms_norm_eps"])


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


def states(model: nn.Module, tokens: mx.array) -> list[mx.array]:
    """The model's states that the head reads, for each position."""
    x, read = model.model.embed_tokens(tokens), []
    for index, layer in enumerate(model.layers, start=1):
        x = x + attention(layer.self_attn, layer.input_layernorm(x))[0]
        x = x + swiglu(layer.mlp, layer.post_attention_layernorm(x))
        if index in _CONFIG["eagle_aux_hidden_state_layer_ids"]:
            read.append(x)
    return read


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


def tasks(texts: Sequence[str], count: int, random: np.random.Generator) -> Iterator[list[Any]]:
    """Short conversations whose answers repeat something."""
    for _ in range(count):
        lines = texts[int(random.integers(len(texts)))].splitlines()
        begin = random.integers(max(1, len(lines) - 12))
        part = "\n".join(lines[begin : begin + random.integers(1, 12)])
        if random.integers(2):
            words = " ".join(re.findall(r"[a-z]+", part)[: random.integers(3, 9)])
            times = random.integers(2, 9)
            question = f'Repeat the following phrase {times} times: "{words}".'
            answer = "\n".join([words] * times)
        else:
            question, answer = f"{part}\n\nCopy the text.", part
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def generate(
    model: nn.Module, prompts: np.ndarray, length: int, temperature: float, word: int
) -> np.ndarray:
    """Continue prompts of one length, up to ``length`` tokens.

    The noise of each position is that of :func:`noise`.
    """
    cache = make_prompt_cache(model)
    row, tokens = mx.array(prompts), [mx.array(prompts)]
    for position in range(prompts.shape[1], length):
        logits = model(row, cache=cache)[:, -1]
        if temperature:
            logits = logits / temperature + noise(word, position, len(prompts))
        row = mx.argmax(logits, axis=-1)[:, None]
        mx.eval(row)
        tokens.append(row)
    return np.array(mx.concatenate(tokens, axis=1))


def noise(word: int, position: int, rows: int) -> mx.array:
    """Gumbel noise, (rows, vocabulary)."""
    key = mx.array([word, position], dtype=mx.uint32)
    return mx.random.gumbel((rows, _CONFIG["vocab_size"]), key=key)


def examples(
    model: nn.Module, tokenizer: Any, texts: Sequence[str], random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """What to learn from.

    Returns:
        tokens, (examples, length), and which tokens the head may draft, in order.
    """
    texts = [texts[index] for index in random.permutation(len(texts))[:_FILES]]
    parts = [[*tokenizer.encode(text)[1:], tokenizer.eos_token_id] for text in texts]
    frequencies = np.bincount(np.concatenate(parts), minlength=_CONFIG["vocab_size"])
    frequent = np.sort(np.argsort(-frequencies, kind="stable")[:_VOCABULARY])
    for conversation in tasks(texts, len(texts), random):
        parts.append(tokenizer.apply_chat_template(conversation)[1:])
    order = random.permutation(len(parts))
    stream = np.concatenate([parts[index] for index in order])

    def taken(count: int, length: int) -> np.ndarray:
        rows = random.permutation(len(stream) // length)[:count]
        found = stream[: len(stream) // length * length].reshape(-1, length)[rows]
        return np.insert(found, 0, tokenizer.bos_token_id, axis=1)

    tokens = [taken(_TEXTS, _LENGTH - 1)]
    count = _ANSWERS // len(_TEMPERATURES)
    for word, temperature in enumerate(_TEMPERATURES):
        tokens.append(generate(model, taken(count, 31), _LENGTH, temperature, word))
    return np.concatenate(tokens), frequent


# Training.


def begin(head: Eagle3, embedding: np.ndarray, tokens: np.ndarray, read: np.ndarray) -> None:
    """Set the head to the best linear map from what it reads to the model's next state.

    ``fc`` has the part of the model's states. The token's part goes through attention heads that
    attend to their own position: a direction in which all inputs are nearly equal gives their
    queries and keys, whose fastest pairs under RoPE agree at distance 0 alone.
    """
    attend, layer, width = head.layers[0].self_attn, head.layers[0], head.width
    rows = attend.q_proj.weight.shape[0] // attend.n_heads
    embedded = np.array(normed(mx.array(embedding)))[tokens[:, 2:]].reshape(-1, width)
    following = np.array(normed(mx.array(read[:, 2:, -width:]))).reshape(-1, width)
    read = read[:, 1:-1].reshape(len(embedded), -1)

    def solve(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.linalg.solve(x.T @ x + len(x) / 1000 * np.eye(x.shape[1]), x.T @ y)

    own = embedded - read @ solve(read, embedded)
    of_token = solve(own, following)
    # The directions of the output that matter most, as many as those heads can write to.
    _, _, directions = np.linalg.svd(own @ of_token, full_matrices=False)
    directions = directions[: _OWN * rows]
    of_token = directions @ of_token.T
    of_states = solve(read, following - embedded @ of_token.T @ directions)
    features = read @ of_states
    size = np.sqrt(np.mean(features**2))
    head.fc.weight = mx.array(of_states.T)
    layer.hidden_norm.weight = mx.full(width, size)
    inputs = np.concatenate([embedded, size * np.array(normed(mx.array(features)))], axis=1)
    constant = solve(inputs, np.ones((len(inputs), 1)))[:, 0]
    sharpness = np.zeros(rows)
    sharpness[:4] = 0.5 * np.sqrt(16 / attend.scale)
    looking = np.tile(np.outer(sharpness, constant), (_OWN, 1))
    for projection in (attend.q_proj, attend.k_proj):
        projection.weight[: _OWN * rows] = mx.array(looking.astype(np.float32))
    attend.v_proj.weight[: _OWN * rows] = mx.array(np.pad(of_token, [(0, 0), (0, width)]))
    attend.o_proj.weight = mx.array(np.pad(directions.T, [(0, 0), (0, width - _OWN * rows)]))
    layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)


def train(
    head: Eagle3,
    model: nn.Module,
    tokens: np.ndarray,
    read: np.ndarray,
    frequent: np.ndarray,
    random: np.random.Generator,
) -> None:
    embed, norm = model.model.embed_tokens, model.model.norm
    drafted = embed.weight[mx.array(frequent)]
    epoch = len(tokens) // _BATCH
    steps = epoch * (_EPOCHS + _CHAIN_EPOCHS)

    def loss(embedded: mx.array, states: mx.array, wanted: mx.array, depths: int) -> mx.array:
        total = mx.array(0.0)
        for depth, output in enumerate(chain(head, embedded, states, depths)):
            logits = head.lm_head(head.norm(output[:, depth:]))
            # Its gradient is that of the cross entropy, for less time.
            error = mx.stop_gradient(softmax(logits) - wanted[:, depth:])
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
            order = random.permutation(len(tokens))
        rows = order[step % epoch * _BATCH :][:_BATCH]
        batch = mx.array(read[rows].astype(np.float32))
        final = norm(batch[:, 1:, -head.width :])
        depths = 1 if step < epoch * _EPOCHS else _DEPTHS
        embedded = embed(mx.array(tokens[rows, 1:]))
        wanted = softmax(final @ drafted.T)
        _, found = gradients(embedded, batch[:, :-1], wanted, depths)
        optimizer.update(head, found)
        mx.eval(head.parameters(), optimizer.state)
        if step % 100 == 99:
            print(f"step {step + 1} of {steps}, {time.perf_counter() - started:.0f} s", flush=True)


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
    head: Eagle3, model: nn.Module, prompts: np.ndarray, temperature: float, coupled: bool
) -> _RIGHT:
    """Let the model continue prompts, and see which drafts are right at each depth."""
    word, width = 1000, prompts.shape[1]
    tokens = generate(model, prompts, width + _WRITTEN, temperature, word)
    read = mx.concatenate(states(model, mx.array(tokens)), axis=-1)
    embedded = model.model.embed_tokens(mx.array(tokens[:, 1:]))
    starts = np.arange(width - 1, tokens.shape[1] - 1 - _SHOWN)
    results = []
    for depth, output in enumerate(chain(head, embedded, read[:, :-1], _SHOWN)):
        drafted = []
        for pair in starts + depth:
            logits = head.logits(output[:, pair])
            if temperature:
                own = word if coupled else word + 1
                logits = logits / temperature + noise(own, int(pair) + 2, len(tokens))
            drafted.append(mx.argmax(logits, axis=-1))
        results.append(np.array(mx.stack(drafted, axis=1)) == tokens[:, starts + depth + 2])
    new = np.ones(tokens.shape, bool)
    for row, line in enumerate(tokens.tolist()):
        seen = set()
        for index in range(2, len(line)):
            new[row, index] = (three := tuple(line[index - 2 : index + 1])) not in seen
            seen.add(three)
    return np.stack(results, axis=-1).reshape(-1, _SHOWN), new[:, starts + 2].reshape(-1)


def show(head: Eagle3, model: nn.Module, tokenizer: Any) -> None:
    """Print the table."""
    _, held_out = modules()
    free = [
        np.array([tokenizer.encode(prompt.messages[0]["content"])])
        for prompt in bundled_prompts()
        if prompt.raw
    ]
    kinds = {
        "functions": [functions(tokenizer, held_out, 32, 64)],
        "bench's": [np.repeat(prompt, 16, axis=0) for prompt in free],
    }
    ways = {"greedy": (0.0, True), "same noise": (1.0, True), "own noise": (1.0, False)}
    heading = "".join(f"{depth:6}" for depth in range(1, _SHOWN + 1))
    print(f"{'prompts':10} {'drafts':11} {'counted':8}{heading}  tokens")
    for kind, prompts in kinds.items():
        for way, (temperature, coupled) in ways.items():
            found = [
                right(
                    head,
                    model,
                    each[:1] if kind == "bench's" and not temperature else each,
                    temperature,
                    coupled,
                )
                for each in prompts
            ]
            correct, new = (np.concatenate(parts) for parts in zip(*found, strict=True))
            for counted, rows in (("all", correct), ("new", correct[new])):
                reached = np.cumprod(rows, axis=1).mean(0)
                shares = reached / np.insert(reached, 0, 1.0)[:-1]
                figures = "".join(f"{share:6.2f}" for share in shares)
                print(f"{kind:10} {way:11} {counted:8}{figures}{reached.sum():8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=_FOLDER)
    parser.add_argument("--show", action="store_true", help="only show what a trained head drafts")
    arguments = parser.parse_args()
    weights = arguments.folder / "model.safetensors"
    model, tokenizer = mlxspec.load("demo")
    target = json.loads((_FOLDER.parent / "config.json").read_text())
    mx.random.seed(0)
    head = Eagle3(_CONFIG, target)
    head.bind(model.model.embed_tokens, model.model.embed_tokens.as_linear)
    if not arguments.show:
        random = np.random.default_rng(0)
        tokens, frequent = examples(model, tokenizer, modules()[0], random)
        print(f"{len(tokens)} examples", flush=True)
        read = np.stack(
            [
                np.array(mx.concatenate(states(model, mx.array(row[None])), axis=-1)[0]).astype(
                    np.float16
                )
                for row in tokens
            ]
        )
        head.d2t = mx.array((frequent - np.arange(_VOCABULARY)).astype(np.int32))
        head.lm_head.weight = model.model.embed_tokens.weight[mx.array(frequent)]
        head.norm.weight = mx.array(model.model.norm.weight)
        some = random.permutation(len(tokens))[:256]
        begin(head, model.model.embed_tokens.weight, tokens[some], read[some].astype(np.float32))
        train(head, model, tokens, read, frequent, random)
        arguments.folder.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(
            str(weights),
            {
                name: weight if name == "d2t" else weight.astype(mx.bfloat16)
                for name, weight in tree_flatten(head.parameters())
            },
            metadata={"format": "mlx"},
        )
        (arguments.folder / "config.json").write_text(json.dumps(_CONFIG, indent=4) + "\n")
    head.load_weights(str(weights))
    show(head, model, tokenizer)


if __name__ == "__main__":
    main()
