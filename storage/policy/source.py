"""A policy file's YAML as a plain tree that knows its lines. The file is data: no tags, no anchors, no great depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from storage.errors import UserError

MAX_BYTES = 256 << 10
DEEPEST = 12
MAPPING, SEQUENCE, SCALAR = yaml.MappingNode, yaml.SequenceNode, yaml.ScalarNode


@dataclass(frozen=True)
class Item:
    """A text, a list or a mapping, and the line on which it begins (0: it came from no file).

    Texts are kept as they were written, so that the language `no` is not taken for a truth value."""

    line: int
    value: str | list[Item] | dict[str, Item] | None


class PolicyError(UserError):
    """A policy that cannot be used. `mistakes`: one line each."""

    code = "invalid_policy"

    def __init__(self, mistakes: list[str]) -> None:
        more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
        super().__init__(mistakes[0] + more)
        self.mistakes = mistakes


def read_yaml(data: bytes) -> Item:
    """The tree in `data`. Raises PolicyError."""
    if len(data) > MAX_BYTES:
        raise PolicyError([f"line 1: the file has {len(data)} bytes; a policy may have {MAX_BYTES}"])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise PolicyError(["line 1: the file is not UTF-8 text"]) from None
    try:
        _check_events(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise PolicyError([f"line {line}: this is not YAML: {error.problem or error.context}"]) from None
    except yaml.YAMLError as error:
        raise PolicyError([f"line 1: this is not YAML: {str(error).splitlines()[0]}"]) from None
    if node is None:
        return Item(1, {})
    mistakes: list[str] = []
    tree = _item(node, mistakes)
    if mistakes:
        raise PolicyError(mistakes)
    return tree


def _check_events(text: str) -> None:
    """Refuse, before anything is built, what makes small files large and data code."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if getattr(event, "anchor", None) is not None:
            raise PolicyError([f"line {line}: anchors and aliases (& and *) are not used here; quote a text that begins so"])
        if getattr(event, "tag", None) is not None:
            raise PolicyError([f"line {line}: tags (!) are not used here; quote a text that begins so"])
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise PolicyError([f"line {line}: a policy is not nested deeper than {DEEPEST} levels"])


def _item(node: yaml.Node, mistakes: list[str]) -> Item:
    line = node.start_mark.line + 1
    if isinstance(node, SCALAR):
        empty = node.tag == "tag:yaml.org,2002:null"
        return Item(line, None if empty else str(node.value))
    if isinstance(node, SEQUENCE):
        return Item(line, [_item(each, mistakes) for each in node.value])
    found: dict[str, Item] = {}
    for key, value in node.value:
        at = key.start_mark.line + 1
        if not isinstance(key, SCALAR):
            mistakes.append(f"line {at}: a field's name is a text")
        elif key.value in found:
            mistakes.append(f"line {at}: {key.value!r} stands here a second time")
        else:
            found[str(key.value)] = _item(value, mistakes)
    return Item(line, found)


def plain(value: object) -> Item:
    """The tree of what a hook returned. Raises PolicyError for anything but texts, numbers, truth values, lists, mappings."""
    if isinstance(value, bool):
        return Item(0, "true" if value else "false")
    if value is None or isinstance(value, str):
        return Item(0, value)
    if isinstance(value, int | float):
        return Item(0, str(value))
    if isinstance(value, list | tuple):
        return Item(0, [plain(each) for each in value])
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return Item(0, {key: plain(each) for key, each in value.items()})
    raise PolicyError([f"the hook returned a {type(value).__name__}: return a mapping of actions, or None"])
