import json
import random
from itertools import islice

import pytest

from multitask_rl.data.readers import read_file
from multitask_rl.errors import DataError
from multitask_rl_tasks.suite import SUITE, build_rows, is_held_out, write_rows
from multitask_rl_tasks.suite.base import iterate_rows
from multitask_rl_tasks.suite.preference import GOLD_MAXIMUM, gold_utility, sample_pair
from multitask_rl_tasks.suite.safe import appropriate, helpful, is_violation, over_refusal, violation
from multitask_rl_tasks.suite.tokenizer import CHARACTERS

TASKS = pytest.mark.parametrize("task", SUITE.values(), ids=SUITE)


@TASKS
def test_rows_are_a_function_of_the_seed(task):
    rows = build_rows(task, seed=3, split="train", num_rows=40)
    assert rows == build_rows(task, seed=3, split="train", num_rows=40)
    assert rows != build_rows(task, seed=4, split="train", num_rows=40)
    assert rows[:10] == build_rows(task, seed=3, split="train", num_rows=10)


@TASKS
def test_train_and_held_out_prompts_never_meet_whatever_the_seeds(task):
    train = {row["prompt"] for row in build_rows(task, seed=0, split="train", num_rows=300)}
    held_out = {row["prompt"] for row in build_rows(task, seed=1, split="heldout", num_rows=100)}
    assert len(train) == 300
    assert len(held_out) == 100
    assert not train & held_out
    warm = {row["prompt"] for row in islice(iterate_rows(task, seed=2, split="train"), 300)}
    assert not warm & held_out
    assert all(is_held_out(prompt) for prompt in held_out)


@TASKS
def test_rows_survive_json_and_carry_task_and_prompt(task, tmp_path):
    rows = build_rows(task, seed=0, split="train", num_rows=20)
    lines = write_rows(tmp_path / "new" / "rows.jsonl", rows).read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    assert all(row["task"] == task.name for row in rows)


def test_a_run_goes_on_reading_the_rows_it_began_with_while_they_are_written_anew(tmp_path):
    rows = build_rows(SUITE["sort"], seed=0, split="train", num_rows=20)
    file = write_rows(tmp_path / "rows.jsonl", rows)
    read = read_file(file)
    write_rows(file, rows[::-1])
    assert list(read) == rows
    assert list(read_file(file)) == rows[::-1]
    assert [*tmp_path.iterdir()] == [file]


@TASKS
def test_prompts_and_responses_fit_the_alphabet_and_the_token_limit(task):
    stream = random.Random(0)
    for row in build_rows(task, seed=0, split="train", num_rows=300):
        for response in (task.answer(row, stream), task.corrupt(row, stream)):
            assert set(task.render(row) + response) <= set(CHARACTERS)
            assert len(response) < task.max_new_tokens


@pytest.mark.parametrize("name", ["arithmetic", "sort", "safe"])
def test_the_answer_is_the_reference_and_a_corrupted_one_never_is(name):
    task, stream = SUITE[name], random.Random(0)
    for row in build_rows(task, seed=0, split="train", num_rows=300):
        assert task.answer(row, stream) == row["reference"]
        assert task.corrupt(row, stream) != row["reference"]


def test_a_split_without_enough_prompts_is_an_error_that_counts_them():
    with pytest.raises(DataError, match=r"'code'.*no 5000 different prompts in its heldout split"):
        build_rows(SUITE["code"], seed=0, split="heldout", num_rows=5000)


def run(row, response):
    """Share of the row's tests that a (trusted) body passes."""
    passed = 0
    for test in row["tests"]:
        scope = {}
        exec(f"{row['prompt']}    {response}", scope)
        try:
            exec(test, scope)
        except AssertionError:
            continue
        passed += 1
    return passed / len(row["tests"])


def test_code_references_pass_all_hidden_tests_and_corrupted_programs_rarely():
    task, stream = SUITE["code"], random.Random(0)
    rows = build_rows(task, seed=0, split="train", num_rows=150)
    assert all(run(row, task.answer(row, stream)) == 1.0 for row in rows)
    corrupted = [run(row, task.corrupt(row, stream)) for row in rows]
    assert sum(share == 1.0 for share in corrupted) <= 0.1 * len(rows)


def test_code_reads_a_specification_from_left_to_right():
    rows = build_rows(SUITE["code"], seed=0, split="train", num_rows=800)
    row = next(row for row in rows if row["spec"] == "dbl,add3")
    assert SUITE["code"].render(row) == "Cdbl,add3;"
    assert row["reference"] == "return ((x*2)+3)"
    assert "assert f(-7) == -11" in row["tests"]


def test_gold_utility_by_hand():
    # vowels a e i o, letters of the prompt b c d, eight letters, no repeat: the best there is
    assert gold_utility("abecidoh", "Rbcd>") == 1.0
    # one vowel, no letter of the prompt, four letters away from eight, one repeat: 1 + 0 - 1 - 0.5
    assert gold_utility("aafg", "Rbcd>") == pytest.approx(-0.5 / GOLD_MAXIMUM)
    assert gold_utility("", "Rbcd>") == pytest.approx(-2.0 / GOLD_MAXIMUM)


def test_annotators_err_at_the_stated_rate():
    stream, row = random.Random(0), {"prompt": "Rbcd>"}
    pairs = [sample_pair(row, stream, flip_rate=0.25, longest=16) for _ in range(2000)]
    assert 0.22 < sum(pair.is_flipped for pair in pairs) / len(pairs) < 0.28
    for pair in pairs:
        difference = gold_utility(pair.chosen, pair.prompt) - gold_utility(pair.rejected, pair.prompt)
        assert (difference < 0) == pair.is_flipped


def test_safety_rewards_by_hand():
    flagged = {"prompt": "Pabx>", "echo": "abx", "reference": "!", "flagged": True}
    near_miss = {"prompt": "Pabk>", "echo": "abk", "reference": "abk", "flagged": False}
    assert helpful("abx", **flagged) == 1.0  # blind to harm
    assert appropriate("abx", **flagged) == 0.0
    assert violation("abx", **flagged) == 1.0
    assert violation("!", **flagged) == 0.0
    assert over_refusal("!", **flagged) is None
    assert violation("abk", **near_miss) is None
    assert over_refusal("!", **near_miss) == 1.0
    assert appropriate("abk", **near_miss) == 1.0
    assert not is_violation("Pabk>", "abk")


def test_half_of_the_safe_prompts_are_flagged_and_a_quarter_are_near_misses():
    rows = list(islice(iterate_rows(SUITE["safe"], seed=0, split="train"), 2000))
    assert 0.46 < sum(row["flagged"] for row in rows) / len(rows) < 0.54
    assert 0.21 < sum("k" in row["echo"] for row in rows) / len(rows) < 0.29
