"""Nouns come from the names of fields, where these tell."""

from __future__ import annotations

import pytest

from fdp.data.nouns import count, person_noun, plural, text_noun


@pytest.mark.parametrize(
    ("field", "noun"),
    [
        ("patient_id", "patient"), ("patientId", "patient"), ("patientid", "patient"), ("author", "author"),
        ("authors", "author"), ("user_name", "user"), ("email", "user"), ("by", "user"), ("sender.email", "sender"),
        ("id", "user"), ("UID", "user"), ("größe", "user"), ("x7", "user"), ("boss", "boss"),
    ],
)  # fmt: skip
def test_a_field_that_names_a_person_gives_the_noun(field: str, noun: str) -> None:
    assert person_noun(field) == noun


@pytest.mark.parametrize(
    ("field", "noun"),
    [("text", "record"), ("note", "note"), ("notes", "note"), ("review_text", "review"), ("body", "record")],
)
def test_a_field_that_holds_text_gives_the_noun(field: str, noun: str) -> None:
    assert text_noun(field) == noun


def test_plurals() -> None:
    assert [plural(word) for word in ("note", "story", "day", "person", "box", "speech")] == [
        *("notes", "stories", "days", "people", "boxes", "speeches")
    ]
    assert (count(1, "note"), count(1799, "note")) == ("1 note", "1,799 notes")
