"""Bodies as JSON, and as nothing else: Python's reader alone takes NaN, lets the last of two equal fields win, and makes
infinity of 1e999. What reads a body differently from whoever checked it before us is a hole; what no database takes is a 500."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

_EXACT = 1 << 53  # up to here a float is one whole number
NESTED = 200  # levels; the deepest that anything here reads is a JSON schema


class StrictJSON(APIRoute):
    """A route whose body is read so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return handler


class _Request(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = loads(await self.body())
        return self._json


def loads(body: bytes) -> Any:
    """What the body says. Raises JSONDecodeError, whose message names what is wrong."""
    try:
        text = body.decode(json.detect_encoding(body))
        read = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number, parse_float=_number)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(read, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError:
        _refuse("it is not UTF-8")
    except UnicodeEncodeError:
        _refuse("it holds half a character: a surrogate without its other half")
    except RecursionError:
        _refuse("it is nested too deeply")
    except ValueError:  # an integer of thousands of digits
        _refuse("it holds a number that is too long")
    if _is_deeper(read, NESTED):
        _refuse("it is nested too deeply")
    return read


def _is_deeper(value: Any, levels: int) -> bool:
    """Looked through level by level: whatever walks the body after us may do so by calling itself."""
    level = [value]
    for _ in range(levels):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        _refuse(f"the field {next(name for name in names if names.count(name) > 1)[:100]!r} stands in one object twice")
    return made


def _no_number(word: str) -> NoReturn:
    _refuse(f"{word} is no JSON number")


def _number(digits: str) -> float | int:
    """In JSON 9.0 is a whole number, and some languages write all of theirs so."""
    number = float(digits)
    if not math.isfinite(number):
        _refuse("it holds a number that is too large")
    return int(number) if number.is_integer() and abs(number) <= _EXACT else number


def _refuse(why: str) -> NoReturn:
    raise json.JSONDecodeError(why, "", 0)
