"""The tasks file: what loads, and what each mistake is told."""

import pickle
from datetime import date
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from multitask_rl.config.run import RolloutConfig
from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.config.tasks_file import fill_weights, load_tasks, need_datasets, parse_tasks
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.errors import ConfigError, DataError, PluginError
from multitask_rl.records import SamplingParams

REFERENCE = Path(__file__).parents[3] / "configs" / "reference_tasks.yaml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tasks.yaml"
    path.write_text(dedent(text), encoding="utf-8")
    return path


def refusal(tmp_path: Path, text: str, overrides: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_tasks(write(tmp_path, text), overrides)
    return str(caught.value)


def test_a_date_is_a_date_whatever_other_libraries_make_of_their_own(tmp_path: Path, monkeypatch) -> None:
    timestamp = "tag:yaml.org,2002:timestamp"
    monkeypatch.setitem(yaml.SafeLoader.yaml_constructors, timestamp, yaml.SafeLoader.construct_yaml_str)
    assert yaml.safe_load("2020-01-01") == "2020-01-01"
    assert load_yaml(write(tmp_path, "since: 2020-01-01"))[0] == {"since": date(2020, 1, 1)}


def test_reference_file_loads_as_written() -> None:
    tasks = load_tasks(REFERENCE)
    assert list(tasks) == ["preference_alignment", "code_generation", "fact_checking"]
    assert [t.type for t in tasks.values()] == ["ppo", "reward_conditioned", "constrained_decoding"]
    reward = tasks["preference_alignment"].rewards[0]
    assert (reward.plugin, reward.name, reward.weight) == ("rm_hf", "rm_hf", 1.0)
    assert reward.config == {"model_name": "openbmb/MiniRM-27B", "device": "cuda:4"}
    assert reward.device == "cuda:4"
    assert tasks["code_generation"].rewards[0].config == {"evaluator": "codebleu", "timeout": 10}
    constraint = tasks["fact_checking"].constraints[0]
    assert (constraint.plugin, constraint.mode) == ("fact_checker", "reject")
    assert constraint.config["max_new_tokens"] == 128
    assert tasks["code_generation"].source.endswith("reference_tasks.yaml:8")


def test_every_key_of_a_task_is_read(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("{}\n")
    (tmp_path / "graders.py").write_text("def brevity(response, **row):\n    return 1.0\n")
    path = write(
        tmp_path,
        """
        tasks:
          math:
            type: grpo
            dataset: d.jsonl
            split: train
            eval_dataset: d.jsonl
            prompt: "Q: {prompt}"
            weight: 2
            min_share: 0.1
            loss_weight: 0.5
            group_size: 4
            sampling: {temperature: 0.7, stop: ["\\n"]}
            kl: {coefficient: 1e-3, placement: loss}
            device: cpu
            rewards:
              - math_answer
              - {plugin: "graders.py:brevity", weight: 0}
            constraints:
              - {plugin: safety_classifier, mode: lagrangian, limit: 0.1}
            algorithm_config: {clip_high: 0.28}
            primary_metric: math_answer
            higher_is_better: true
        """,
    )
    task = load_tasks(path)["math"]
    assert task.dataset == str((tmp_path / "d.jsonl").resolve())
    assert [r.name for r in task.rewards] == ["math_answer", "brevity"]
    assert task.rewards[1].plugin == f"{(tmp_path / 'graders.py').resolve()}:brevity"
    assert task.rewards[0].device == "cpu"
    assert task.kl.coefficient == 1e-3
    assert isinstance(task.weight, float)
    default = SamplingParams(max_new_tokens=99, temperature=1.0)
    assert task.sampling_params(default) == SamplingParams(max_new_tokens=99, temperature=0.7, stop=("\n",))
    need_datasets({"math": task})


@pytest.mark.parametrize("prefix", ["", "trl:", "verl:"])
def test_a_file_of_rewards_is_looked_for_beside_the_tasks_file(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "beside.py").write_text("def f(solution_str): ...\n")
    task = load_tasks(write(tmp_path, f"tasks: {{m: {{rewards: ['{prefix}beside.py:f']}}}}"))["m"]
    assert task.rewards[0].plugin == f"{prefix}{tmp_path.resolve() / 'beside.py'}:f"


def test_a_module_of_the_working_directory_has_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a console script does not have the working directory."""
    (tmp_path / "rewards_of_mine.py").write_text("def f(response): ...\n")
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "tasks: {m: {rewards: ['rewards_of_mine:f']}}")
    assert load_tasks(path)["m"].rewards[0].plugin == "rewards_of_mine:f"
    (tmp_path / "rewards_of_mine.py").unlink()
    with pytest.raises(ConfigError, match="no module 'rewards_of_mine'"):
        load_tasks(path)


def test_a_file_of_an_algorithm_or_a_task_is_looked_for_beside_the_tasks_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        dedent(
            """
            from multitask_rl.algorithms.grpo import GRPO as Mine


            class Sums:
                def settings(self):
                    return {"rewards": ["exact_match"]}

                def rows(self, split):
                    return [{"prompt": "1+1=", "reference": "2"}] * 3 if split == "train" else []
            """
        )
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    given = "{type: own.py:Mine, dataset: 'plugin:own.py:Sums', eval_dataset: 'plugin:own.py:Sums'}"
    task = load_tasks(write(tmp_path, f"tasks: {{sums: {given}}}"))["sums"]
    own = tmp_path.resolve() / "own.py"
    assert (task.type, task.dataset) == (f"{own}:Mine", f"plugin:{own}:Sums")
    assert task.eval_dataset == task.dataset


def test_a_task_plugin_of_no_file_is_told_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, "tasks:\n  sums: {dataset: 'plugin:gone.py:Sums'}\n")
    with pytest.raises(PluginError, match=r"tasks\.yaml:2: tasks\.sums\.dataset: the plugin file .*gone"):
        load_tasks(path)


def test_list_form_and_mapping_form_give_the_same_tasks() -> None:
    body = {"rewards": ["math_answer"], "weight": 1.0}
    listed = parse_tasks({"tasks": [{"name": "a", **body}]})
    mapped = parse_tasks({"tasks": {"a": body}})
    listed["a"].source = mapped["a"].source = ""
    assert listed == mapped


def test_overrides_merge_into_the_file_and_can_add_a_task(tmp_path: Path) -> None:
    path = write(tmp_path, "tasks: {a: {reward_model: code_evaluator, reward_config: {timeout: 10}}}")
    tasks = load_tasks(
        path, {"a": {"weight": 2, "reward_config": {"tests": 1}}, "b": {"rewards": ["math_answer"]}}
    )
    assert tasks["a"].weight == 2.0
    assert tasks["a"].rewards[0].config == {"timeout": 10, "tests": 1}
    assert list(tasks) == ["a", "b"]


OK = "rewards: [math_answer]"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "tasks:\n  m:\n    wieght: 1\n",
            ["tasks.yaml:3", "tasks.m.wieght", "did you mean 'weight'", "sampling"],
        ),
        (
            f"tasks:\n  m:\n    weight: heavy\n    {OK}\n",
            ["tasks.yaml:3", "tasks.m.weight", "a number", "'heavy'"],
        ),
        (f"tasks:\n  m:\n    weight: true\n    {OK}\n", ["tasks.yaml:3", "a number", "True"]),
        (f"tasks:\n  m:\n    weight: -1\n    {OK}\n", ["tasks.yaml:3", "tasks.m.weight", ">= 0", "-1"]),
        (f"tasks:\n  m:\n    weight: .nan\n    {OK}\n", ["tasks.yaml:3", "tasks.m.weight", "finite"]),
        (f"tasks: {{a: {{weight: 0, {OK}}}, b: {{weight: 0, {OK}}}}}", ["a, b", "all 0"]),
        (f"tasks:\n  m: {{{OK}}}\n  m: {{{OK}}}\n", ["tasks.yaml:3", "'m'", "twice", "line 2"]),
        (f"tasks:\n  - {{name: m, {OK}}}\n  - {{name: m, {OK}}}\n", ["tasks.yaml:3", "twice", ":2"]),
        (f"tasks:\n  worst: {{{OK}}}\n", ["tasks.yaml:2", "'worst'", "reserved", "macro"]),
        (f"tasks:\n  a.b: {{{OK}}}\n", ["tasks.yaml:2", "'a.b'", "letters"]),
        (f"tasks:\n  1: {{{OK}}}\n", ["tasks.yaml:2", "must be text", "quotes"]),
        (f"tasks:\n  - {{{OK}}}\n", ["tasks.yaml:2", "'name'"]),
        (f"tasks:\n  m:\n    type: grpoo\n    {OK}\n", ["tasks.yaml:3", "tasks.m.type", "'grpo'", "ppo"]),
        (
            "tasks:\n  m:\n    rewards:\n      - math_anwser\n",
            ["tasks.yaml:4", "rewards[0]", "'math_answer'", "rm_hf"],
        ),
        (
            f"tasks:\n  m:\n    chat_template_kwargs:\n      tokenize: true\n    {OK}\n",
            ["tasks.yaml:4", "chat_template_kwargs.tokenize", "enable_thinking"],
        ),
        (
            "tasks:\n  m:\n    environment: number_game\n    tools_column: tools\n",
            ["tasks.yaml:4", "tools_column", "tools of the environment"],
        ),
        (
            "tasks:\n  m:\n    environment: number_game\n    rewards:\n"
            "      - {plugin: environment, range: [0, 1], config: {unfinished: -1}}\n",
            ["tasks.yaml:5", "rewards[0].config.unfinished", "-1 is outside the range [0, 1]"],
        ),
        ("tasks:\n  m:\n    reward_model: nope\n", ["tasks.yaml:3", "'nope'", "installed"]),
        (
            "tasks:\n  m:\n    constraint_model: fact_cheker\n",
            ["tasks.yaml:3", "constraint", "'fact_checker'"],
        ),
        ("tasks:\n  m:\n    rewards: ['no_such_package.x:f']\n", ["tasks.yaml:3", "no module", "prefixes"]),
        ("tasks:\n  m:\n    rewards: ['absent.py:f']\n", ["tasks.yaml:3", "does not exist", "absent.py"]),
        ("tasks:\n  m:\n    rewards: ['trl:absent.py:f']\n", ["tasks.yaml:3", "does not exist", "absent.py"]),
        ("tasks:\n  m:\n    rewards: ['verl:absent.m:f']\n", ["tasks.yaml:3", "no module 'absent.m'"]),
        ("tasks:\n  m:\n    rewards: ['trl:f']\n", ["tasks.yaml:3", "'trl:f'", "'trl:file.py:function'"]),
        (
            "tasks:\n  m:\n    constraints:\n      - {plugin: fact_checker,\n         mode: rejct}\n",
            ["tasks.yaml:5", "constraints[0].mode", "'reject'", "lagrangian"],
        ),
        (
            "tasks:\n  m:\n    rewards: [f1]\n    constraints:\n"
            "      - {plugin: fact_checker, mode: lagrangian, limit: 0.1,\n"
            "         multiplier: {setpoint: 2.0}}\n",
            ["tasks.yaml:6", "constraints[0].multiplier", "setpoint must be in (0, 1], got 2.0"],
        ),
        (
            "tasks:\n  m:\n    rewards: [f1]\n    constraints:\n"
            "      - {plugin: fact_checker, mode: penalty, multiplier: {integral: 0.1}}\n",
            ["tasks.yaml:5", "constraints[0].multiplier", "'penalty' has no multiplier"],
        ),
        (
            f"tasks:\n  m:\n    {OK}\n    dataset: gone.jsonl\n",
            ["tasks.yaml:4", "gone.jsonl", "does not exist"],
        ),
        (
            f"tasks:\n  m:\n    {OK}\n    dataset: data/sum.jsonl\n",
            ["tasks.yaml:4", "data/sum.jsonl' does not exist", "did you mean 'sums.jsonl'"],
        ),
        (f"tasks:\n  m:\n    {OK}\n    dataset: {'x' * 300}.jsonl\n", ["tasks.yaml:4", "File name too long"]),
        (f"tasks:\n  m:\n    {OK}\n    dataset: a b c\n", ["tasks.yaml:4", "Hugging Face id"]),
        (f"tasks:\n  m:\n    {OK}\n    dataset: plugin:nope\n", ["tasks.yaml:4", "unknown task 'nope'"]),
        ("tasks:\n  m:\n    type: grpo\n", ["tasks.yaml:2", "neither rewards nor constraints"]),
        ("tasks:\n  m:\n    reward_config: {a: 1}\n", ["tasks.yaml:3", "'reward_model'"]),
        (
            f"tasks:\n  m:\n    {OK}\n    reward_model: math_answer\n",
            ["tasks.yaml:4", "short form", "one of them"],
        ),
        ("tasks:\n  m:\n    rewards: [math_answer, math_answer]\n", ["rewards[1]", "taken", "'name'"]),
        ("tasks:\n  m:\n    rewards: math_answer\n", ["tasks.yaml:3", "a list of plugins"]),
        (f"tasks:\n  m:\n    {OK}\n    kl: {{placement: lss}}\n", ["tasks.yaml:4", "kl.placement", "'loss'"]),
        (f"tasks:\n  m:\n    {OK}\n    sampling: {{temprature: 1}}\n", ["tasks.yaml:4", "'temperature'"]),
        (f"tasks:\n  m:\n    {OK}\n    sampling: {{top_p: 2}}\n", ["tasks.yaml:4", "in (0, 1], got 2"]),
        (f"tasks:\n  m:\n    {OK}\n    sampling: {{top_p: 0}}\n", ["tasks.yaml:4", "in (0, 1], got 0"]),
        (
            f"tasks:\n  m:\n    {OK}\n    sampling: {{temperature: 0}}\n",
            ["tasks.yaml:4", "must be > 0 for a task that is trained", "eval.temperature=0"],
        ),
        (f"tasks:\n  m:\n    {OK}\n    primary_metric: math\n", ["tasks.yaml:4", "math_answer", "reward"]),
        (f"tasks: {{a: {{min_share: 0.6, {OK}}}, b: {{min_share: 0.6, {OK}}}}}", ["min_share", "1.2"]),
        (f"tasks: {{a: {{renamed_from: b, {OK}}}, b: {{{OK}}}}}", ["tasks.a.renamed_from", "'b'"]),
        (
            f"tasks: {{a: {{renamed_from: c, {OK}}}, b: {{renamed_from: c, {OK}}}}}",
            ["tasks.b.renamed", "'a'"],
        ),
        ("task:\n  m: {}\n", ["tasks.yaml:1", "'task'", "did you mean 'tasks'"]),
        ("tasks: []\n", ["tasks.yaml:1", "a list of tasks"]),
        ("tasks: {m: 3}\n", ["tasks.yaml:1", "tasks.m", "3"]),
        ("- a\n", ["expected a mapping"]),
        ("", ["tasks.yaml", "empty"]),
        ("tasks:\n  m: {rewards: [a\n  b: c\n", ["tasks.yaml:3:4", "not valid YAML"]),
        ("tasks:\n\tm: 1\n", ["tasks.yaml:2:1", "not valid YAML"]),
        ("tasks: &x\n  m: *x\n", ["alias"]),
        ("tasks: !!python/object:os.system {}\n", ["tasks.yaml:1", "not valid YAML"]),
    ],
)
def test_mistake_is_told_with_place_and_remedy(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sums.jsonl").touch()
    message = refusal(tmp_path, text)
    assert [part for part in parts if part not in message] == [], message
    assert "\n" not in message.split("not valid YAML")[0]


def test_only_a_task_that_is_never_trained_may_be_greedy(tmp_path: Path) -> None:
    text = f"tasks: {{m: {{{OK}}}, n: {{{OK}, evaluation_only: true, sampling: {{temperature: 0}}}}}}"
    assert load_tasks(write(tmp_path, text))["n"].sampling.temperature == 0.0


@pytest.mark.parametrize("given", [{"top_p": 0.0}, {"top_p": -1.0}, {"top_p": 1.5}, {"top_k": -1}])
def test_a_run_that_would_keep_no_token_or_more_than_all_is_refused(given: dict[str, float]) -> None:
    (key,) = given
    with pytest.raises(ConfigError, match=rf"RolloutConfig\.{key} must be"):
        RolloutConfig(**given)


def test_mistake_of_an_override_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    text = f"tasks: {{math: {{{OK}}}}}"
    assert "override: tasks.math.weight" in refusal(tmp_path, text, {"math": {"weight": -2}})
    assert "did you mean 'math'" in refusal(tmp_path, text, {"mth": {"weight": 2}})


def test_missing_file_and_undecodable_file_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml' does not exist; give"):
        load_tasks(tmp_path / "absent.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"\xff\xfe\x00tasks")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_tasks(bad)


def test_data_set_is_demanded_only_when_a_run_is_about_to_start() -> None:
    tasks = load_tasks(REFERENCE)
    with pytest.raises(ConfigError, match="has no data set"):
        need_datasets(tasks)


def test_a_missing_weight_in_a_tasks_file_is_one(tmp_path: Path) -> None:
    path = write(tmp_path, f"tasks: {{a: {{weight: 2, {OK}}}, b: {{{OK}}}, c: {{{OK}}}}}")
    specs = load_tasks(path)
    scheduler = DynamicTaskWeightScheduler(
        {name: spec.weight for name, spec in specs.items()}, policy="static"
    )
    scheduler.bind(list(specs))
    assert scheduler.weights() == pytest.approx({"a": 0.5, "b": 0.25, "c": 0.25})


def test_missing_weight_is_the_mean_of_those_given() -> None:
    assert fill_weights(["a", "b", "c"], {"a": 1.0, "b": 3.0}) == pytest.approx(
        {"a": 1 / 6, "b": 0.5, "c": 1 / 3}
    )
    assert fill_weights(["a", "b"], {}) == {"a": 0.5, "b": 0.5}
    with pytest.raises(ConfigError, match="did you mean 'math'"):
        fill_weights(["math"], {"mth": 1.0})
    with pytest.raises(ConfigError, match="all 0"):
        fill_weights(["a"], {"a": 0.0})
    with pytest.raises(ConfigError, match="finite"):
        fill_weights(["a"], {"a": float("nan")})


@pytest.mark.parametrize(
    ("keys", "metric"),
    [
        ({}, "math_answer"),
        ({"rewards": ["exact_match"]}, "reward"),
        ({"rewards": [{"plugin": "exact_match", "name": "em"}], "primary_metric": "em"}, "em"),
        ({"rewards": ["exact_match", {"plugin": "math_answer", "weight": 0}]}, "math_answer"),
        ({"rewards": [{"plugin": "exact_match", "name": "math_answer"}]}, "math_answer"),
        ({"reward_model": "exact_match"}, "reward"),
    ],
)
def test_a_task_plugins_primary_metric_goes_with_its_rewards(keys: dict[str, Any], metric: str) -> None:
    task = parse_tasks({"tasks": {"t": {"dataset": "plugin:math_easy", **keys}}})["t"]
    assert task.primary_metric == metric


def test_a_primary_metric_that_is_none_of_the_rewards_is_refused_for_task_plugins_too() -> None:
    task = {"dataset": "plugin:math_easy", "rewards": ["exact_match"], "primary_metric": "math_answer"}
    with pytest.raises(ConfigError, match="primary_metric 'math_answer' is none of the task's rewards"):
        parse_tasks({"tasks": {"t": task}})


def test_a_task_of_an_environment_alone_may_be_called_like_another() -> None:
    tasks = {"copy": {"rewards": ["length"]}, "copy2": {"environment": "number_game"}}
    assert list(parse_tasks({"tasks": tasks})) == ["copy", "copy2"]


def test_a_later_error_names_the_line_of_its_key_as_those_of_the_file_do(tmp_path: Path) -> None:
    """Errors of data, plugins and models begin with ``TaskSpec.where`` and a key path below it."""
    file = tmp_path / "tasks.yaml"
    file.write_text(
        "tasks:\n"
        "  one: &one\n"
        "    type: grpo\n"
        "    reward_model: length\n"
        "    reward_config:\n"
        "      minimum: 1\n"
        "    constraints:\n"
        "      - tool_use\n"
        "      - {name: b, plugin: tool_use,\n"
        "        config: {\n"
        "          unit: words}}\n"
        "    select:\n"
        "      a b: 1\n"
        "      two.c: 1\n"
        "    algorithm_config: {clip_low: 0.2}\n"
        "  two:\n"
        "    <<: *one\n"
        "    weight: 2\n"
        "  twofold: {rewards: [length], weight: 2}\n"
    )
    given = {"algorithm_config": {"clip_high": 3}, "weight": 3, "constraints": [{"plugin": "tool_use"}]}
    specs = load_tasks(file, {"two": given, "new": {"rewards": ["length"]}})

    def line_of(name: str, rest: str) -> str:
        place = f"{specs[name].where}{rest}"
        told = str(DataError(f"{place}: is wrong"))
        assert told.endswith(f": tasks.{name}{rest}: is wrong")
        again = pickle.loads(pickle.dumps(DataError(f"{place}: is wrong")))
        assert str(again) == str(ConfigError(told)) == told, "a message is changed once"
        return told.removesuffix(f": tasks.{name}{rest}: is wrong").removeprefix(f"{file}:")

    assert line_of("one", "") == "2"
    assert line_of("one", ".rewards[0].config.minimum") == "6"
    assert line_of("one", ".rewards[0].config.absent") == "5"
    assert line_of("one", ".constraints[1].config.unit.deeper") == "11"
    assert line_of("one", ".constraints[0].plugin") == "8"
    assert line_of("one", ".select.a b") == "13"
    assert line_of("one", ".select.two.c") == "14"
    assert line_of("one", ".selected") == line_of("one", ".dataset") == "2"
    assert line_of("two", ".select.a b") == "13"
    assert line_of("two", ".algorithm_config.clip_low") == "15"
    assert line_of("two", ".algorithm_config.clip_high") == line_of("two", ".weight") == "override"
    assert line_of("two", ".constraints[1].config.unit") == "override", "the list of the file was replaced"
    assert line_of("twofold", ".weight") == "19"
    assert line_of("new", ".rewards[0].config") == "override"
    assert str(ConfigError("tasks.yaml:3: tasks.one.select: x")) == "tasks.yaml:3: tasks.one.select: x"
    specs = load_tasks(file)
    assert line_of("two", ".weight") == "18", "the newest reading counts"
