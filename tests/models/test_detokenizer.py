"""Streamed text compared with decoding all tokens at once."""

import copy

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from mlxspec.models.tokenizer import (
    ByteDetokenizer,
    streaming_detokenizer,
    token_bytes,
)
from tests.support.examples import examples
from tests.support.tokenizer_kinds import (
    DEMO,
    SENTENCEPIECE,
    byte_level,
    sentencepiece,
    wrap,
)

PROMPT = "The quick"


def stream(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    """Return the values of ``last_segment``, one per token and a final one."""
    detokenizer = streaming_detokenizer(tokenizer)
    segments = []
    for token in ids:
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    detokenizer.finalize()
    segments.append(detokenizer.last_segment)
    assert "".join(segments) == detokenizer.text
    assert detokenizer.tokens == ids
    return segments


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def continuation(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """Decode ``ids`` after a prompt with transformers."""
    prompt = tokenizer.encode(PROMPT)
    before, whole = decode(tokenizer, prompt), decode(tokenizer, prompt + ids)
    assert whole.startswith(before)
    return whole[len(before) :]


@pytest.fixture(params=[*SENTENCEPIECE, "byte level"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    if request.param in SENTENCEPIECE:
        return sentencepiece(SENTENCEPIECE[request.param])
    return byte_level()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "time flies",
        "  indented\n\n\tcode  ",
        "日本語 👩‍🚀 한국 é 👍🏽",
        "a <s> b </s> [INST] c <|end|><｜user▁turn｜>",
        " ",
        "",
    ],
)
def test_segments_join_to_the_text_after_the_prompt(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == continuation(tokenizer, ids)


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(data=st.data())
def test_any_tokens_join_to_the_text_after_the_prompt(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(SENTENCEPIECE.values())))
    tokenizer = data.draw(st.sampled_from([sentencepiece(path), byte_level()]))
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))
    expected = continuation(tokenizer, ids)
    text = "".join(stream(tokenizer, ids))
    # For invalid UTF-8, transformers replaces each byte of a run, Python each invalid sequence.
    if "\ufffd" in expected:
        assert "\ufffd" in text
    else:
        assert text == expected


def byte_pieces(tokenizer: PreTrainedTokenizerFast, content: bytes) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in content]


def test_a_character_of_several_tokens_comes_out_whole() -> None:
    tokenizer = sentencepiece(DEMO)
    ids = byte_pieces(tokenizer, "é👩‍🚀!".encode())
    assert [segment for segment in stream(tokenizer, ids) if segment] == [
        *("é", "👩", "\u200d", "🚀", "!")
    ]


@settings(max_examples=examples(40))
@given(content=st.binary(max_size=12))
@example(content=b"\xe6\x97")
@example(content="日".encode() + b"\xff" + b"\xf0\x9f\x91")
def test_invalid_utf8_is_replaced_as_by_python(content: bytes) -> None:
    expected = content.decode("utf-8", "replace")
    tokenizer = sentencepiece(DEMO)
    assert "".join(stream(tokenizer, byte_pieces(tokenizer, content))) == expected
    letters = [byte_level().convert_tokens_to_ids(c) for c in alphabet_of(content)]
    assert "".join(stream(byte_level(), letters)) == expected


def alphabet_of(content: bytes) -> str:
    """Return GPT-2's letters for bytes, from the library's own pre-tokenizer."""
    # Latin-1 text is encoded as UTF-8, so look up the letters one byte value at a time.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(
        chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in content
    )


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode("two words", add_special_tokens=False)
    padded = [ids[0], len(tokenizer) + 7, *ids[1:], len(tokenizer)]
    assert "".join(stream(tokenizer, padded)) == "".join(stream(tokenizer, ids))


def test_the_bytes_of_tokens_join_to_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    wrapper = wrap(tokenizer)
    ids = tokenizer.encode("quick é 👩", add_special_tokens=False)
    text = b"".join(token_bytes(wrapper, token) for token in ids).decode()
    assert text == continuation(tokenizer, ids)
    assert token_bytes(wrapper, len(tokenizer)) == b""


def test_the_bytes_of_tokens_by_mlx_lms_wrapper() -> None:
    tokenizer = byte_level()
    (first, *_) = tokenizer.encode("a")
    assert token_bytes(TokenizerWrapper(tokenizer), first) == tokenizer.decode([first]).encode()


def test_the_first_token_keeps_its_space() -> None:
    tokenizer = sentencepiece(DEMO)
    assert stream(tokenizer, tokenizer.encode("time", add_special_tokens=False))[0] == " time"


def test_the_wrapper_of_mlx_lm_gives_independent_detokenizers() -> None:
    wrapper = TokenizerWrapper(byte_level(), streaming_detokenizer)
    ids = byte_level().encode("first")
    first = wrapper.detokenizer
    first.add_token(ids[0])
    second = wrapper.detokenizer
    assert isinstance(second, ByteDetokenizer)
    assert (second.text, second.tokens) == ("", [])
    second.add_token(ids[0])
    assert first.tokens == second.tokens == [ids[0]]
    assert copy.copy(first).text == first.text != ""


def test_reset_forgets_a_character_that_was_not_completed() -> None:
    tokenizer = sentencepiece(DEMO)
    detokenizer = streaming_detokenizer(tokenizer)
    detokenizer.add_token(byte_pieces(tokenizer, b"\xf0")[0])
    detokenizer.reset()
    detokenizer.add_token(byte_pieces(tokenizer, b"a")[0])
    detokenizer.finalize()
    assert (detokenizer.text, len(detokenizer.tokens)) == ("a", 1)
