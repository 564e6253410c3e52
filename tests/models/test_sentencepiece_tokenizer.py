"""The rebuilt tokenizer, compared with SentencePiece and with Mistral's own tokenizer."""

import json
import string
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer as mlx_lm_load_tokenizer
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer, sentencepiece_model_pb2
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from mlxspec.errors import LoadError
from mlxspec.models.sentencepiece_tokenizer import build_tokenizer
from tests.support.examples import examples
from tests.support.tokenizer_kinds import DEMO, SENTENCEPIECE

pytestmark = pytest.mark.slow

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

TEXTS = [
    "",
    " ",
    "Hello",
    " leading",
    "trailing ",
    "  both  ",
    "def f(x):\n    if x:\n\t\treturn {'a': x[0] + 1}  # note\n",
    "a\n\n\nb\r\nc\td",
    "1234567 3.14 0x1F",
    "👍🏽 👩‍👩‍👧‍👦 🇩🇪",
    "日本語の文章、한국어 문장 и русский",
    "e\u0301 o\u0308 \u200b\u3000\xa0",
    "\x01\x02\x1f\x7f",
    "▁ literal ▁▁ signs",
    "<0x41> <unk> <0xZZ>",
    "anana banana hahahaha ====== ------ ...... //////",
]


@cache
def built(path: Path) -> tuple[Tokenizer, SentencePieceProcessor]:
    return build_tokenizer(path)[0], SentencePieceProcessor(model_file=str(path))


def assert_equal_ids(path: Path, text: str) -> None:
    tokenizer, reference = built(path)
    assert tokenizer.encode(text).ids == [reference.bos_id(), *reference.encode(text)], repr(text)


def control_names(reference: SentencePieceProcessor) -> list[str]:
    ids = range(len(reference))
    return [reference.id_to_piece(i) for i in ids if reference.is_control(i)]


@pytest.fixture(params=SENTENCEPIECE.values(), ids=SENTENCEPIECE.keys())
def model_path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def mistral_v3(shared: Path) -> Path:
    return SENTENCEPIECE["mistral v3"]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_sentencepiece_after_bos(model_path: Path, text: str) -> None:
    assert_equal_ids(model_path, text)


def test_runs_of_one_character_are_split_as_by_sentencepiece(model_path: Path) -> None:
    for character in " -=.\n\ta*/":
        for length in range(1, 41):
            assert_equal_ids(model_path, f"x{character * length}y")
            assert_equal_ids(model_path, character * length)


@pytest.mark.parametrize("path", SENTENCEPIECE.values(), ids=SENTENCEPIECE.keys())
@settings(max_examples=examples(40))
@given(data=st.data())
def test_any_text_has_the_ids_of_sentencepiece(path: Path, data: st.DataObject) -> None:
    _, reference = built(path)
    pieces = st.integers(0, len(reference) - 1).map(reference.id_to_piece)
    spaced = pieces.map(lambda piece: piece.replace("▁", " "))
    characters = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
    text = "".join(data.draw(st.lists(st.one_of(pieces, spaced, characters), max_size=12)))
    if not any(control in text for control in control_names(reference)):
        assert_equal_ids(path, text)


def test_a_long_text_has_the_ids_of_sentencepiece(model_path: Path) -> None:
    assert_equal_ids(model_path, "def f(x):\n    return [x, 'é', \"日\"]\n" * 3000)


