"""Where third-party models, tokenizers and traces are; they are not part of the repository."""

from pathlib import Path

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
