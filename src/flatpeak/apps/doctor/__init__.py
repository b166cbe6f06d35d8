"""Checks of the machine and the installation: what works, what is missing, and the command that mends it."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.apps.doctor.checkup import examine as examine
    from flatpeak.apps.doctor.findings import Finding as Finding

__getattr__ = lazy_names(__name__, {"Finding": "findings", "examine": "checkup"})
