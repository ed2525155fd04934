"""Pictures of pages for the guides. scripts/make_web_screenshots requests them."""

from __future__ import annotations

import os
from pathlib import Path

from support.browser import Page


def draw(page: Page, name: str) -> None:
    """Draw a page, narrow and dark, and wide and light, in the directory of HIL_WEB_SCREENSHOTS."""
    if not (folder := os.environ.get("HIL_WEB_SCREENSHOTS")):
        return
    for suffix, theme, size in (("-narrow", "dark", (390, 844)), ("", "light", (1280, 900))):
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        page.resize(*size)
        page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 300))))")
        page.screenshot(Path(folder) / f"web-{name}{suffix}.png")
