"""Evaluations as a table."""

import math
from dataclasses import replace

from multitask_rl.cli.train import print_evaluations
from multitask_rl.testing import make_evaluation


def test_failed_prompts_and_those_without_the_metric_have_a_column_each(capsys):
    evaluation = replace(make_evaluation([1.0, 0.0, math.nan, math.nan, math.nan]), num_failed=1)
    print_evaluations({"math": evaluation})
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == ["n", "failed", "n/a"]
    assert line.split()[-3:] == ["2", "1", "2"]
