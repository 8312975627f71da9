"""PDFs made for tests: words put where the test wants them."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence

from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fpdf import FPDF

WORDS = (
    "party shall notice agreement supplier fee delivery term breach liability services data written days law court claim "
    "damages insurance audit records payment invoice interest tax schedule order goods warranty"
).split()
SIZE, STEP = 10, 13  # points


def font_of(characters: str) -> bytes:
    """A TrueType font in which each of these characters is a box of its own."""
    names = {ord(character): f"u{ord(character):06x}" for character in characters}
    pen = TTGlyphPen(None)
    pen.moveTo((50, 0))
    for corner in ((50, 700), (450, 700), (450, 0)):
        pen.lineTo(corner)
    pen.closePath()
    box = pen.glyph()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", *names.values()])
    builder.setupCharacterMap(names)
    builder.setupGlyf(dict.fromkeys([".notdef", *names.values()], box))
    builder.setupHorizontalMetrics(dict.fromkeys([".notdef", *names.values()], (500, 50)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Boxes", "styleName": "Regular"})
    builder.setupOS2(sTypoAscender=800, sTypoDescender=-200, usWinAscent=800, usWinDescent=200)
    builder.setupPost()
    made = io.BytesIO()
    builder.save(made)
    return made.getvalue()


def sheet() -> FPDF:
    """An empty A4 document in points, without breaks of its own."""
    pdf = FPDF(unit="pt")
    pdf.set_auto_page_break(False)
    pdf.set_font("helvetica", size=SIZE)
    return pdf


def put(pdf: FPDF, x: float, y: float, text: str, size: float = SIZE, style: str = "") -> None:
    """Words with their baseline at `y` points from the top."""
    if (pdf.font_size_pt, pdf.font_style) != (size, style):
        pdf.set_font("helvetica", style, size=size)
    pdf.text(x, y, text)


def wrapped(pdf: FPDF, text: str, width: float, size: float = SIZE) -> list[str]:
    """A text in lines of a width in points."""
    pdf.set_font("helvetica", size=size)
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if pdf.get_string_width(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def prose(name: str, words: int, seed: int = 0) -> str:
    """Sentences in which each word is one of its own: `name` and a number follow every word."""
    rng = random.Random(f"{name}{seed}")
    text = [f"{rng.choice(WORDS)}{name}{number}" for number in range(words)]
    for end in range(11, words, 12):
        text[end] += "."
    for begin in range(0, words, 12):
        text[begin] = text[begin].capitalize()
    return " ".join(text)


def columns(pdf: FPDF, texts: Sequence[str], y: float = 100, by_row: bool = True, gap: float = 24, left: float = 50) -> int:
    """Texts side by side, written line by line over all columns, or column by column; how many lines the longest has."""
    width = (595 - 2 * left - gap * (len(texts) - 1)) / len(texts)
    lines = [wrapped(pdf, text, width) for text in texts]
    rows = max(map(len, lines))
    places = [(row, column) for row in range(rows) for column in range(len(texts)) if row < len(lines[column])]
    for row, column in places if by_row else sorted(places, key=lambda place: place[1]):
        put(pdf, left + column * (width + gap), y + row * STEP, lines[column][row])
    return rows


def written(pdf: FPDF) -> bytes:
    return bytes(pdf.output())
