"""Batches, objective, optimizer, curriculum, trainer."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.training.batch import collate as collate
    from flatpeak.training.learner import Learner as Learner
    from flatpeak.training.objective import Objective as Objective
    from flatpeak.training.regularized import RegularizedLearner as RegularizedLearner
    from flatpeak.training.trainer import Trainer as Trainer

__getattr__ = lazy_names(
    __name__,
    {
        "Learner": "learner",
        "Objective": "objective",
        "RegularizedLearner": "regularized",
        "Trainer": "trainer",
        "collate": "batch",
    },
)
