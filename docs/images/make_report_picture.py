"""Photograph the report of a run: `python docs/images/make_report_picture.py [RUN]` writes docs/images/report.png.

Without RUN it trains the demo first, about three minutes on two cores. Needs Chromium or Chrome, which opens the page
without a window.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PICTURE = Path(__file__).with_name("report.png")
WIDTH, HEIGHT = 1240, 1160
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str:
    """The first browser that is installed."""
    for name in BROWSERS:
        path = shutil.which(name)
        if path is not None:
            return path
    sys.exit(f"no browser: install one of {', '.join(BROWSERS)}")


def photograph(page: Path, picture: Path, *, height: int = HEIGHT) -> None:
    """The top of the page as a PNG of WIDTH x height pixels."""
    options = ("--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{height}")
    command = [find_browser(), *options, f"--screenshot={picture}", page.resolve().as_uri()]
    subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Train the demo unless a run is given, and photograph its report."""
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/demo")
    if len(sys.argv) == 1:
        subprocess.run([sys.executable, "-m", "flatpeak", "demo"], check=True)
    photograph(run / "report.html", PICTURE)


if __name__ == "__main__":
    main()
