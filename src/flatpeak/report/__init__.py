"""The report page of a run, the run-summary table, and the explanation of a group of completions."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.report.page import write_report as write_report

__getattr__ = lazy_names(__name__, {"write_report": "page"})
