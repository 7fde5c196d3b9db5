"""Normalized user names: spellings of a name that look the same are one user."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdp.data.user_names import is_invisible, normalize_name

# Planes 0, 1 and the tags of plane 14, and the noncharacters at the end of every plane: no other plane has any.
PLACES = (
    *range(0x20000),
    *range(0xE0000, 0xE1000),
    *(end + i for end in range(0x2FFFE, 0x110000, 0x10000) for i in (0, 1)),
)
UNSEEN = [chr(c) for c in PLACES if is_invisible(chr(c))]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
# Letters with several spellings: marks, ligatures, folding, Hangul, fillers, spaces.
AWKWARD = st.text(
    st.sampled_from(
        "eE\u0301\u0327\u0345\u00e9\u1e9b\ufb01\u00df\u0130\uff2a\u1100\u1161 \u00a0\t\u3164\u2126\u03c2\u1fb3"
    ),
    max_size=12,
)


@pytest.mark.long
@given(name=TEXTS | AWKWARD)
def test_normalizing_twice_changes_nothing(name: str) -> None:
    assert normalize_name(normalize_name(name)) == normalize_name(name)


@pytest.mark.long
@given(name=TEXTS | AWKWARD, unseen=st.sampled_from(UNSEEN), place=st.integers(0, 12))
def test_an_invisible_character_changes_nothing(name: str, unseen: str, place: int) -> None:
    assert normalize_name(name[:place] + unseen + name[place:]) == normalize_name(name)


@given(name=AWKWARD)
def test_spaces_and_composition_change_nothing(name: str) -> None:
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert normalize_name(unicodedata.normalize(form, name)) == normalize_name(name)
    assert normalize_name(f" {name}\n") == normalize_name(name)


@given(name=st.text(st.sampled_from("aAeE\u00e9\u00c9\u00df\u1e9e\u03c2\u03a3\u03c3\u0434\u0414 "), max_size=12))
def test_capitals_change_nothing(name: str) -> None:
    assert (
        normalize_name(name.lower())
        == normalize_name(name.upper())
        == normalize_name(name.casefold())
        == normalize_name(name)
    )


@pytest.mark.parametrize(
    "other",
    [
        "jose\u0301",
        " Jos\u00e9",
        "Jos\u00e9\u200b",
        "\uff2aos\u00e9",
        "\ufeffJos\u00e9\n",
        "Jos\u00e9\ufe0f",
        "Jo\u034fs\u00e9",
        "Jos\u00e9\0",
        "Jose\u200b\u0301",
        "JOS\u00c9",
        "Jos\u00e9\U000e0041",
        "J\u3164os\u00e9",
        "\x1bJos\u00e9\x7f",
    ],
)
def test_spellings_that_look_the_same_are_one_name(other: str) -> None:
    assert normalize_name(other) == normalize_name("Jos\u00e9") == "jos\u00e9"


def test_names_that_look_different_stay_different() -> None:
    names = ["ann", "anne", "a nn", "7", "07", "\u0430nn"]
    assert len({normalize_name(name) for name in names}) == len(names)


@pytest.mark.parametrize("name", ["", " ", "\u200b", "\0", "\ufe0f\u034f", "\u3164", "\n\t"])
def test_a_name_without_visible_characters_is_empty(name: str) -> None:
    assert normalize_name(name) == ""


def test_the_invisible_characters_are_those_of_unicode() -> None:
    assert len(UNSEEN) > 4000
    assert {"\0", "\x7f", "\u00ad", "\u034f", "\u200b", "\u2060", "\ufe0f", "\ufeff", "\uffff", "\U000e0100"} <= set(
        UNSEEN
    )
    assert not {" ", "\n", "a", "\u0301", "\u00a0", "\ue000"} & set(UNSEEN)
