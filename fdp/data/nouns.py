"""Nouns for what a dataset holds, taken from the names of fields that the user gave.

--user-field patient_id   ->  "600 patients"            --field note   ->  "1,799 notes"
--user-field by           ->  "600 users"               --field text   ->  "1,799 records"

>>> count(600, person_noun("patient_id")), count(1, text_noun("note"))
('600 patients', '1 note')
"""

from __future__ import annotations

import re

USER, RECORD, FILE = "user", "record", "file"
IRREGULAR = {"person": "people", "child": "children", "man": "men", "woman": "women"}
# Words that say that a field identifies someone, and not whom.
_IDENTIFIERS = {
    "id", "ids", "uid", "uuid", "guid", "no", "nr", "num", "number", "key", "hash", "code", "name", "email", "mail",
    "address", "login", "handle", "pseudonym", "by", "from", "to", "who", "the", "of", "for", "index",
}  # fmt: skip
# Words that say that a field holds text, and not which.
_TEXTS = {
    "text", "texts", "body", "content", "contents", "prompt", "completion", "messages", "value", "input", "output",
    "data", "string", "raw", "clean", "full", "the", "field", "column", "markdown", "html",
}  # fmt: skip


def words_of(field: str) -> list[str]:
    """Return the words of a field's name in lower case: ``patientId`` and ``patient_id`` are patient and id."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", field)
    return [word.lower() for word in re.split(r"[^A-Za-z]+", spaced) if word]


def person_noun(field: str) -> str:
    """Return the noun for the person that a field names; "user" if the name does not tell."""
    return _noun(field, without=_IDENTIFIERS, otherwise=USER)


def text_noun(field: str) -> str:
    """Return the noun for a text in a field; "record" if the name does not tell."""
    return _noun(field, without=_TEXTS, otherwise=RECORD)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 note" or "1,799 notes"."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of a noun."""
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if re.search(r"[^aeiou]y$", noun):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if re.search(r"(s|x|z|ch|sh)$", noun) else f"{noun}s"


def _noun(field: str, *, without: set[str], otherwise: str) -> str:
    words = [word for word in words_of(field) if word not in without and len(word) > 2]
    if not words or not field.isascii():
        return otherwise
    noun = words[-1]
    if noun.endswith("id") and len(noun) > 5:  # patientid, userid
        noun = noun.removesuffix("id")
    return noun[:-1] if noun.endswith("s") and not noun.endswith(("ss", "us", "is")) else noun
