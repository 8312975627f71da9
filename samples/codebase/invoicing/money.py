"""Amounts of money as integers of minor units.

An amount is a whole number of minor units, so that sums are exact. Only
multiplication by a rate can leave a fraction, and there the rounding mode is
half-up: a fraction of exactly one half moves away from zero. Thus 2.5 cents
become 3 cents and -2.5 cents become -3 cents, which keeps a credit note the
exact mirror of its invoice.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

#: Digits after the decimal point, by currency. Unlisted currencies have two.
MINOR_DIGITS = {"JPY": 0, "KRW": 0, "BHD": 3, "KWD": 3, "TND": 3}
DEFAULT_MINOR_DIGITS = 2


class CurrencyMismatch(ValueError):
    """Two amounts in different currencies met in one sum."""


def minor_digits(currency: str) -> int:
    """Return how many decimal places ``currency`` has."""
    return MINOR_DIGITS.get(currency, DEFAULT_MINOR_DIGITS)


@dataclass(frozen=True)
class Money:
    """A number of minor units in one currency."""

    minor: int
    currency: str = "EUR"

    def __post_init__(self) -> None:
        if len(self.currency) != 3 or not self.currency.isupper():
            raise ValueError(f"not a currency code: {self.currency!r}")

    @classmethod
    def parse(cls, text: str, currency: str = "EUR") -> Money:
        """Read a decimal such as ``1234.50``; more places than allowed fail.

        A comma is refused rather than guessed at, because it separates
        thousands in some countries and decimals in others.
        """
        if "," in text:
            raise ValueError(f"comma in an amount: {text!r}")
        scaled = Decimal(text).scaleb(minor_digits(currency))
        if scaled != scaled.to_integral_value():
            raise ValueError(f"too many decimal places for {currency}: {text!r}")
        return cls(int(scaled), currency)

    def __add__(self, other: Money) -> Money:
        self._require_same(other)
        return Money(self.minor + other.minor, self.currency)

    def __sub__(self, other: Money) -> Money:
        self._require_same(other)
        return Money(self.minor - other.minor, self.currency)

    def __neg__(self) -> Money:
        return Money(-self.minor, self.currency)

    def times(self, factor: Decimal) -> Money:
        """Multiply and round half-up to a whole minor unit."""
        product = (Decimal(self.minor) * factor).quantize(Decimal(1), ROUND_HALF_UP)
        return Money(int(product), self.currency)

    def __str__(self) -> str:
        digits = minor_digits(self.currency)
        amount = Decimal(self.minor).scaleb(-digits)
        return f"{amount:.{digits}f} {self.currency}"

    def _require_same(self, other: Money) -> None:
        if self.currency != other.currency:
            raise CurrencyMismatch(f"{self.currency} and {other.currency}")
