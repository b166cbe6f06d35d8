"""Plans of runs: what a recipe will do, how much memory and disk it needs, and whether it fits, before it runs."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.apps.planning.run_plan import RunPlan as RunPlan
    from flatpeak.apps.planning.run_plan import plan_run as plan_run

__getattr__ = lazy_names(__name__, {"RunPlan": "run_plan", "plan_run": "run_plan"})
