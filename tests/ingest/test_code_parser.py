"""Source code by its definitions, whole or broken."""

from __future__ import annotations

import pytest

from ingest.parsers import parse
from storage.types import Block, ParsedDocument

PYTHON = '''"""Module."""
import os


# About first.
@cache
def first(a):
    return a


class Shop(Base):
    """A shop – with ümlauts."""

    rate = 2

    def sell(self, item):
        return item

    # Buys.
    @property
    def buy(self):
        return 1


LAST = first(1)
'''


def part(document: ParsedDocument, words: str) -> tuple[Block, str]:
    found = [b for b in document.blocks if words in document.text[b.start : b.end]]
    assert len(found) == 1, found
    return found[0], document.text[found[0].start : found[0].end]


def test_python_functions_and_methods_are_definitions() -> None:
    document = parse(PYTHON.encode(), "shop.py")
    assert document.text == PYTHON
    first, text = part(document, "def first")
    assert first.kind == "definition"
    assert text == "# About first.\n@cache\ndef first(a):\n    return a"
    sell, text = part(document, "def sell")
    assert (sell.header, sell.headings) == ("class Shop(Base):", ("Shop",))
    assert text == "    def sell(self, item):\n        return item"
    _, text = part(document, "def buy")
    assert text == "    # Buys.\n    @property\n    def buy(self):\n        return 1"
    head, text = part(document, "class Shop")
    assert text.endswith("rate = 2")
    assert head.headings == ("Shop",)
    assert part(document, "LAST")[0].kind == "code"
    assert part(document, "import os")[0].headings == ()


SAMPLES = {
    "a.js": (
        "export class A {\n  go() {\n    return 1;\n  }\n}\nfunction f() {}\n",
        "go()",
        "export class A",
    ),
    "a.ts": (
        "export class A<T> {\n  go(): T {\n    return 1;\n  }\n}\ninterface I { x: number }\n",
        "go()",
        "class A<T>",
    ),
    "a.tsx": ("class A {\n  go() {\n    return <b>x</b>;\n  }\n}\n", "go()", "class A"),
    "A.java": (
        "package p;\nclass A extends B {\n  int x;\n  int go() { return x; }\n}\n",
        "go()",
        "class A extends B",
    ),
    "a.go": ("package p\n\n// Go goes.\nfunc (a *A) Go() int {\n\treturn 1\n}\n", "Go()", ""),
    "a.c": ("#include <x.h>\nint go(void) {\n  return 1;\n}\n", "go(void)", ""),
    "a.cpp": ("namespace n {\nclass A {\n public:\n  int go() { return 1; }\n};\n}\n", "go()", "class A"),
    "a.h": ("class A {\n public:\n  int go() { return 1; }\n};\n", "go()", "class A"),
    "a.rs": ("struct S;\nimpl S {\n    #[inline]\n    fn go(&self) -> i32 { 1 }\n}\n", "fn go", "impl S"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_each_language_finds_its_definitions_with_the_class_line(name: str) -> None:
    text, words, header = SAMPLES[name]
    document = parse(text.encode(), name)
    block, _ = part(document, words)
    assert block.kind == "definition"
    assert header in block.header if header else block.header == ""


@pytest.mark.parametrize("name", [*SAMPLES, "a.py"])
@pytest.mark.parametrize(
    "broken", ["def f(:\n  x = (\n", "class {{{ é \n}} )) fn\n", "]" * 50 + "🙂 'unclosed\n", "("]
)
def test_a_file_with_syntax_errors_is_read_in_full(name: str, broken: str) -> None:
    sound = SAMPLES.get(name, (PYTHON,))[0]
    document = parse((broken + sound + broken).encode(), name)
    reached = 0
    for block in document.blocks:
        assert not document.text[reached : block.start].strip()
        assert block.start >= reached
        reached = block.end
    assert not document.text[reached:].strip()


def test_a_long_function_may_be_cut_at_statements_inside_a_loop() -> None:
    body = "".join(f"        total_{i} = compute(argument_{i}, other_{i})\n" for i in range(60))
    text = f"def f():\n    start = 1\n    for x in y:\n{body}    return start\n"
    document = parse(text.encode(), "a.py")
    (block,) = document.blocks
    lines = [document.text[at:].split("\n")[0] for at in block.breaks]
    assert "    for x in y:" in lines
    assert "        total_7 = compute(argument_7, other_7)" in lines
    assert "    return start" in lines


def test_five_thousand_nested_brackets_are_read() -> None:
    text = "x = " + "[" * 5000 + "]" * 5000
    for name in ("a.py", "a.js", "a.go"):
        assert parse(text.encode(), name).text == text
