import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from multitask_rl.errors import ConfigError, with_notes
from multitask_rl.records import Scored
from multitask_rl.step.flow import DataFlow, Stage, StreamingStage
from multitask_rl.testing import make_rollout


def double() -> Stage:
    return Stage("double", lambda n: n * 2, consumes=int, produces=int)


def show() -> Stage:
    return Stage("show", str, consumes=int, produces=str)


def test_records_pass_in_order_from_first_to_last_stage():
    assert DataFlow([double(), show()])([1, 2, 3]) == ["2", "4", "6"]


def test_a_type_mismatch_names_both_stages_and_both_types():
    with pytest.raises(ConfigError, match="'double' consumes int, but 'show' produces str"):
        DataFlow([show(), double()])


def test_an_inserted_stage_sees_every_record_and_the_others_are_untouched():
    flow = DataFlow([double(), show()])
    flow.insert(Stage("odd_out", lambda n: n if n > 2 else None, consumes=int, produces=int), after="double")
    assert flow([1, 2, 3]) == ["4", "6"]
    assert [s.name for s in flow.stages] == ["double", "odd_out", "show"]


def test_a_stage_with_two_successors_feeds_both_and_two_predecessors_join():
    flow = DataFlow()
    first, plus, minus, join = (
        Stage(n, f, consumes=int, produces=int)
        for n, f in (
            ("first", lambda n: n),
            ("plus", lambda n: n + 10),
            ("minus", lambda n: n - 10),
            ("join", lambda n: n * 2),
        )
    )
    flow.connect(first, plus).connect(first, minus).connect(plus, join).connect(minus, join)
    assert flow([1, 2]) == [22, 24, -18, -16]


def test_several_first_stages_all_get_the_records_and_join_in_order_of_connecting():
    p, q, y = (
        Stage(n, f, consumes=int, produces=int)
        for n, f in (("p", lambda n: n + 10), ("q", lambda n: -n), ("y", lambda n: n * 10))
    )
    flow = DataFlow().connect(p, y).connect(q, y)
    assert flow([1, 2]) == [110, 120, -10, -20]
    assert str(flow).splitlines() == ["p[int -> int] -> y", "y[int -> int] -> end", "q[int -> int] -> y"]
    with pytest.raises(ConfigError, match="without branches"):
        flow.stream([1])
    with pytest.raises(ConfigError, match="without branches can be split"):
        flow.split("y")
    flow.insert(Stage("later", lambda n: n + 1, consumes=int, produces=int), after="p")
    assert flow([1, 2]) == [120, 130, -10, -20], "in place of p, still before q"


def test_an_edge_twice_and_a_stage_that_does_not_exist_are_refused():
    flow = DataFlow([double(), show()])
    with pytest.raises(ConfigError, match="'double' is connected to 'show' already"):
        flow.connect("double", "show")
    with pytest.raises(ConfigError, match="no stage 'nope' in the flow; there are: double, show"):
        flow.split("nope")
    assert flow([1]) == ["2"]


def test_a_circle_is_refused_and_leaves_the_flow_as_it_was():
    a, b = (Stage(n, lambda x: x, consumes=int, produces=int) for n in "ab")
    flow = DataFlow().connect(a, b)
    with pytest.raises(ConfigError, match="circle"):
        flow.connect(b, a)
    assert flow([1]) == [1]


def test_workers_cut_the_records_and_keep_their_order():
    stage = Stage("slow", lambda n: n + 1, consumes=int, produces=int, num_workers=3)
    assert DataFlow([stage])(range(10)) == list(range(1, 11))


def test_a_flow_splits_into_two_that_make_the_whole():
    first, second = DataFlow([double(), show()]).split("show")
    assert first([1]) == [2]
    assert second([2]) == ["2"]
    nothing, whole = DataFlow([double(), show()]).split("double")
    assert nothing([1]) == [1]
    assert whole([1]) == ["2"]


def test_run_feeds_at_most_max_steps_batches():
    seen = []
    flow = DataFlow([Stage("see", lambda n: seen.append(n) or n)])
    assert flow.run(lambda step: [step], max_steps=3) == [2]
    assert seen == [0, 1, 2]
    assert flow.run([[7], [8]], max_steps=5) == [8]


def test_a_flow_runs_without_a_source_if_its_first_stage_makes_the_records(caplog):
    class Ones(Stage):
        name = "ones"

        def process(self, items):
            return [*items, 1]

    assert DataFlow([Ones(), Stage("next", lambda n: n + 1)]).run(max_steps=3) == [2]
    assert not caplog.text
    assert DataFlow([double()]).run(max_steps=3) == []
    assert "give run a source" in caplog.text


