"""Tax of an invoice.

Tax is computed on the sum of all lines with the same rate and rounded once
there. Rounding each line by itself drifts: three lines of 0.33 at 19 percent
give 0.06 each, 0.18 together, while the sum of 0.99 gives 0.19.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from invoicing.models import Invoice
from invoicing.money import Money

#: Rates that an invoice may carry; any other is a fault of the supplier's.
ALLOWED_RATES = frozenset({Decimal("0"), Decimal("0.07"), Decimal("0.19")})

#: A stated tax may differ from ours by this many minor units per rate.
TOLERANCE_MINOR = 2


class UnknownRate(ValueError):
    """A line carries a tax rate that is not in ``ALLOWED_RATES``."""


@dataclass(frozen=True)
class TaxTotal:
    """The net sum and the tax of all lines with one rate."""

    rate: Decimal
    net: Money
    tax: Money


def tax_totals(invoice: Invoice) -> list[TaxTotal]:
    """Return one total per rate, the highest rate first."""
    sums: dict[Decimal, Money] = {}
    for line in invoice.lines:
        if line.tax_rate not in ALLOWED_RATES:
            raise UnknownRate(f"{invoice.key}: {line.tax_rate}")
        known = sums.get(line.tax_rate)
        sums[line.tax_rate] = line.net if known is None else known + line.net
    return [
        TaxTotal(rate, sums[rate], sums[rate].times(rate))
        for rate in sorted(sums, reverse=True)
    ]


def gross_total(invoice: Invoice) -> Money:
    """Return the sum of all nets and taxes. An invoice without lines fails."""
    totals = tax_totals(invoice)
    if not totals:
        raise ValueError(f"{invoice.key}: no lines")
    result = totals[0].net + totals[0].tax
    for total in totals[1:]:
        result = result + total.net + total.tax
    return result


def agrees(stated: Money, computed: Money) -> bool:
    """Say whether a stated tax is within the tolerance of the computed one."""
    return abs((stated - computed).minor) <= TOLERANCE_MINOR
