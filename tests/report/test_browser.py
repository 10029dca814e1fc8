"""The pages in a browser, at the width of a desk and of a phone: nothing asked for, no error, nothing to the side."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from qwen_quantize.report.bench_page import render_bench
from qwen_quantize.report.compare import Order, compare
from qwen_quantize.report.compare_page import render_comparison
from qwen_quantize.report.page import render_page
from tests.report.sample import bench, manifest, mixture
from tests.report.test_compare import ROWS, row

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 390)
# What a page may load: nothing. Whatever it asks for all the same becomes an error in the console.
RULE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; frame-src 'self'"
LOOK = """<script>
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument, root = page.documentElement;
    const clipped = [...page.querySelectorAll("svg")].flatMap((svg) => {
      const box = svg.getBoundingClientRect();
      return [...svg.querySelectorAll("text")].filter((text) => {
        const at = text.getBoundingClientRect();
        return at.width && (at.left < box.left - 2 || at.right > box.right + 2 || at.top < box.top - 2);
      }).map((text) => text.textContent);
    });
    const shown = [...page.querySelectorAll("svg")].filter((svg) => svg.getBoundingClientRect().width > 0);
    return {width: root.clientWidth, needed: root.scrollWidth, clipped, drawings: shown.length,
            words: page.body.innerText.length};
  });
  const place = document.createElement("pre");
  place.id = "found";
  place.textContent = JSON.stringify(found);
  document.body.append(place);
});
</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: pages are not opened in a browser"),
]


def opened(page: str, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What the page looks like at each width, and the console's messages."""
    frames = "".join(
        f'<iframe width="{width}" height="800" style="border: 0" srcdoc="{escape(page)}"></iframe>'
        for width in WIDTHS
    )
    around = folder / "around.html"
    around.write_text(
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>two widths</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{RULE}">{LOOK}</head><body>{frames}</body></html>',
        encoding="utf-8",
    )
    assert BROWSER is not None
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-background-networking",
        "--proxy-server=127.0.0.1:9",
        "--enable-logging=stderr",
        "--window-size=1500,1000",
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
    )
    done = subprocess.run(
        [BROWSER, *options, around.as_uri()], capture_output=True, text=True, timeout=600, check=True
    )
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr
    found: list[dict[str, Any]] = json.loads(unescape(match[1]))
    return found, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


COMPARED = [*ROWS, row("a name that goes on and on until it needs a line", 0.02, 120 << 20, method="awq_v2")]
PAGES = {
    "report": lambda: render_page(manifest()),
    "report of experts": lambda: render_page(mixture()),
    "report without measures": lambda: render_page({**manifest(4), "validation": None}),
    "comparison": lambda: render_comparison(compare(COMPARED, Order.KL)),
    "bench": lambda: render_bench(bench()),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_and_asks_for_nothing(name: str, tmp_path: Path) -> None:
    found, console = opened(PAGES[name](), tmp_path)
    assert console == []
    assert [it["width"] for it in found] == list(WIDTHS)
    for it in found:
        assert it["needed"] <= it["width"], it
        assert it["clipped"] == []
        assert it["words"] > 200
        assert it["drawings"] > 0


def test_what_is_wrong_with_a_page_is_seen(tmp_path: Path) -> None:
    """The test above can fail: a picture from elsewhere, a script's error, a line that is too long, a cut label."""
    bad = (
        '<!DOCTYPE html><html><body><img src="http://example.org/a.png"><script>nothing()</script>'
        '<div style="width: 600px">wide</div>'
        '<svg viewBox="0 0 100 20" width="100"><text x="90" y="15">too long for it</text></svg></body></html>'
    )
    found, console = opened(bad, tmp_path)
    assert any("Content Security Policy" in line for line in console)
    assert any("nothing is not defined" in line for line in console)
    wide, narrow = found
    assert wide["needed"] <= wide["width"]
    assert narrow["needed"] > narrow["width"]
    assert wide["clipped"] == ["too long for it"]
