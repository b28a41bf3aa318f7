"""A real headless Chromium, driven through Playwright: the system's, or the one that Playwright brought."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
READY = "html[data-ready=true]"  # all charts are drawn


def missing() -> str:
    """Why no browser can be opened here; empty where one can."""
    if importlib.util.find_spec("playwright") is None:
        return "no playwright: pip install playwright"
    if _system() or _own():
        return ""
    return "no Chromium: apt-get install chromium-headless-shell, or playwright install chromium"


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; as root it must do without its sandbox."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=_system() or None, args=options)
        try:
            yield browser
        finally:
            browser.close()


class Opened:
    """A page of ours, drawn whole. `errors`: what it said on the console; `asked`: all addresses it wanted."""

    def __init__(self, browser: Any, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = "dark" if dark else "light"
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.resolve().as_uri())
        self.page.wait_for_selector(READY, state="attached", timeout=60_000)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()


def _system() -> str:
    return next((found for name in NAMES if (found := shutil.which(name))), "")


def _own() -> bool:
    """Whether Playwright downloaded one, to where it does by default."""
    folder = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    return any(folder.glob("chromium*"))
