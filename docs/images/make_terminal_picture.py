"""Photograph a command's terminal: `python docs/images/make_terminal_picture.py PICTURE.png COMMAND...`.

    python docs/images/make_terminal_picture.py docs/images/demo_real.png make --silent demo-real

runs for about ten minutes on two cores, once the installation is made. Needs `pip install pyte`, and Chromium or
Chrome, which draws the picture.
"""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from pathlib import Path

import pyte
from make_report_picture import WIDTH, photograph
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, LINES = 132, 60


def final_screen(command: list[str]) -> pyte.Screen:
    """The terminal after the command has ended, which is shown as it runs."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream, decoder = pyte.Stream(screen), codecs.getincrementaldecoder("utf-8")("replace")
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm-256color"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    while True:
        try:
            output = os.read(terminal, 65536)
        except OSError:  # Linux ends the output of a process that has ended with an error
            break
        if not output:
            break
        os.write(1, output)
        stream.feed(decoder.decode(output))
    os.waitpid(process, 0)
    return screen


def lines(screen: pyte.Screen, command: list[str]) -> list[Text]:
    """The prompt with the command, and the lines of the screen with their colors."""
    prompt = Text("$ " + " ".join(command), style="bold")
    shown = [Text() for _ in range(LINES)]
    for row, text in enumerate(shown):
        for column in range(COLUMNS):
            cell = screen.buffer[row][column]
            color = None if cell.fg == "default" else _color(cell.fg)
            text.append(cell.data, Style(color=color, bold=cell.bold))
        text.rstrip()
    while shown and not shown[-1].plain:
        shown.pop()
    return [prompt, *shown]


def _color(name: str) -> str:
    """Rich's name of a color that pyte names, or gives in hexadecimal digits."""
    return f"#{name}" if len(name) == 6 and set(name) <= set("0123456789abcdef") else name.replace("brown", "yellow")


def main() -> None:
    """Run the command and photograph its terminal."""
    picture, command = Path(sys.argv[1]), sys.argv[2:]
    shown = lines(final_screen(command), command)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for line in shown:
        console.print(line, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "terminal.html"
        drawing = console.export_svg(title="flatpeak")
        page.write_text(f"<style>body {{ margin: 0 }} svg {{ width: {WIDTH}px }}</style>{drawing}")
        width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', drawing).groups())
        photograph(page, picture, height=round(WIDTH * height / width))


if __name__ == "__main__":
    main()
