"""Draws the page of a training: docs/report_light.png (wide), report_dark.png (narrow), report_where.png (one panel).

Two ranks learn the digits on this machine, the batch is tuned, and the page of that run is opened in a headless
Chromium: some minutes. Needs `pip install -e '.[dev]'` and a Chromium.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers import browser  # noqa: E402 - it lies among the tests

KASOKU = [sys.executable, "-m", "kasoku"]
SHOTS = {"light": (1280, 900), "dark": (400, 900)}  # pixels of the window; the whole page is drawn


def training_page(run: Path) -> Path:
    """Trains, and returns the page of the run."""
    recipe = str(ROOT / "recipes" / "digits_cnn_98.toml")
    settings = ["--set", "device.kind=cpu", "--set", "evaluate.every=0.5"]
    train = ["launch", "local", recipe, "--gpus-per-node", "2", *settings]
    subprocess.run([*KASOKU, *train, "--out", str(run)], check=True)
    subprocess.run([*KASOKU, "tune", recipe, "--budget", "30", "--out", str(run)], check=True)
    subprocess.run([*KASOKU, "report", str(run)], check=True)
    return run / "report.html"


def main() -> None:
    """Makes the run, its page and the pictures; leaves the pictures alone."""
    why = browser.missing()
    if why:
        sys.exit(why)
    with tempfile.TemporaryDirectory() as folder, browser.chromium() as opened:
        page = training_page(Path(folder) / "digits")
        for theme, (width, height) in SHOTS.items():
            with browser.Opened(opened, page, width=width, height=height, dark=theme == "dark") as shown:
                shown.page.screenshot(path=ROOT / "docs" / f"report_{theme}.png", full_page=True)
                if theme == "light":
                    panel = shown.page.locator(".card", has_text="Where the time went").first
                    panel.screenshot(path=ROOT / "docs" / "report_where.png")


if __name__ == "__main__":
    main()
