"""Invoice processing: money, tax, parsing, sending and dunning.

The modules build on each other in this order, and none imports a later one:

    money -> models -> tax -> parser -> dunning

``retry`` stands alone. Nothing in this package opens a network connection;
the caller hands in the functions that do.
"""

from invoicing.dunning import Reminder, next_reminder
from invoicing.models import Invoice, InvoiceState, Line
from invoicing.money import CurrencyMismatch, Money
from invoicing.parser import ParseError, parse_csv
from invoicing.retry import RetriesExhausted, retry
from invoicing.tax import TaxTotal, gross_total, tax_totals

__all__ = [
    "CurrencyMismatch",
    "Invoice",
    "InvoiceState",
    "Line",
    "Money",
    "ParseError",
    "Reminder",
    "RetriesExhausted",
    "TaxTotal",
    "gross_total",
    "next_reminder",
    "parse_csv",
    "retry",
    "tax_totals",
]

__version__ = "2.3.1"
