"""A synthetic multi-task suite small enough for two CPU cores, and real in every part.

Five families of prompts over one character alphabet, told apart by their first letter:

=============  ===================  ====================================  ============================
task           prompt -> response   what judges it                        role
=============  ===================  ====================================  ============================
`arithmetic`   ``A37+58=`` ``59``   exact match (digits reversed)         fast learner
`sort`         ``S40417>`` ``01447``  exact match                         slow, most groups all-wrong
`code`         ``Cdbl,add3;`` a     hidden asserts in the sandbox,        long answers
               function's body      CodeBLEU against the reference
`preference`   ``Rgab>`` letters    a reward model fitted on noisy pairs  no right answer, can be hacked
`safe`         ``Pabxd>`` the echo  a safety classifier, a helpfulness    conflict of help and harm
               or ``!``             reward that is blind to harm
=============  ===================  ====================================  ============================

Rows are a pure function of (seed, task, split, number); held-out prompts never occur in training data,
whatever the seeds. Actors are warm-started on answers of which a known share is corrupted, so every task
starts at a chosen level with the format known (``warm_start.py``); reward model and classifier are trained,
not coded (``judges.py``). Nothing here is imported by the core package.
"""

from __future__ import annotations

from multitask_rl_tasks.suite.arithmetic import Arithmetic
from multitask_rl_tasks.suite.base import SuiteTask, build_rows, is_held_out, write_rows
from multitask_rl_tasks.suite.preference import Preference
from multitask_rl_tasks.suite.programs import Code
from multitask_rl_tasks.suite.safe import Safe
from multitask_rl_tasks.suite.sort import Sort

__all__ = [
    "SUITE",
    "Arithmetic",
    "Code",
    "Preference",
    "Safe",
    "Sort",
    "SuiteTask",
    "build_rows",
    "is_held_out",
    "write_rows",
]

SUITE: dict[str, SuiteTask] = {
    task.name: task for task in (Arithmetic(), Sort(), Code(), Preference(), Safe())
}
"""Every task of the suite by name."""
