"""Photograph a run in TensorBoard and in trackio: `python docs/images/make_tracking_pictures.py [FOLDER]`.

Writes docs/images/tensorboard.png and docs/images/trackio.png. Without FOLDER the demo is run first, in a temporary
one, about three minutes on two cores; else FOLDER holds `runs` and `trackio` of such a demo. Needs Chromium or Chrome,
and `pip install 'flatpeak[tensorboard,trackio]'`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from make_report_picture import find_browser

IMAGES = Path(__file__).parent
WIDTH, HEIGHT = 1240, 1030
PROJECT = "sums"
LOADING = 60.0
"""Seconds that a server and its page may take."""
BIN = Path(sys.executable).parent


def main() -> None:
    """Run the demo unless a folder is given, and photograph both pages."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    if len(sys.argv) == 1:
        trackers = ("tracking.tensorboard={}", f"tracking.trackio.project={PROJECT}", "tracking.completions=8")
        subprocess.run(
            [sys.executable, "-m", "flatpeak", "demo", *trackers, f"run.directory={folder}/runs"], check=True
        )
    port = free_port()
    tensorboard = (str(BIN / "tensorboard"), "--logdir", str(folder / "runs"), "--port", str(port))
    tags = quote("^(reward/mean|policy/entropy|policy/grad_norm|groups/informative_fraction)$", safe="")
    page = f"http://localhost:{port}/?tagFilter={tags}&smoothing=0&forceSVG=true#timeseries"
    photograph(tensorboard, port, page, IMAGES / "tensorboard.png")
    port = free_port()
    show = f"import trackio; trackio.show({PROJECT!r}, open_browser=False, server_port={port}, block_thread=True)"
    photograph(
        (sys.executable, "-c", show), port, f"http://127.0.0.1:{port}/?project={PROJECT}", IMAGES / "trackio.png"
    )


def photograph(server: Sequence[str], port: int, page: str, picture: Path) -> None:
    """Start a server, and photograph its page once it answers."""
    process = subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    profile = tempfile.mkdtemp()
    try:
        wait_for(port)
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={profile}",
            f"--window-size={WIDTH},{HEIGHT}",
            "--virtual-time-budget=300000",
        )
        command = [find_browser(), *options, f"--screenshot={picture}", page]
        subprocess.run(command, check=True, capture_output=True, timeout=4 * LOADING)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(profile, ignore_errors=True)


def free_port() -> int:
    """A port that the system has free."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def wait_for(port: int) -> None:
    """Wait until something listens on the port."""
    deadline = time.monotonic() + LOADING
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


if __name__ == "__main__":
    main()
