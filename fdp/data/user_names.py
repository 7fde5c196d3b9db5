"""Normalized user names: spellings of a name that look the same are one user.

    normalize_name(x) = the fixed point of   x -> casefold(NFKC(x without invisible characters)), spaces collapsed

If two such spellings were two users, one person would be two units of privacy. Merging too much costs accuracy and
never privacy, since users that share a name share a unit. Letters of different scripts that look alike stay different,
and so do 7 and 07.

    >>> normalize_name(" Jose\u0301\u200b") == normalize_name("JOS\u00c9")
    True
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

# Default_Ignorable_Code_Point of Unicode 16, DerivedCoreProperties.txt: invisible wherever they are supported.
_IGNORABLE = (
    (0x00AD, 0x00AD), (0x034F, 0x034F), (0x061C, 0x061C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F),
    (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF),
)  # fmt: skip


def normalize_name(name: str) -> str:
    """Return the form that all spellings of a name share.

    Guarantees:
      - ``normalize_name(normalize_name(x)) == normalize_name(x)``;
      - an invisible character changes nothing, wherever it stands;
      - neither do capitals, spaces around the name, nor the way in which Unicode composes a letter.
    """
    before, now = None, name
    while now != before:  # a letter may compose, or fold, only after the characters between its parts are removed
        before = now
        seen = "".join(c for c in now if not is_invisible(c))
        now = " ".join(unicodedata.normalize("NFKC", seen).casefold().split())
    return now


@lru_cache(maxsize=1 << 16)
def is_invisible(character: str) -> bool:
    """Return True for controls, format characters, default-ignorable code points and noncharacters; not for spaces."""
    code = ord(character)
    if character.isspace():
        return False
    if unicodedata.category(character) in ("Cc", "Cf") or code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF:
        return True
    return any(first <= code <= last for first, last in _IGNORABLE)