# The output of mistral_common 1.13 for the text's turns with Mistral's v3 tokenizer.
MISTRAL_V3_CONVERSATIONS = [
    ([("user", "Hello")], [1, 3, 23325, 4]),
    (
        [("user", "a "), ("assistant", " b "), ("user", " c\n")],
        [1, 3, 1032, 29473, 4, 29473, 1055, 2, 3, 29473, 1045, 781, 4],
    ),
    (
        [
            ("system", "Be brief."),
            ("user", "Hi"),
            ("assistant", "Hello there"),
            ("user", "def f():\n\treturn 1"),
        ],
        [
            *(1, 3, 16127, 4, 23325, 1504, 2),
            *(3, 2507, 7585, 29491, 781, 781, 2038, 1053, 6656, 781, 780, 1575, 29473, 29508, 4),
        ],
    ),
]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(("turns", "ids"), MISTRAL_V3_CONVERSATIONS)
def test_mistral_v3_conversations_have_mistrals_ids(
    mistral_v3: Path, tmp_path: Path, turns: list[tuple[str, str]], ids: list[int]
) -> None:
    tokenizer = saved_and_loaded(mistral_v3, tmp_path)
    messages = [{"role": role, "content": content} for role, content in turns]
    assert tokenizer.apply_chat_template(messages, return_dict=False) == ids


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("[INST] Hello[/INST]", [1, 3, 23325, 4]),
        ("[INST]Hello[/INST]", [1, 3, 23325, 4]),
        ("[INST]  Hello [/INST]", [1, 3, 29473, 23325, 29473, 4]),
        ("[INST][/INST]", [1, 3, 4]),
        ("[INST] [/INST]", [1, 3, 4]),
        (
            "[INST] Hi[/INST] Hello there</s>[INST] Hello[/INST]",
            [1, 3, 16127, 4, 23325, 1504, 2, 3, 23325, 4],
        ),
    ],
)
def test_mistral_v3_control_names_mean_the_pieces(
    mistral_v3: Path, text: str, ids: list[int]
) -> None:
    assert built(mistral_v3)[0].encode(text).ids == ids


