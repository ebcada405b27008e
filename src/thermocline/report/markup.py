"""HTML and SVG as nested calls: whatever is not markup already is text, and is escaped.

Names of tables come from users and end up in titles, labels and attributes alike. Templates leave it to their author to escape
each of them; here only `Html` passes unescaped, and only `element` makes it. What comes out is well-formed XML as well as HTML,
so tests can read it with a strict parser.
"""

from __future__ import annotations

import re
from html import escape

# What XML cannot hold and no screen can show: control characters, halves of surrogate pairs, the two noncharacters.
_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_WITHOUT_END = {"br", "input", "meta"}  # HTML forbids </br>; everywhere else it wants the end said


class Html(str):
    """Markup, not text."""


def text(piece: object) -> Html:
    """`piece` as markup: itself if it is that already, else escaped. Numbers keep the digits that a drawing can show."""
    if isinstance(piece, Html):
        return piece
    if isinstance(piece, float):
        return Html(f"{piece:.1f}".removesuffix(".0"))
    return Html(escape(_UNSEEN.sub("\N{REPLACEMENT CHARACTER}", str(piece))))


def element(tag: str, *inside: object, **attributes: object) -> Html:
    """<tag attributes>inside</tag>. `class_` is class, `stroke_width` stroke-width; an attribute that is None is left away."""
    words = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text(value)}"' for name, value in attributes.items() if value is not None
    )
    return Html(f"<{tag}{words}/>" if tag in _WITHOUT_END else f"<{tag}{words}>{join(*inside)}</{tag}>")


def join(*pieces: object) -> Html:
    return Html("".join(text(piece) for piece in pieces))
