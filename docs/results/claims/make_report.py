"""Fill the tables of claims.md from the committed tables.

    python docs/results/claims/make_report.py [--check]

`--check` writes nothing and fails where the page is not what the tables give.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from claims import CLAIMS  # noqa: E402
from sections import SECTIONS  # noqa: E402
from tables import markdown  # noqa: E402

PAGE = HERE.parent / "claims.md"


def main() -> int:
    """Write or check the page; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where something would change")
    check: bool = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    filled = fill(page, "study", claims_table())
    for name, section in SECTIONS.items():
        filled = fill(filled, name, section())
    if filled == page:
        return 0
    print(f"{'stale' if check else 'written'}: docs/results/{PAGE.name}")
    if not check:
        PAGE.write_text(filled, encoding="utf-8")
    return int(check)


def claims_table() -> str:
    """A numbered row for each claim."""
    rows = []
    for position, claim in enumerate((claim() for claim in CLAIMS), 1):
        cells = [f"{claim.text} *{claim.source}*", f"`{claim.command}`", str(claim.n or "exact")]
        rows.append([str(position), *cells, claim.measured, f"**{claim.verdict}**"])
    return markdown(["", "Claim (whose)", "Tested by", "n", "Measured", "Verdict"], rows)


def fill(page: str, name: str, content: str) -> str:
    """The page with new content between the two marks of a name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    assert rest and after, f"{PAGE.name} lacks the marks {begin} and {end}"
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
