"""The folder of third-party models, tokenizers and traces, which the repository lacks."""

from pathlib import Path

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
