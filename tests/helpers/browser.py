"""A headless browser for tests, where the machine has one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def browser_path() -> str:
    """Return the path of a browser; skip the test without a driver or a browser."""
    pytest.importorskip("playwright.sync_api", reason="needs playwright, of the dev group")
    browsers = [path for name in BROWSERS if (path := shutil.which(name))]
    if not browsers:
        pytest.skip(f"needs {' or '.join(BROWSERS)} on the PATH: install the system's package")
    return browsers[0]


@contextmanager
def browser_tab(path: str, *, width: int, height: int) -> Iterator[Any]:
    """Yield a tab of a headless browser."""
    from playwright.sync_api import sync_playwright

    # Chromium has no sandbox for root in a container.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser.new_page(viewport={"width": width, "height": height})
        browser.close()
