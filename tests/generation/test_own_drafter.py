"""Custom drafters: the documentation's example, and some that return an invalid draft."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

import mlxspec
from mlxspec import AutoDecoder, Decoder, Drafter, DraftTree, VerifiedStep
from mlxspec.drafting.drafter import load_drafter
from mlxspec.errors import MlxspecError, OptionError
from tests.support.demo import FLAT, demo_decoder, given_costs, stand_in_decoder
from tests.support.drafters import HostileDrafter, drafted

pytestmark = pytest.mark.slow

PROMPT = '[INST] Repeat the following phrase 4 times: "The red fox sees the river.". [/INST]'
EXAMPLE = Path(mlxspec.__file__).parents[1] / "examples" / "own_drafter.py"


def example_class() -> type[Drafter]:
    """Return the drafter class in the documentation."""
    spec = importlib.util.spec_from_file_location("own_drafter", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind: type[Drafter] = module.LastBigram
    return kind


def tokens(decoder: Decoder, **options: object) -> list[int]:
    return [r.token for r in decoder.stream(PROMPT, 40, **options)]


def test_the_pages_drafter_drafts() -> None:
    own = example_class()
    plain = tokens(demo_decoder(Decoder))
    alone = demo_decoder(Decoder, drafter=own)
    responses = list(alone.stream(PROMPT, 40))
    assert [response.token for response in responses] == plain
    assert responses[-1].stats.tokens_per_step > 2


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_an_extra_drafter_drafts_beside_the_look_ups(temp: float) -> None:
    plain = tokens(stand_in_decoder(Decoder), temp=temp, seed=3)
    for extra in (Foresight(plain), HostileDrafter(plain, 512, 1, seed=4)):
        decoder = stand_in_decoder(AutoDecoder, extra_drafter=extra)
        decoder.costs = given_costs(FLAT)
        assert tokens(decoder, temp=temp, seed=3) == plain


def test_what_an_extra_drafter_alone_knows_is_drafted() -> None:
    prompt = [5, 6, 7]
    truth = [r.token for r in stand_in_decoder(Decoder).stream(prompt, 40)]
    steps = {}
    for extra in (None, Foresight(truth)):
        decoder = stand_in_decoder(AutoDecoder, extra_drafter=extra, memory_tokens=0)
        decoder.costs = given_costs(FLAT)
        *_, last = decoder.stream(prompt, 40)
        steps[extra is None] = last.stats.steps
    assert steps[False] < 0.6 * steps[True]


class Foresight(Drafter):
    """A drafter that knows the output."""

    def __init__(self, truth: Sequence[int]) -> None:
        self._truth = list(truth)

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = [prompt[-1]]

    def propose(self, max_depth: int) -> DraftTree:
        done = len(self._text) - 1
        return DraftTree.chain(self._text[-1], self._truth[done : done + min(max_depth, 6)])

    def observe(self, step: VerifiedStep) -> None:
        self._text += step.tokens


class Wrong(Drafter):
    """A drafter that proposes a given object."""

    def __init__(self, proposal: object) -> None:
        self._proposal = proposal

    def propose(self, max_depth: int) -> DraftTree:
        return self._proposal  # type: ignore[return-value]

    def observe(self, step: VerifiedStep) -> None:
        pass


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        ([1, 2], r"^Wrong\.propose returned list: return a DraftTree, such as "),
        (None, r"^Wrong\.propose returned NoneType: "),
        (
            DraftTree.chain(-7),
            r"^Wrong\.propose returned a tree with the root -7, but the context ",
        ),
    ],
)
def test_an_invalid_draft_is_refused_by_name(proposal: object, message: str) -> None:
    for decoder in (stand_in_decoder(Decoder, drafter=Wrong(proposal)), extra(Wrong(proposal))):
        with pytest.raises(MlxspecError, match=message) as raised:
            list(decoder.stream(PROMPT, 5))
        assert "\n" not in str(raised.value)


def extra(drafter: Drafter) -> AutoDecoder:
    decoder = stand_in_decoder(AutoDecoder, extra_drafter=drafter)
    decoder.costs = given_costs(FLAT)
    return decoder


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (5, r"^drafter is of type int: pass an instance of a class derived from mlxspec\.Drafter$"),
        ([], "^drafter is of type list: pass an instance of "),
        (Drafter(), r"^Drafter does not define propose$"),
    ],
)
def test_an_invalid_drafter_is_refused(drafter: object, message: str) -> None:
    decoder = stand_in_decoder(Decoder)
    with pytest.raises((MlxspecError, NotImplementedError), match=message):
        list(drafted(decoder, PROMPT, drafter, max_tokens=3))  # type: ignore[arg-type]


def test_an_unknown_option_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match="no option 'tempp': did you mean temp"):
        stand_in_decoder(Decoder).stream(PROMPT, tempp=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no option 'maxtokens': did you mean max_tokens"):
        stand_in_decoder(Decoder).stream(PROMPT, maxtokens=5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "write it as module:Class"),
        ("no_such_module:It", "No module named 'no_such_module'"),
        ("mlxspec:NoSuch", "no attribute .*NoSuch"),
        ("mlxspec:Decoder", "not derived from mlxspec.Drafter"),
        ("./mine:It", "write it as module:Class"),
        ("mine.py:It", "write it as module:Class"),
        ("mlxspec:Drafter", "lacks one of its methods"),
        ("json:JSONDecoder", "not derived from mlxspec.Drafter"),
    ],
)
def test_an_invalid_name_of_a_drafter_is_refused(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load_drafter(name)
    assert load_drafter("mlxspec:PromptLookupDrafter") is mlxspec.PromptLookupDrafter


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class It(:", r"SyntaxError: invalid syntax \(unwell.py, line 1\)"),
        ("1 / 0", "drafter unwell:It: ZeroDivisionError: division by zero"),
        (
            "import mlxspec\nclass It(mlxspec.PromptLookupDrafter):\n"
            "    def __init__(self, first): ...",
            "missing a required argument: 'first'",
        ),
    ],
)
def test_a_module_or_class_that_cannot_be_used_is_refused(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unwell.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionError, match=message):
        load_drafter("unwell:It")
