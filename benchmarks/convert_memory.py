"""Peak memory of the converter on a synthetic checkpoint of over a gigabyte.

    python benchmarks/convert_memory.py [--layers 9] [--tokenizer tokenizer.model]

Writes Mistral's original format with random bfloat16 weights to a temporary directory (5 GB
including the results), converts it in separate processes, and samples their anonymous memory.
Pages of mapped files do not count, since the system can reclaim them. The bound is the largest
output file plus two tensors plus 300 MB. Exits with status 1 if a run exceeds it.

Linux only: macOS does not distinguish anonymous from mapped pages of another process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
ALLOWANCE = 300e6
SAMPLING_SECONDS = 0.002
CHUNK_BYTES = 1 << 24


def main() -> int:
    """Run every conversion and print its peak beside the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument(
        "--tokenizer", type=Path, default=REPOSITORY / "mlxspec/demo_model/tokenizer.model"
    )
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        print("needs Linux: other systems do not show a process's anonymous memory")
        return 1

    params = {"dim": 2048, "n_layers": options.layers, "n_heads": 16, "n_kv_heads": 8}
    params |= {"head_dim": 128, "hidden_dim": 5632, "norm_eps": 1e-5, "vocab_size": 32000}
    with tempfile.TemporaryDirectory(prefix="convert_memory_") as name:
        work = Path(name)
        tensor_bytes = write_checkpoint(work / "original", params, options.tokenizer)
        print(f"{platform.platform()}, Python {platform.python_version()}")
        print(f"checkpoint {sum(tensor_bytes) / 1e6:,.0f} MB, of which ", end="")
        print(f"the two largest tensors {sum(sorted(tensor_bytes)[-2:]) / 1e6:,.0f} MB\n")
        print("conversion                      peak      bound   seconds")
        runs = {
            "--torch-path": ["--torch-path", "original"],
            "--torch-path -q": ["--torch-path", "original", "-q"],
            "--hf-path": ["--hf-path", "plain"],
            "--hf-path -q": ["--hf-path", "plain", "-q"],
        }
        within = True
        for label, arguments in runs.items():
            peak, seconds = measure(work, arguments)
            largest = max(path.stat().st_size for path in (work / "out").iterdir())
            bound = largest + sum(sorted(tensor_bytes)[-2:]) + ALLOWANCE
            within &= peak < bound
            print(f"{label:25} {peak / 1e6:8,.0f} MB {bound / 1e6:7,.0f} MB {seconds:8.1f}")
            if label == "--torch-path":
                (work / "out").rename(work / "plain")
            else:
                shutil.rmtree(work / "out")
    return 0 if within else 1


def write_checkpoint(directory: Path, params: dict, tokenizer: Path) -> list[int]:
    """Write an original checkpoint chunk by chunk; return the bytes of each tensor."""
    directory.mkdir()
    (directory / "params.json").write_text(json.dumps(params))
    shutil.copyfile(tokenizer, directory / "tokenizer.model")
    shapes = shapes_of(params)
    with zipfile.ZipFile(directory / "consolidated.00.pth", "w") as archive:
        archive.writestr("consolidated/data.pkl", state_dict_pickle(shapes))
        for index, shape in enumerate(shapes.values()):
            with archive.open(f"consolidated/data/{index}", "w") as member:
                remaining = 2 * math.prod(shape)
                while remaining > 0:
                    member.write(random_bfloat16(min(remaining, CHUNK_BYTES)))
                    remaining -= CHUNK_BYTES
    return [2 * math.prod(shape) for shape in shapes.values()]


def shapes_of(params: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, by original name."""
    dim, hidden = params["dim"], params["hidden_dim"]
    queries, keys = (params[heads] * params["head_dim"] for heads in ("n_heads", "n_kv_heads"))
    layer = {
        "attention.wq": (queries, dim),
        "attention.wk": (keys, dim),
        "attention.wv": (keys, dim),
        "attention.wo": (dim, queries),
        "feed_forward.w1": (hidden, dim),
        "feed_forward.w2": (dim, hidden),
        "feed_forward.w3": (hidden, dim),
        "attention_norm": (dim,),
        "ffn_norm": (dim,),
    }
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (params["vocab_size"], dim)}
    for index in range(params["n_layers"]):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"norm.weight": (dim,), "output.weight": (params["vocab_size"], dim)}


def random_bfloat16(nbytes: int) -> bytes:
    """Random numbers of magnitude 1/64 to 1/32: any sign and fraction, one exponent."""
    content = bytearray(os.urandom(nbytes))
    keep_sign = bytes(byte & 0x80 | 0x3C for byte in range(256))
    content[1::2] = content[1::2].translate(keep_sign)
    return bytes(content)


def state_dict_pickle(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """The pickle that ``torch.save`` writes for contiguous bfloat16 tensors."""

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def integers(*values: int) -> bytes:
        return b"".join(b"J" + struct.pack("<i", value) for value in values)

    code = b"\x80\x02}("
    for index, (name, shape) in enumerate(shapes.items()):
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        storage = text("storage") + b"ctorch\nBFloat16Storage\n" + text(str(index)) + text("cpu")
        code += text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n("
        code += b"(" + storage + integers(math.prod(shape)) + b"tQ" + integers(0)
        code += b"(" + integers(*shape) + b"t(" + integers(*strides) + b"t"
        code += b"\x89ccollections\nOrderedDict\n)RtR"
    return code + b"u."


def measure(work: Path, arguments: list[str]) -> tuple[int, float]:
    """Convert into ``work / "out"``; return the peak of anonymous bytes, and the seconds."""
    start = time.perf_counter()
    command = [sys.executable, str(REPOSITORY / "convert.py"), *arguments, "--mlx-path", "out"]
    process = subprocess.Popen(command, cwd=work, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous_bytes(process.pid))
        time.sleep(SAMPLING_SECONDS)
    if process.returncode:
        raise SystemExit(process.returncode)
    return peak, time.perf_counter() - start


def anonymous_bytes(pid: int) -> int:
    """Anonymous resident memory of a process; 0 when it has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    lines = [line for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
