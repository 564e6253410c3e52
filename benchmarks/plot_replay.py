"""Draw the speed of decoders on chips, from a replay's figures.

python benchmarks/rivals.py traces/*.jsonl --tokenizer MODEL --chip all --decoder all --json \
    > replay.json
python benchmarks/plot_replay.py replay.json docs/planner.svg
"""

from __future__ import annotations

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CHIPS = ("M2 Pro", "M3 Ultra", "M4 Pro", "M3 Max", "M5 Max", "H200-like")
DECODERS = {
    "spec-bench": ("prompt lookup, 10 tokens", "#c9c9c9"),
    "vllm": ("vLLM's n-gram default", "#a3a3a3"),
    "llama.cpp": ("llama.cpp's ngram-simple", "#7d7d7d"),
    "suffix-path": ("suffix decoding, path", "#5a5a5a"),
    "auto": ("mlxspec (auto)", "#0087d7"),
}
WIDTH = 0.16


def main(source: str, target: str) -> None:
    with open(source, encoding="utf-8") as file:
        entries = json.load(file)["comparison"]
    speed = {(entry["chip"], entry["decoder"]): entry["speedup"] for entry in entries}
    plt.rcParams.update({"font.family": "sans-serif", "svg.fonttype": "none"})
    figure, axes = plt.subplots(figsize=(8, 4))
    for rank, (decoder, (label, color)) in enumerate(DECODERS.items()):
        places = [place + (rank - 2) * WIDTH for place in range(len(CHIPS))]
        speeds = [speed[chip, decoder] for chip in CHIPS]
        bars = axes.bar(places, speeds, WIDTH, label=label, color=color)
        if decoder == "auto":
            axes.bar_label(bars, fmt="%.2f", fontsize=9, padding=1)
            known = [speed[chip, "hindsight"] for chip in CHIPS]
            axes.scatter(
                places, known, 60, "black", marker="_", label="out of reach: drafts in hindsight"
            )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(CHIPS)), CHIPS)
    axes.set_ylabel("speed against plain decoding (modelled)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:3])
