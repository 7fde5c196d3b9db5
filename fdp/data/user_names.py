"""One person, one name: the form under which a user's records are gathered.

    normal(x) = the fixed point of   x -> casefold(NFKC(x without what is not seen)), spaces collapsed

Two spellings of a name that look the same must be one user: were they two, one person would be two units of privacy.
Merging too much costs accuracy and never privacy, since whoever shares a name shares a unit. Letters of different
scripts that look alike, and 7 and 07, stay two.

    >>> normal(" Jose\u0301\u200b") == normal("JOS\u00c9")
    True
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

# Default_Ignorable_Code_Point of Unicode 16, DerivedCoreProperties.txt: shown as nothing wherever they are supported.
_IGNORABLE = (
    (0x00AD, 0x00AD), (0x034F, 0x034F), (0x061C, 0x061C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F),
    (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF),
)  # fmt: skip


def normal(name: str) -> str:
    """Return the form that all spellings of a name share.

    Guarantees:
      - ``normal(normal(x)) == normal(x)``;
      - a character that is not seen changes nothing, wherever it stands;
      - neither do capitals, spaces around the name, nor the way in which Unicode composes a letter.
    """
    before, now = None, name
    while now != before:  # a letter may compose, or fold, only once what stood between its parts is gone
        before = now
        seen = "".join(c for c in now if not is_unseen(c))
        now = " ".join(unicodedata.normalize("NFKC", seen).casefold().split())
    return now


@lru_cache(maxsize=1 << 16)
def is_unseen(character: str) -> bool:
    """Return True for controls, format characters, default-ignorable code points and noncharacters; not for spaces."""
    code = ord(character)
    if character.isspace():
        return False
    if unicodedata.category(character) in ("Cc", "Cf") or code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF:
        return True
    return any(first <= code <= last for first, last in _IGNORABLE)
