"""Prompt cache files of every architecture are read; invalid files are refused."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.cache import save_prompt_cache as mlx_lm_save

from mlxspec import Decoder, Session, load_prompt_cache
from mlxspec.engine.prompt_cache import check_fits
from mlxspec.errors import FileError, OptionError
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import demo
from tests.support.hostile import harmless

pytestmark = pytest.mark.slow

PROMPT = [token * 7 % 60 + 3 for token in range(40)]
OWN_CLASS = {"deepseek_v41"}  # mlx-lm cannot load these from a file either


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES.keys() - OWN_CLASS))
def test_every_architecture_s_caches_are_read(kind: str, tmp_path: Path) -> None:
    model = ARCHITECTURES[kind].model()
    cache = make_prompt_cache(model)
    list(generate_step(mx.array(PROMPT), model, max_tokens=0, prompt_cache=cache))
    mlx_lm_save(str(tmp_path / "c.safetensors"), cache)
    loaded = load_prompt_cache(tmp_path / "c.safetensors")
    check_fits(loaded, model, "file")
    logits = model(mx.array([[5]]), cache=loaded)
    mx.eval(logits)
    assert logits.shape[:2] == (1, 1)


@pytest.mark.parametrize("kind", sorted(OWN_CLASS))
def test_what_nothing_could_read_is_not_written(kind: str, tmp_path: Path) -> None:
    decoder = Decoder(ARCHITECTURES[kind].model(), demo().tokenizer)
    session = Session()
    list(decoder.stream(PROMPT, 2, session=session))
    with pytest.raises(OptionError, match=r"cache \(LayerCache\) cannot be kept in a file"):
        session.save(tmp_path / "c.safetensors")
    assert not [*tmp_path.iterdir()]


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path(os.devnull), tmp_path / ("x" * 300)):
        error = harmless(lambda path=path: load_prompt_cache(path))
        assert isinstance(error, FileError)
