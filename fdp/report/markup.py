"""HTML as values: text is escaped unless it is already markup.

    >>> element("p", "5 < 6, ", element("b", "always"), class_="note")
    <p class="note">5 &lt; 6, <b>always</b></p>

Everything on a report page is built here, so a run named ``<script>`` is shown, not run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

VOID = frozenset({"meta", "input", "br", "path", "line", "rect", "circle"})
"""Elements without content."""


class Html(str):
    """Markup, which is not escaped again."""

    __slots__ = ()


def element(name: str, /, *children: str | None, **attributes: str | float | bool | None) -> Html:
    """Return an element: text is escaped, None and False are left out, ``class_`` is ``class``."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        assert not children, f"{name}: expected no content"
        return Html(f"<{name}{written}/>" if name not in ("meta", "input", "br") else f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[str | None]) -> Html:
    """Return the parts one after another; text is escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts if part is not None))


def data_block(value: Any, *, name: str) -> Html:
    """Return a value as JSON that a script can read and that cannot end its element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Html(f'<script type="application/json" id="{escape(name)}">{text}</script>')


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-") if key != "viewBox" and key != "preserveAspectRatio" else key
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
