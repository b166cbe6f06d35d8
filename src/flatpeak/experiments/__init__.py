"""Experiments with many runs: sweeps and their table, statistics over seeds, the comparison of arms."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.experiments.comparison import Comparison as Comparison
    from flatpeak.experiments.comparison import compare as compare
    from flatpeak.experiments.comparison_report import write_comparison as write_comparison
    from flatpeak.experiments.config import SweepConfig as SweepConfig
    from flatpeak.experiments.config import read_sweep as read_sweep
    from flatpeak.experiments.mcnemar import McNemar as McNemar
    from flatpeak.experiments.mcnemar import mcnemar_exact as mcnemar_exact
    from flatpeak.experiments.mcnemar import power_of_mcnemar as power_of_mcnemar
    from flatpeak.experiments.mcnemar import seeds_needed_mcnemar as seeds_needed_mcnemar
    from flatpeak.experiments.statistics import Difference as Difference
    from flatpeak.experiments.statistics import Equivalence as Equivalence
    from flatpeak.experiments.statistics import MeanEstimate as MeanEstimate
    from flatpeak.experiments.statistics import Slope as Slope
    from flatpeak.experiments.statistics import holm as holm
    from flatpeak.experiments.statistics import mean_over_seeds as mean_over_seeds
    from flatpeak.experiments.statistics import paired_bca as paired_bca
    from flatpeak.experiments.statistics import paired_t as paired_t
    from flatpeak.experiments.statistics import power_of_paired_t as power_of_paired_t
    from flatpeak.experiments.statistics import seeds_needed as seeds_needed
    from flatpeak.experiments.statistics import slope as slope
    from flatpeak.experiments.statistics import tost as tost
    from flatpeak.experiments.statistics import welch as welch
    from flatpeak.experiments.sweep import SweepResult as SweepResult
    from flatpeak.experiments.sweep import run_sweep as run_sweep
    from flatpeak.experiments.table import SweepTable as SweepTable
    from flatpeak.experiments.table import read_table as read_table
    from flatpeak.experiments.table import write_table as write_table

_HOMES = {
    "comparison": ("Comparison", "compare"),
    "comparison_report": ("write_comparison",),
    "config": ("SweepConfig", "read_sweep"),
    "mcnemar": ("McNemar", "mcnemar_exact", "power_of_mcnemar", "seeds_needed_mcnemar"),
    "statistics": (
        *("Difference", "Equivalence", "MeanEstimate", "Slope"),
        *("holm", "mean_over_seeds", "paired_bca", "paired_t", "power_of_paired_t", "seeds_needed", "slope"),
        *("tost", "welch"),
    ),
    "sweep": ("SweepResult", "run_sweep"),
    "table": ("SweepTable", "read_table", "write_table"),
}
__getattr__ = lazy_names(__name__, {name: module for module, names in _HOMES.items() for name in names})
