"""How much a key may ask in a minute, and a tenant in a day.

Requests and tokens of a minute are counted by `limits`: in the broker where that is Redis, so that several API processes
count together, else in this process. A broker that is away is not waited for: until it is back each process counts for
itself. Tokens are known when an answer has ended or was cut off, so the one that goes over a limit is given, the next refused.
A tenant's tokens of a day are those of `usage_day`, which lags behind by the seconds of a flush.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import structlog
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage, RedisStorage, Storage
from limits.strategies import FixedWindowRateLimiter, RateLimiter, SlidingWindowCounterRateLimiter
from redis import RedisError
from sqlalchemy import func, select

from serving.auth import Principal
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Tenant, UsageDay
from storage.errors import Overloaded, QuotaExceeded
from storage.policy.types import DAY

REDIS_SECONDS = 0.5  # longer than that no request waits for its count
AWAY_SECONDS = 5.0  # for so long a broker that did not answer is left alone
ANSWERS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # what a model's tokens are spent on
ASKING: ContextVar[Principal | None] = ContextVar("asking", default=None)
log = structlog.get_logger(__name__)


class RateLimited(Overloaded):
    """The key has used up what it may in a minute. `headers` say when to come back."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.headers = dict(headers)


class Limiter:
    """Counts of one process, or of all that share a broker. `broker`: its URL as of now."""

    def __init__(self, broker: Callable[[], str] = lambda: "", clock: Callable[[], float] = time.time) -> None:
        self._broker, self._clock = broker, clock
        self._own = _Counters(MemoryStorage())
        self._shared: tuple[str, _Counters] | None = None
        self._away_until = 0.0
        self._lock = threading.Lock()

    def admit(self, who: Principal, path: str, catalogue: Catalogue) -> dict[str, str]:
        """Count a request, and return the headers that tell what is left. Raises RateLimited, QuotaExceeded."""
        headers: dict[str, str] = {}
        if who.requests_per_minute is not None:
            self._count(lambda counters: counters.request(who), "requests", who.requests_per_minute, headers)
        if path in ANSWERS:
            if who.tokens_per_minute is not None:
                self._count(lambda counters: counters.room(who), "tokens", who.tokens_per_minute, headers)
            self._check_day(who, catalogue)
        return headers

    def spent(self, tokens: int) -> None:
        """Count what an answer has cost whoever asks."""
        who = ASKING.get()
        if who is not None and who.tokens_per_minute is not None:
            self._ask(lambda counters: counters.spend(who, tokens))

    def _count(self, ask: Callable[[_Counters], tuple[bool, float, int]], unit: str, most: int, headers: dict[str, str]) -> None:
        fits, reset, left = self._ask(ask)
        seconds = max(1, math.ceil(reset - time.time()))
        told = {"limit": str(most), "remaining": str(max(0, left)), "reset": f"{seconds}s"}
        headers.update({f"x-ratelimit-{word}-{unit}": value for word, value in told.items()})
        if not fits:
            message = f"Rate limit reached: {most} {unit} per minute for this key. Try again in {seconds} s."
            raise RateLimited(message, {**headers, "retry-after": str(seconds)})

    def _check_day(self, who: Principal, catalogue: Catalogue) -> None:
        now = self._clock()
        with catalogue.read() as session:
            most = session.scalar(select(Tenant.tokens_per_day).where(Tenant.id == who.tenant_id))
            if most is None:
                return
            tokens = func.sum(UsageDay.tokens_prompt + UsageDay.tokens_completion)
            today = (UsageDay.tenant_id == who.tenant_id, UsageDay.day == int(now // DAY))
            used = int(session.scalar(select(tokens).where(*today)) or 0)
        if used >= most:
            hours = math.ceil((DAY - now % DAY) / 3600)
            raise QuotaExceeded(
                f"This tenant has used {used} of its {most} tokens of today (UTC). It can ask again in {hours} h, or when the "
                "operator has raised the quota."
            )

    def _ask(self, ask: Callable[[_Counters], Any]) -> Any:
        counters = self._counters()
        try:
            return ask(counters)
        except RedisError as error:
            log.warning("rate limits are counted here until the broker is back", error=type(error).__name__)
            with self._lock:
                self._away_until, self._shared = time.monotonic() + AWAY_SECONDS, None
            return ask(self._own)

    def _counters(self) -> _Counters:
        url = self._broker().replace("valkey", "redis", 1)
        with self._lock:
            if not url.startswith("redis") or time.monotonic() < self._away_until:
                return self._own
            if self._shared is None or self._shared[0] != url:  # the local broker has another port after a restart
                options: dict[str, Any] = {"socket_connect_timeout": REDIS_SECONDS, "socket_timeout": REDIS_SECONDS}
                self._shared = url, _Counters(RedisStorage(url, key_prefix="preread-limits", **options))
            return self._shared[1]


class _Counters:
    """Requests in a sliding minute; tokens by the minute, counted also where they go over."""

    def __init__(self, storage: Storage) -> None:
        self._requests: RateLimiter = SlidingWindowCounterRateLimiter(storage)
        self._tokens: RateLimiter = FixedWindowRateLimiter(storage)

    def request(self, who: Principal) -> tuple[bool, float, int]:
        """Whether there was room for one more, when there will be room for all again, and for how many there is now."""
        item = RateLimitItemPerMinute(who.requests_per_minute or 0)
        fits = self._requests.hit(item, "requests", _name(who))
        return fits, *self._requests.get_window_stats(item, "requests", _name(who))

    def room(self, who: Principal) -> tuple[bool, float, int]:
        item = RateLimitItemPerMinute(who.tokens_per_minute or 0)
        return (
            self._tokens.test(item, "tokens", _name(who)),
            *self._tokens.get_window_stats(item, "tokens", _name(who)),
        )

    def spend(self, who: Principal, tokens: int) -> None:
        self._tokens.hit(RateLimitItemPerMinute(who.tokens_per_minute or 0), "tokens", _name(who), cost=tokens)


def _name(who: Principal) -> str:
    return who.key_id or f"{who.tenant_id}/{who.user_id}"