class Breaks(StreamingStage):
    def stream(self, parts):
        return ([n // 0 for n in part] for part in parts)


@pytest.mark.parametrize(
    "broken",
    [Stage("broken", lambda n: n // 0), Stage("broken", lambda n: n // 0, num_workers=2), Breaks("broken")],
)
def test_an_error_names_the_stage_in_which_it_happened(broken):
    flow = DataFlow([Stage("first", lambda n: n), broken, Breaks("later")])
    with pytest.raises(ZeroDivisionError) as caught:
        flow([1, 2, 3])
    assert with_notes(caught.value).endswith(", in the stage 'broken'")
    assert with_notes(caught.value).count("stage") == 1


def test_a_stage_needs_a_module_or_a_process():
    with pytest.raises(NotImplementedError, match="'idle' needs a module"):
        DataFlow([Stage("idle")])([1])


def test_the_graph_can_be_printed_and_drawn():
    flow = DataFlow([double(), show()])
    assert str(flow) == "double[int -> int] -> show[int -> str]"
    assert "double -- int --> show" in flow.to_mermaid()


@pytest.mark.parametrize("name", ["", "double"])
def test_a_stage_needs_a_name_of_its_own(name):
    with pytest.raises(ConfigError, match="name of its own"):
        DataFlow([double()]).add(Stage(name, str))


@dataclass
class Numbered:
    order: int


class Backwards(StreamingStage):
    """A stage whose records end in the opposite order, one by one."""

    name = "backwards"

    def stream(self, parts):
        for record in reversed([record for part in parts for record in part]):
            yield [record]

    def order(self, record):
        return record.order


def test_records_that_end_in_any_order_reach_other_stages_and_the_end_in_that_of_the_batch():
    seen = []
    watch = Stage("watch", lambda r: (seen.append(r.order), r)[1])
    records = [Numbered(i) for i in range(4)]
    assert DataFlow([Backwards(), watch])(records) == records
    assert seen == [0, 1, 2, 3]
    assert DataFlow([Backwards()])(records) == records
    parts = list(DataFlow([Stage("same", lambda r: r), Backwards()]).stream(records))
    assert [p[0].order for p in parts] == [3, 2, 1, 0], "what follows gets them as they end"


def test_records_that_end_at_once_go_on_in_the_order_of_the_batch():
    class AtOnce(Backwards):
        def stream(self, parts):
            yield [record for part in super().stream(parts) for record in part]

    class Keeps(StreamingStage):
        """A stage that takes its records in the order in which they come."""

        name = "keeps"
        yields_batches = True

        def stream(self, parts):
            return iter([[record for part in parts for record in part]])

    records = [Numbered(i) for i in range(4)]
    assert DataFlow([AtOnce(), Keeps()])(records) == records


def test_a_stage_that_orders_the_batch_itself_is_left_alone():
    class Reverse(Stage):
        name = "reverse"

        def process(self, items):
            return items[::-1]

    records = [Numbered(i) for i in range(3)]
    assert DataFlow([Backwards(), Reverse()])(records) == records[::-1]


def test_after_a_stage_that_yields_batches_each_is_processed_alone():
    class Pairs(StreamingStage):
        name = "pairs"
        yields_batches = True

        def stream(self, parts):
            records = [record for part in parts for record in part]
            yield records[:2]
            yield []
            yield records[2:]

    largest = Stage("largest", produces=int)
    largest.process = lambda items: [max(items)]
    flow = DataFlow([Pairs(), largest, double()])
    assert list(flow.stream([3, 1, 2, 4])) == [[6], [], [8]]
    assert flow([3, 1, 2, 4]) == [6, 8]


def test_the_stages_that_wait_for_all_say_when_they_worked():
    notes = []
    DataFlow([double(), show()])([1], note=lambda name, span: notes.append((name, span[0] <= span[1])))
    assert notes == [("double", True), ("show", True)]


def test_every_stage_is_closed_also_after_one_whose_close_fails():
    closed = []

    class Kept(Stage):
        def close(self):
            closed.append(self.name)
            if self.name == "first":
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        DataFlow([Kept("first"), Kept("second"), Kept("third")]).close()
    assert closed == ["first", "second", "third"]


def test_a_reward_that_a_stage_sets_becomes_a_float_or_an_error_that_names_the_stage() -> None:
    def of(value: Any) -> Any:
        flow = DataFlow([Stage("mine", lambda scored: replace(scored, reward=value))])
        return flow([Scored(rollout=make_rollout("a"), reward=0.5)])[0].reward

    for value in (torch.tensor(1.0), np.float32(1.0), 1):
        assert type(of(value)) is float
        assert of(value) == 1.0
    assert of(None) is None
    for value in (math.nan, "1.0", math.inf):
        with pytest.raises(ValueError, match=r"reward: expected a finite number") as caught:
            of(value)
        assert caught.value.__notes__ == ["in the stage 'mine'"]
