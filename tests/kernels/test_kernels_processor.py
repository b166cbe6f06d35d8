from __future__ import annotations

from pathlib import Path

import pytest

from flatpeak.kernels.processor import fields, kind, vendor

CPUINFO = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: 6\n\nprocessor\t: 1\nvendor_id\t: other\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CPUINFO.format("GenuineIntel"), "GenuineIntel"),
        (CPUINFO.format("AuthenticAMD"), "AuthenticAMD"),
        ("processor : 0\nCPU implementer : 0x41\n", ""),
        (None, ""),
    ],
)
def test_vendor_and_kind_are_the_first_processors(
    text: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, **how: opened(file if path.name == "cpuinfo" else path, **how))
    fields.cache_clear()
    assert (vendor(), kind()[:2]) == (expected, [expected, "6" if expected else ""])
    fields.cache_clear()
