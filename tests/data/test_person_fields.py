"""A field that seems to name a person is found by its name or by its repeated values, which are only counted."""

from __future__ import annotations

from typing import Any

import pytest

from fdp.data.person_fields import FieldCensus, PersonField, is_plain_name, names_nobody


def census(*records: dict[str, Any]) -> FieldCensus:
    found = FieldCensus()
    for record in records:
        found.add(record)
    return found


@pytest.mark.parametrize(
    "name", ["author", "user_id", "patient_id", "patientId", "email", "sender", "account_number", "Customer ID"]
)
def test_a_field_is_found_by_its_name(name: str) -> None:
    records = [{"text": f"note {i}", name: f"p{i % 3}", "lang": "en", "n": i} for i in range(9)]
    assert census(*records).person(read=("text",)) == PersonField(name, 3, 9)


def test_a_field_is_found_by_repeated_short_values() -> None:
    records = [{"text": f"note {i}", "who": i % 12, "lang": "de" if i % 2 else "en", "date": i % 20} for i in range(60)]
    assert census(*records).person(read=("text",)) == PersonField("who", 12, 60)


@pytest.mark.parametrize(
    "records",
    [
        [{"text": "a"}] * 30,
        [{"text": "a", "label": i % 12} for i in range(60)],
        [{"text": "a", "id": i} for i in range(60)],
        [{"text": "a", "author": "x" * 99} for _ in range(60)],
        [{"text": "a", "author": ["x"]} for _ in range(60)],
        [{"text": "a", "author": f"a{i}" if i % 2 else None} for i in range(60)],
        [{"text": f"{i % 12}"} for i in range(60)],
        [{"text": "a", "Ann Smith, 12 Elm Street, wrote a long letter": i % 12} for i in range(60)],
    ],
    ids=["none", "label", "unique", "long", "list", "missing", "text", "value as a name"],
)
def test_other_fields_are_not_taken_for_people(records: list[dict[str, Any]]) -> None:
    assert census(*records).person(read=("text",)) is None


def test_spellings_are_one_value_and_no_value_is_kept() -> None:
    found = census({"author": "Ann "}, {"author": "ann"}, {"author": "bob"})
    assert found.person() == PersonField("author", 2, 3)
    assert "ann" not in repr(vars(found)).lower()


def test_a_plain_name_may_be_shown() -> None:
    assert is_plain_name("patient_id")
    assert not is_plain_name("17.3.1962")


DATES = ["2024-01-31", "2024-01-31T08:15:00Z", "2024-1-31 08:15:00.5+01:00", "31.1.2024", "31.01.24 8:15", "1/31/2024"]
TIMES_AND_FRACTIONS = ["1/31/2024 8:15 PM", "2024/01/31", "08:15", "8:15:30", "36.5", "-0,25", "1.5e-3", ".5"]
NAMES = [
    "7",
    "20240131",
    "p-7",
    "ann",
    "17-3",
    "1.2.3.4",
    "2024-13-45x",
    "45.13.2024",
    "99/99/9999",
    "8:75",
    "a.b",
    "",
    "+49 30 1",
]


@pytest.mark.parametrize("value", [*DATES, *TIMES_AND_FRACTIONS])
def test_dates_times_and_fractions_name_nobody(value: str) -> None:
    assert names_nobody(value)
    assert names_nobody(f" {value} ")


@pytest.mark.parametrize("value", NAMES)
def test_names_and_numbers_may_be_people(value: str) -> None:
    assert not names_nobody(value)


@pytest.mark.parametrize("name", ["visited", "patient_since"])
def test_a_field_of_dates_is_no_field_of_people_whatever_its_name(name: str) -> None:
    records = [{"text": f"note {i}", name: f"{1 + i % 12}.3.2024"} for i in range(60)]
    assert census(*records).person(read=("text",)) is None
    records = [record | {"who": i % 15} for i, record in enumerate(records)]
    assert census(*records).person(read=("text",)) == PersonField("who", 15, 60)
    records[0][name] = "ann"
    assert census(*records).person(read=("text", "who")) == PersonField(name, 13, 60)