@pytest.fixture(scope="module", params=["trained", *SENTENCEPIECE.keys() & {"mistral v3"}])
def with_control_pieces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a model whose pieces 3 and 4 are the control pieces [INST] and [/INST]."""
    if request.param in SENTENCEPIECE:
        return SENTENCEPIECE[request.param]
    return trained(tmp_path_factory.mktemp("control"), control_symbols=["[INST]", "[/INST]"])


@settings(max_examples=examples(40))
@given(text=st.text(st.sampled_from(string.printable + "é日👍▁"), max_size=30))
def test_text_between_control_pieces_is_encoded_by_itself(
    with_control_pieces: Path, text: str
) -> None:
    tokenizer, reference = built(with_control_pieces)
    prompt = f"<s>[INST] {text}[/INST]"
    if not any(control in text for control in control_names(reference)):
        expected = [1, 3, *reference.encode(text), 4]
        assert tokenizer.encode(prompt, add_special_tokens=False).ids == expected


def test_a_bos_name_at_the_start_is_bos_before_a_whole_text(model_path: Path) -> None:
    tokenizer, reference = built(model_path)
    ids = tokenizer.encode("<s>Hello  there", add_special_tokens=False).ids
    assert ids == [reference.bos_id(), *reference.encode("Hello  there")]


def test_the_demo_template_gives_the_ids_it_was_trained_on(tmp_path: Path) -> None:
    tokenizer = saved_and_loaded(DEMO, tmp_path)
    reference = SentencePieceProcessor(model_file=str(DEMO))
    for prompt in ["Repeat the phrase 10 times.", "  def f():\n\tpass\n", "a [INST] b"]:
        message = {"role": "user", "content": prompt}
        ids = tokenizer.apply_chat_template([message], return_dict=False)
        assert ids == [1, *reference.encode(f"[INST] {prompt} [/INST]")]
        with_answer = tokenizer.apply_chat_template(
            [message, {"role": "assistant", "content": "x = 1"}], return_dict=False
        )
        assert with_answer == [*ids, *reference.encode("x = 1"), 2]


def test_models_without_instruct_pieces_have_no_template(tmp_path: Path) -> None:
    assert "chat_template" not in build_tokenizer(trained(tmp_path))[1]


def saved_and_loaded(path: Path, directory: Path, config: dict | None = None):
    built(path)[0].save(str(directory / "tokenizer.json"))
    settings = json.dumps(build_tokenizer(path)[1])
    (directory / "tokenizer_config.json").write_text(settings)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("config", [None, {"model_type": "llama"}, {"model_type": "mistral"}])
def test_saved_files_give_transformers_and_mlx_lm_the_same_ids(
    model_path: Path, tmp_path: Path, config: dict | None
) -> None:
    tokenizer, reference = built(model_path)
    by_transformers = saved_and_loaded(model_path, tmp_path, config)
    by_mlx_lm = mlx_lm_load_tokenizer(tmp_path)
    assert by_transformers.bos_token_id == reference.bos_id()
    assert by_mlx_lm.eos_token_ids == {reference.eos_id()}
    for text in [*TEXTS, "[INST] Hello[/INST]", "<s>Hello</s>"]:
        ids = tokenizer.encode(text).ids
        assert by_transformers.encode(text) == ids
        assert by_mlx_lm.encode(text) == ids


TRAINED = {
    "plain": {},
    "without a leading space": {"add_dummy_prefix": False},
    "with spaces removed": {"remove_extra_whitespaces": True},
    "with spaces removed and no leading one": {
        "remove_extra_whitespaces": True,
        "add_dummy_prefix": False,
    },
    "without byte fallback": {"byte_fallback": False, "character_coverage": 0.98},
    "with user-defined pieces": {
        "user_defined_symbols": ["[INST]", "[/INST]", "[IN", "▁▁", "self", "<0x", "x", "a b"]
    },
    "with user-defined pieces and no leading space": {
        "user_defined_symbols": ["\n", "\t", "<a>", "▁▁▁"],
        "add_dummy_prefix": False,
    },
    "without bos": {"bos_id": -1, "eos_id": -1},
}


def trained(directory: Path, **options) -> Path:
    """Train a SentencePiece model on this file."""
    prefix = directory / "trained"
    SentencePieceTrainer.train(
        sentence_iterator=iter(Path(__file__).read_text().splitlines()),
        model_prefix=str(prefix),
        vocab_size=500,
        minloglevel=2,
        **{
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "allow_whitespace_only_pieces": True,
            "character_coverage": 1.0,
        }
        | options,
    )
    return prefix.with_suffix(".model")


@pytest.mark.parametrize("options", TRAINED.values(), ids=TRAINED.keys())
def test_every_setting_of_a_bpe_model_is_respected(tmp_path: Path, options: dict) -> None:
    path = trained(tmp_path, **options)
    (tokenizer, _), reference = build_tokenizer(path), SentencePieceProcessor(model_file=str(path))
    names = [reference.id_to_piece(i) for i in range(len(reference))]
    names = [name for name in names if name not in ("<s>", "</s>")]
    fragments = st.sampled_from(
        [*names, " ", "  ", "\n", "[INST]", "é", "漢", "😀", "a b", "<0x41>"]
    )

    @settings(max_examples=examples(30))
    @given(st.lists(st.one_of(fragments, fragments.map(lambda f: f.replace("▁", " "))), max_size=8))
    def check(parts: list[str]) -> None:
        text = "".join(parts)
        if "<s>" not in text and "</s>" not in text:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert ids == reference.encode(text)

    check()


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nfkc"},
        {"model_type": "unigram"},
        {"treat_whitespace_as_suffix": True},
    ],
)
def test_what_cannot_be_reproduced_is_refused_by_name(tmp_path: Path, options: dict) -> None:
    path = trained(tmp_path, **options)
    with pytest.raises(LoadError, match="reproduced exactly") as error:
        build_tokenizer(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def handmade(path: Path, pieces: list[tuple[str, float, int]]) -> Path:
    model = sentencepiece_model_pb2.ModelProto()
    for name, score, kind in [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), *pieces]:
        model.pieces.add(piece=name, score=score, type=kind)
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    path.write_bytes(model.SerializeToString())
    return path


def letters(text: str) -> list[tuple[str, float, int]]:
    return [(letter, -100.0 - index, NORMAL) for index, letter in enumerate(text)]


def test_pieces_of_unused_pieces_and_of_unknown_characters_are_refused(tmp_path: Path) -> None:
    alone = handmade(tmp_path / "alone.model", [("ab", -1.0, UNUSED), *letters("ab")])
    reference = SentencePieceProcessor(model_file=str(alone))
    assert build_tokenizer(alone)[0].encode("abba").ids[1:] == reference.encode("abba")
    pieces = [("ab", -1.0, UNUSED), ("abc", -2.0, NORMAL), *letters("abc")]
    with pytest.raises(LoadError, match="reproduced exactly"):
        build_tokenizer(handmade(tmp_path / "joined.model", pieces))
    incomplete = handmade(tmp_path / "incomplete.model", [("az", -1.0, NORMAL), *letters("ab")])
    with pytest.raises(LoadError, match="reproduced exactly"):
        build_tokenizer(incomplete)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "not a BPE model"),
        (b"not a model", "damaged"),
        (b"IQ== 0\nIg== 1\nIw== 2\n", "tiktoken"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=named):
        build_tokenizer(path)


def test_a_truncated_model_is_refused(tmp_path: Path) -> None:
    content = DEMO.read_bytes()
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(LoadError, match="damaged"):
        build_tokenizer(path)
