"""What a text is whose name does not say it: Markdown, YAML, TOML, INI, or a program in one of the common languages.

Only what is unmistakable is told apart from plain text. In all of these the file's own text is the document, so that a wrong
guess costs structure, and never text.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import yaml

from ingest.encoding import decode
from storage.errors import FileError

_HEAD = 4096  # bytes
_FIRST = re.compile(rb"^[^\s#;][^\n]*", re.M)  # line that is no comment
_BEGINS = re.compile(rb"\[|---|- |[\w./\"' -]+[=:]")
_MOST = 1 << 20  # bytes: what is longer is not read twice to know it
_FRONT_MATTER = re.compile(r"---\n(?:[\w-]+:.*\n(?:[ \t-].*\n)*)+---\n")
_HEADING = re.compile(r"(?:\A|\n[ \t]*\n)#{1,6} \S.*(?=\n|\Z)")
# What else only Markdown has: a lower heading, a fence, a link, bold words, a table's rule, or two items of a list.
_MARKS = re.compile(
    r"^#{2,6} \S|^(?:```|~~~)|\[[^\]\n]+\]\([^)\s]+\)|\*\*\S[^*\n]*\*\*|^\|?[ :-]+-\|[ |:-]+$"
    r"|^[-*+] \S.*\n(?:[-*+] |[ \t]+\S)",
    re.M,
)
_FENCE = re.compile(r"^(?:```|~~~)", re.M)
_PROGRAM = re.compile(r"^[\w.\"-]+[ \t]*[:+?]?=|[;{}]$", re.M)
_COMMENTS = re.compile(r"^#.*(?:\n#.*)*$", re.M)
_SECTION = re.compile(r"^\[[^\[\]\n]{1,200}\][ \t]*$")
_SETTING = re.compile(r"^[\w.\- ]{1,80}?[ \t]*[=:](?:[ \t]|\S|$)")
_YAML_LINE = re.compile(r"(?:---|\.\.\.)[ \t]*$|- |[\w./\"'-]+:(?:[ \t]|$)")
_NESTED = re.compile(r"^(?:---|[\w.\"'-]+:[ \t]*\n(?:[ \t]+[\w./\"'-]+:|[ \t]*- ))", re.M)

# By language, what its files begin lines with: each of the patterns must be there.
_SPOKEN: Mapping[str, tuple[re.Pattern[bytes], ...]] = MappingProxyType(
    {
        language: tuple(re.compile(pattern, re.M) for pattern in patterns)
        for language, patterns in {
            "php": (rb"\A\s*<\?php\b",),
            "go": (rb"^package \w+\s*$", rb"^(?:func |import (?:\(|\")|type \w+ (?:struct|interface)\b)"),
            "java": (rb"^(?:package|import) [\w.*]+;", rb"^(?:public |final |abstract )*(?:class|interface|enum|record) \w+"),
            "csharp": (rb"^using [\w.]+;", rb"^\s*(?:namespace|(?:public |internal |static |sealed )*(?:class|interface)) \w+"),
            "kotlin": (rb"^(?:package|import) [\w.*]+\s*$", rb"^\s*(?:\w+ )*fun (?:<[^>\n]+> )?[\w.]+\("),
            "rust": (rb"^(?:use [\w:]+(?:::\{|;|::\*)|(?:pub )?mod \w+)", rb"^\s*(?:pub )?(?:fn \w+|struct \w+|enum \w+|impl\b)"),
            "cpp": (rb"^#include\s*[<\"]", rb"^\s*(?:class|namespace|template|using)\b|std::"),
            "c": (rb"^#include\s*[<\"]", rb"^[\w *]+\([^;{]*\)\s*\{"),
            "typescript": (
                rb"^(?:import .+ from ['\"]|export )", rb"^(?:export )?(?:interface \w+|type \w+ =)|\): \w+ (?:\{|=>)",
            ),
            "javascript": (
                rb"^(?:import .+ from ['\"]|export (?:default|const|function|class)|(?:const|let|var) .+ = require\()",
                rb"[;{]\s*$",
            ),
            "ruby": (rb"^(?:require(?:_relative)? ['\"]|module [A-Z]|class [A-Z])", rb"^\s*def \w+", rb"^\s*end\s*$"),
            "sql": (rb"^(?i:create (?:or replace )?(?:table|view|function|index)|insert into) [\w.\"`]+", rb";\s*$"),
        }.items()
    }
)


def spoken_in(head: bytes) -> str | None:
    """The language of a program, by its first bytes; None for a text, also one that shows programs."""
    if _is_markdown(head.decode("utf-8", "replace").replace("\r\n", "\n")):
        return None
    return next((name for name, signs in _SPOKEN.items() if all(sign.search(head) for sign in signs)), None)


def format_of(data: bytes) -> str | None:
    """The parser for a text that is Markdown or one of settings; None for any other."""
    if len(data) > _MOST or not _may_be_one(data[:_HEAD]):
        return None
    try:
        text = decode(data)
    except FileError:
        return None
    return next((name for name, says_so in _FORMATS.items() if says_so(text)), None)


def _may_be_one(head: bytes) -> bool:
    """Whether its first lines leave it open: of most prose this is all that is looked at."""
    if b"\0" in head:
        return True  # wide characters
    first = _FIRST.search(head)
    return b"\n#" in head or head.startswith(b"#") or (first is not None and _BEGINS.match(first[0]) is not None)


def _is_toml(text: str) -> bool:
    """All of it, with a table or two keys: its grammar takes no prose."""
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError):
        return False
    return len(tree) > 1 or any(isinstance(value, dict) for value in tree.values())


def _is_ini(text: str) -> bool:
    """Sections, and under them settings and nothing else."""
    lines = [line for line in text.split("\n") if line.strip() and line[0] not in "#;"]
    if not lines or not _SECTION.match(lines[0]):
        return False
    rest = [line for line in lines if not _SECTION.match(line)]
    return bool(rest) and all(line[0] in " \t" or _SETTING.match(line) for line in rest)


def _is_markdown(text: str) -> bool:
    """A heading that stands alone and something else that only Markdown has; the rest is not mostly comments."""
    front = _FRONT_MATTER.match(text)
    body = text[front.end() :].lstrip("\n") if front else text
    headings = len(_HEADING.findall(body))
    if not headings or not (front or _MARKS.search(body)) or (_PROGRAM.search(body) and not _FENCE.search(body)):
        return False
    comments = sum(match[0].count("\n") + 1 for match in _COMMENTS.finditer(body))
    lines = sum(1 for line in body.split("\n") if line.strip())
    return comments - headings <= headings and 2 * comments <= lines + 1


def _is_yaml(text: str) -> bool:
    """A mapping or a list of more than one line, in which something is nested, and each first line names a key."""
    lines = [line for line in text.split("\n") if line.strip() and line[0] not in "# \t"]
    if len(lines) < 2 or not _NESTED.search(text) or not all(_YAML_LINE.match(line) for line in lines):
        return False
    try:
        kinds = {type(event) for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))}
    except (yaml.YAMLError, ValueError, RecursionError):
        return False
    return yaml.MappingStartEvent in kinds


_FORMATS: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {"toml": _is_toml, "ini": _is_ini, "markdown": _is_markdown, "yaml": _is_yaml}
)
