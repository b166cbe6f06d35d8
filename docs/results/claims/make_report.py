"""Fill the tables of claims.md from the committed tables.

    python docs/results/claims/make_report.py [--check]

`--check` writes nothing and fails where the page is not what the tables give.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from claims import CLAIMS  # noqa: E402
from pages import filled, markdown, parser, update  # noqa: E402
from sections import SECTIONS  # noqa: E402

PAGE = HERE.parent / "claims.md"


def main() -> int:
    """Write or check the page; the exit code."""
    check: bool = parser(__doc__).parse_args().check
    page = filled(PAGE.read_text(encoding="utf-8"), [claims_table()])
    for name, section in SECTIONS.items():
        page = filled(page, [section()], name=name)
    return update({PAGE: page}, check=check)


def claims_table() -> str:
    """A numbered row for each claim."""
    rows = []
    for position, claim in enumerate((claim() for claim in CLAIMS), 1):
        cells = [f"{claim.text} *{claim.source}*", f"`{claim.command}`", str(claim.n or "exact")]
        rows.append([str(position), *cells, claim.measured, f"**{claim.verdict}**"])
    return markdown(["", "Claim (whose)", "Tested by", "n", "Measured", "Verdict"], rows)


if __name__ == "__main__":
    sys.exit(main())
