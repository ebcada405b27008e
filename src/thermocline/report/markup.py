"""HTML and SVG as nested calls, escaped by default: only `Html` passes unescaped, and only `element` makes it."""

from __future__ import annotations

import re
from html import escape

# What XML cannot hold and no screen can show: control characters, halves of surrogate pairs, the two noncharacters.
_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_WITHOUT_END = {"br", "input", "meta"}  # HTML forbids </br>; everywhere else it wants the end said


class Html(str):
    """Markup that is not escaped again."""


def text(piece: object) -> Html:
    """`piece` as markup: unchanged if it is markup, else escaped. Floats keep one decimal."""
    if isinstance(piece, Html):
        return piece
    if isinstance(piece, float):
        return Html(f"{piece:.1f}".removesuffix(".0"))
    return Html(escape(_UNSEEN.sub("\N{REPLACEMENT CHARACTER}", str(piece))))


def element(tag: str, *inside: object, **attributes: object) -> Html:
    """<tag attributes>inside</tag>. `class_` is class, `stroke_width` is stroke-width; attributes that are None are omitted."""
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    words = "".join(f' {name}="{text(value)}"' for name, value in given.items())
    return Html(f"<{tag}{words}/>" if tag in _WITHOUT_END else f"<{tag}{words}>{join(*inside)}</{tag}>")


def join(*pieces: object) -> Html:
    return Html("".join(text(piece) for piece in pieces))
