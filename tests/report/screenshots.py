"""Make the screenshots of ``docs/reading_a_report.md`` from the page of a run on public data.

python -m tests.report.screenshots runs/gpt-nano-stdlib-1/report.html
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.report.browser import open_browser

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SIZES = {"report_desktop.png": (1280, 1360), "report_phone.png": (390, 1500)}
"""Width and height of each picture."""


def take_screenshots(page: Path, folder: Path = IMAGES) -> None:
    """Write the top of the page, as a wide screen and as a phone show it."""
    folder.mkdir(exist_ok=True)
    with open_browser() as browser:
        for name, (width, height) in SIZES.items():
            (folder / name).write_bytes(browser.open(page, width=width).screenshot(height=height))


if __name__ == "__main__":
    take_screenshots(Path(sys.argv[1]))
