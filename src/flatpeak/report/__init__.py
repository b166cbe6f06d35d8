"""The report page, the run-summary table and `flatpeak explain`."""
