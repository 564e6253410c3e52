"""Fuzzed model files give a model that runs or the package's error."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.drafting.drafter import NoDraft
from mlxspec.errors import MlxspecError
from mlxspec.generation.decoder import Decoder
from mlxspec.models.model import load
from mlxspec.models.model_files import DEMO_DIRECTORY
from mlxspec.models.tokenizer import load_tokenizer, load_tokenizer_of
from tests.support.drafters import drafted
from tests.support.examples import examples
from tests.support.hostile import harmless, json_values, mutated
from tests.support.scripted_model import write_scripted_model

pytestmark = pytest.mark.slow

Write = Callable[[str, bytes], Path]
SETTINGS = "tokenizer_config.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("whole") / "model", ("one", " two"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a small SentencePiece tokenizer."""
    directory = tmp_path_factory.mktemp("pieces")
    shutil.copyfile(DEMO_DIRECTORY / "tokenizer.model", directory / "tokenizer.model")
    return directory


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Write]:
    """Copies a directory and replaces one file."""
    place = tmp_path_factory.mktemp("damaged") / "model"

    def copy(directory: Path) -> Write:
        def write(name: str, content: bytes) -> Path:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(directory, place)
            (place / name).write_bytes(content)
            return place

        return write

    return copy


def runs(directory: Path) -> bool:
    """Load a model and generate with it."""
    decoder = Decoder(*load(directory))
    return 1 <= len(list(drafted(decoder, [1, 3], NoDraft(), max_tokens=2))) <= 2


def tokenizes(directory: Path) -> bool:
    tokenizer = load_tokenizer(directory, None)
    ids = tokenizer.encode("one two")
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return all(type(token) is int for token in ids) and isinstance(detokenizer.text, str)


def right_or_refused(read: Callable[[Path], object], path: Path) -> None:
    result = harmless(lambda: read(path))
    assert result is True or isinstance(result, MlxspecError)


def changed(path: Path, keys: list[str]) -> st.SearchStrategy[bytes]:
    """Generate a JSON file with changed values for some keys, and with new keys."""
    whole = json.loads(path.read_text())
    changes = st.dictionaries(st.sampled_from([*whole, *keys]), json_values, min_size=1, max_size=2)
    return changes.map(lambda change: json.dumps(whole | change).encode())


@settings(max_examples=examples(20))
@given(data=st.data())
def test_damaged_weights(data: st.DataObject, model: Path, copy: Callable[[Path], Write]) -> None:
    whole = (model / "model.safetensors").read_bytes()
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    header = data.draw(mutated(whole[8:length]))
    kept = data.draw(st.booleans())  # otherwise the length is wrong, too
    start = struct.pack("<Q", len(header)) if kept else whole[:8]
    path = copy(model)("model.safetensors", start + header + whole[length:])
    right_or_refused(runs, path)


@settings(max_examples=examples(20))
@given(data=st.data())
def test_weights_whose_header_lies(
    data: st.DataObject, model: Path, copy: Callable[[Path], Write]
) -> None:
    whole = (model / "model.safetensors").read_bytes()
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8:length])
    name = data.draw(st.sampled_from(sorted(header)))
    key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    value = data.draw(json_values | st.lists(st.integers(0, 70), max_size=3))
    within = isinstance(header[name], dict) and data.draw(st.booleans())
    header[name] = {**header[name], key: value} if within else value
    text = json.dumps(header).encode()
    path = copy(model)("model.safetensors", struct.pack("<Q", len(text)) + text + whole[length:])
    right_or_refused(runs, path)


CONFIG_KEYS = [
    *("rope_scaling", "rope_theta", "rope_traditional", "head_dim", "attention_bias", "mlp_bias"),
    *("layer_types", "sliding_window", "quantization", "quantization_config", "eos_token_id"),
    *("text_config", "model_file", "auto_map", "architectures", "n_ctx", "torch_dtype"),
]


@settings(max_examples=examples(20))
@given(data=st.data())
def test_damaged_settings(data: st.DataObject, model: Path, copy: Callable[[Path], Write]) -> None:
    path = model / "config.json"
    content = data.draw(changed(path, CONFIG_KEYS) | mutated(path.read_bytes()))
    right_or_refused(runs, copy(model)("config.json", content))


@settings(max_examples=examples(8))
@given(
    data=st.data(), name=st.sampled_from(["generation_config.json", "model.safetensors.index.json"])
)
def test_damaged_other_settings(
    data: st.DataObject, name: str, model: Path, copy: Callable[[Path], Write]
) -> None:
    content = st.dictionaries(st.sampled_from(["eos_token_id", "weight_map"]), json_values)
    text = json.dumps(data.draw(content)).encode()
    right_or_refused(runs, copy(model)(name, data.draw(st.just(text) | mutated(text))))


TOKENIZER_KEYS = [
    *("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "pad_token"),
    *("add_bos_token", "model_max_length", "padding_side", "clean_up_tokenization_spaces"),
    *("tool_parser_type", "chat_template_type", "auto_map", "chat_template", "tokenizer_class"),
    *("bos_token", "eos_token", "unk_token", "legacy", "name_or_path", "split_special_tokens"),
]


@settings(max_examples=examples(20))
@given(data=st.data())
def test_damaged_tokenizer_settings(
    data: st.DataObject, model: Path, copy: Callable[[Path], Write]
) -> None:
    path = model / SETTINGS
    content = data.draw(changed(path, TOKENIZER_KEYS) | mutated(path.read_bytes()))
    right_or_refused(tokenizes, copy(model)(SETTINGS, content))


@settings(max_examples=examples(20))
@given(data=st.data())
def test_a_damaged_tokenizer(
    data: st.DataObject, model: Path, copy: Callable[[Path], Write]
) -> None:
    path = model / "tokenizer.json"
    keys = ["added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"]
    content = data.draw(changed(path, keys) | mutated(path.read_bytes()))
    damaged = copy(model)("tokenizer.json", content)
    right_or_refused(tokenizes, damaged)
    harmless(lambda: load_tokenizer_of(damaged / "tokenizer.json"))


@settings(max_examples=examples(6))
@given(data=st.data())
def test_damaged_pieces(data: st.DataObject, pieces: Path, copy: Callable[[Path], Write]) -> None:
    content = data.draw(mutated((pieces / "tokenizer.model").read_bytes()))
    damaged = copy(pieces)("tokenizer.model", content)
    right_or_refused(tokenizes, damaged)


@settings(max_examples=examples(6))
@given(data=st.data())
def test_damaged_settings_of_pieces(
    data: st.DataObject, pieces: Path, copy: Callable[[Path], Write]
) -> None:
    content = json.dumps(
        data.draw(st.dictionaries(st.sampled_from(TOKENIZER_KEYS), json_values, max_size=2))
    )
    right_or_refused(tokenizes, copy(pieces)(SETTINGS, content.encode()))
