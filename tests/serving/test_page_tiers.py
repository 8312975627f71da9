"""Where stored KV lies, as the page draws it: the bytes are those of the API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser_kit import FEE, Browser
from fixtures_models import Models
from model_kit import Shared, serving

SECTION = "main section:nth-child(2)"
BARS = f"return [...document.querySelectorAll('{SECTION} svg rect')].map((r) => r.width.baseVal.value)"
# Rows of cells of the plot's own table, and of the table of corpora.
CELLS = "return [...document.querySelectorAll(arguments[0])].map((r) => [...r.cells].map((c) => c.textContent))"
UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def as_bytes(said: str) -> float:
    """What is shown as a number with at most one place behind the point."""
    count, unit = said.split()
    return float(count.replace(",", "")) * UNITS[unit]


def test_the_plot_of_tiers_and_its_table_show_the_bytes_of_the_storage_api(
    driver: Any, tiny_models: Models, tmp_path: Path
) -> None:
    with serving(Shared(tiny_models.folder("llama")), tmp_path) as service:
        service.corpus("harbour", {"fees.txt": FEE, "lamps.txt": "The lamps are lit at nine."})
        service.corpus("works", {"works.txt": "The crane is oiled on Mondays. " * 30})
        service.chat("harbour", "What is the berth fee?")  # its KV has a copy in memory now
        corpora = service.call("GET", "/storage")["corpora"]
        tiers = list(dict.fromkeys(tier for corpus in corpora for tier in corpus["tiers"]))
        held = [sum(corpus["tiers"].get(tier, {}).get("bytes", 0) for corpus in corpora) for tier in tiers]
        of_tier = dict(zip(tiers, held, strict=True))
        assert of_tier["object"] > 1.2 * of_tier["memory"] > 0, "two bars of different lengths"

        browser = Browser(driver, service.url)
        driver.get(f"{service.url}/")
        browser.run("sessionStorage.clear(); localStorage.clear()")
        browser.open(service.key, "savings")
        browser.find("h2", "Stored KV by tier")
        widths = browser.until(lambda: browser.run(BARS))
        assert [width / max(widths) for width in widths] == pytest.approx([each / max(held) for each in held], abs=0.01)
        plotted = browser.run(CELLS, f"{SECTION} figure tbody tr")
        assert [as_bytes(shown) for _, shown in plotted] == pytest.approx(held, rel=0.06)
        for corpus, cells in zip(corpora, browser.run(CELLS, f"{SECTION} > .scroll tbody tr"), strict=True):
            assert cells[0] == corpus["name"]
            shown = [as_bytes(cell) for cell in cells[1 : 1 + len(tiers)]]
            assert shown == pytest.approx([corpus["tiers"].get(tier, {}).get("bytes", 0) for tier in tiers], rel=0.06)
        assert browser.faults() == []
