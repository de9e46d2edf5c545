"""Evaluations as a table."""

import math
from dataclasses import replace

from multitask_rl.statistics.evaluations import Evaluations
from multitask_rl.testing import make_evaluation


def test_failed_prompts_and_those_without_the_metric_have_a_column_each():
    evaluation = replace(make_evaluation([1.0, 0.0, math.nan, math.nan, math.nan]), num_failed=1)
    head, line = repr(Evaluations({"math": evaluation})).splitlines()
    assert head.split()[-3:] == ["n", "failed", "n/a"]
    assert line.split()[-3:] == ["2", "1", "2"]


def test_a_task_without_a_value_has_a_dash():
    _, line = repr(Evaluations({"math": make_evaluation([math.nan])})).splitlines()
    assert line.split()[2:5] == ["-", "-", "0"]


def test_evaluations_are_a_table_in_terminals_and_notebooks():
    harmless = replace(make_evaluation([1.0, 0.0], task="<b>"), metric="a&b")
    table = Evaluations({"<b>": harmless})
    _, line = str(table).splitlines()
    assert repr(table) == str(table)
    assert line.split() == ["<b>", "a&b", "0.5000", "0.9800", "2", "0", "0"]
    page = table._repr_html_()
    assert '<td style="text-align:left">&lt;b&gt;</td>' in page
    assert "a&amp;b" in page
    assert "<b>" not in page
    assert "step 0" in page
    assert len(repr(make_evaluation([0.5] * 256))) < 500  # not a number per prompt
