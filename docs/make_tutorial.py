"""Make docs/tutorial.ipynb from docs/tutorial.md: `python docs/make_tutorial.py`.

`python docs/make_tutorial.py --run MODEL` first runs the page's Python, two minutes on a CPU, and renews the output and
the picture that stand below it. MODEL is the GGUF file of `make demo-real`, or another SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "tutorial.md"
NOTEBOOK = DOCS / "tutorial.ipynb"
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model that the page names; `--run` and the tests replace it."""
INSTALL = """\
# Installs flatpeak where it is missing. In a cloud notebook, first clone its repository, and name that folder here.
import importlib.util

CHECKOUT = ".."
if importlib.util.find_spec("flatpeak") is None:
    %pip install -q "torch>=2.11,<2.14"
    %pip install -q {CHECKOUT}"""
"""The first cell of the notebook. `-e` would need a restart of the kernel."""

_BLOCK = re.compile(
    r"^```(?P<language>python|sh)\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?"
    r"(?:\n!\[[^\]]*\]\((?P<picture>[^)]+)\)\n)?",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Python or a command of the page, with what stands directly below it."""

    language: str
    code: str
    output: str | None
    picture: str | None
    chapter: int
    span: tuple[int, int]
    """Where the block, its output and its picture stand in the page."""


def read_blocks(page: str) -> list[Block]:
    """The blocks of a page in order: Python, and commands with output."""
    found = [match for match in _BLOCK.finditer(page) if match["language"] == "python" or match["output"]]
    return [
        Block(
            language=match["language"],
            code=match["code"].rstrip("\n"),
            output=match["output"],
            picture=match["picture"],
            chapter=page.count("\n## ", 0, match.start()),
            span=match.span(),
        )
        for match in found
    ]


def run_block(block: Block, names: dict[str, Any], *, model: str) -> str:
    """What a block prints. Python runs in `names`; runs go to the working directory."""
    if block.language == "sh":
        environment = {**os.environ, "COLUMNS": "100"}
        command = block.code.replace("flatpeak", f"{sys.executable} -m flatpeak", 1)
        return subprocess.run(command, shell=True, check=True, capture_output=True, text=True, env=environment).stdout
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block.code.replace(HUB_MODEL, model), names)
    return printed.getvalue()


def renew(page: str, model: str) -> str:
    """The page with the output of a new run; its pictures are saved."""
    import matplotlib

    matplotlib.use("agg")
    parts, end, names = [], 0, {}
    for block in read_blocks(page):
        printed = run_block(block, names, model=model)
        parts.append(page[end : block.span[0]])
        parts.append(f"```{block.language}\n{block.code}\n```\n")
        if printed:
            lines = "\n".join(line.rstrip() for line in printed.rstrip().splitlines())
            parts.append(f"\n```text\n{lines}\n```\n")
        if block.picture:
            alternative = page[: block.span[1]].rpartition("![")[2].partition("]")[0]
            parts.append(f"\n![{alternative}]({block.picture})\n")
            names["figure"].savefig(DOCS / block.picture, dpi=100)
        end = block.span[1]
    return "".join([*parts, page[end:]])


def notebook(page: str) -> dict[str, Any]:
    """The notebook of a page: its Python as cells with their output, all else as Markdown."""
    cells = [_code_cell(INSTALL, [])]
    end = 0
    for block in read_blocks(page):
        if block.language == "python":
            cells += _markdown_cells(page[end : block.span[0]])
            cells.append(_code_cell(block.code, _outputs(block)))
            end = block.span[1]
    cells += _markdown_cells(page[end:])
    numbered = [{"id": f"cell-{index}", **cell} for index, cell in enumerate(cells)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": numbered, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _outputs(block: Block) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    if block.output is not None:
        outputs.append({"name": "stdout", "output_type": "stream", "text": block.output.splitlines(keepends=True)})
    if block.picture is not None:
        picture = base64.b64encode((DOCS / block.picture).read_bytes()).decode()
        outputs.append({"data": {"image/png": picture}, "metadata": {}, "output_type": "display_data"})
    return outputs


def _code_cell(code: str, outputs: list[dict[str, Any]]) -> dict[str, Any]:
    source = code.splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": outputs, "source": source}


def _markdown_cells(text: str) -> list[dict[str, Any]]:
    if not text.strip():
        return []
    return [{"cell_type": "markdown", "metadata": {}, "source": text.strip().splitlines(keepends=True)}]


def main() -> None:
    """Renew the page if asked to, and write the notebook."""
    page = PAGE.read_text(encoding="utf-8")
    if sys.argv[1:2] == ["--run"]:
        model = str(Path(sys.argv[2]).absolute()) if Path(sys.argv[2]).exists() else sys.argv[2]
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            page = renew(page, model)
        PAGE.write_text(page, encoding="utf-8")
    written = json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"
    NOTEBOOK.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
