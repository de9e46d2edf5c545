"""Random combinations of settings, each from one seed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .naive.chat import KINDS
from .naive.settings import (
    DEFAULTS,
    POLICIES,
    Anchor,
    ConstraintRule,
    Curriculum,
    GuardRules,
    RewardRule,
    Settings,
    Task,
)
from .world import CALLS, FORMS, NUM_ROWS, VOCABULARY, Past, Script, prompt_ids, tokens, vocabulary

NO_RANGE = ((-3.0, 5.0, 11.0, 2.5), (20.0, -50.0, 35.5), (0.0, 0.25, 1.5))
POLICY_NAMES = ("deficit_learnability", "deficit_learnability", "straggler", "mt_grpo", "static", "uniform")
MULTIPLIER = {
    "setpoint": (1.0, 0.2),
    "smoothing": (1.0, 0.5),
    "max_value": (0.8, 3.0),
    "proportional": (0.0, 5.0),
    "integral": (0.0, 1.0),
    "derivative": (0.0, 1.0),
    "log_rate": (3.0,),
}
CHANGES: dict[str, tuple[Any, ...]] = {
    "weight": (0.0, 0.5, 1.0, 3.0),
    "min_share": (None, 0.0, 0.1, 0.25),
    "evaluation_only": (False, True),
    "is_reported": (False, True),
}
"""Settings of a task that change at a resume."""
ACTING = 0.04
"""Part of the cases whose guard acts."""
RENAMED = 0.5
"""Part of those that are resumed which then give tasks other names."""
REDEFINED = 0.7
"""Part of those that are changed which also get other rewards, constraints, algorithms or names."""
CHANGED = 0.1
"""Part of the cases with tasks that come, go, come back or change at resumes."""
STREAMED = 0.2
"""... some of whose constraints read responses while they are written."""
NAMED = 0.4
"""... some of whose worlds give rewards by name."""
UNTRAINED = 0.25
"""... with tasks that are not trained, or whose results on a split ``test`` no controller reads."""
TOOLS = 0.12
"""... with worlds of tools."""
OVERRUN = 0.15
"""... some of whose responses exceed the limits of their checks."""
LONG = 0.2
"""... some of whose prompts are too long."""
TEMPLATES = 0.12
"""... with a chat template."""
STOPPED = 0.3
"""... with stop strings, or worlds that limit answers."""
ENDS = ("a", "b", "ab", "bc", "aa", "<pad>", "a<pad>", "<pad>b", "b<eos>", "c", "d>", "abc")
STREAM, CURRICULA, NEWER, NEWEST = 50, 2, 106, 2
"""Those of which the first sixty cases show every planted fault (``test_faults.py``)."""
UNIT = ((0.0, 1.0), (0.0, 0.5, 1.0), (0.1, 0.35, 0.6, 0.9))


@dataclass
class Case:
    """One combination: settings of both sides, how plugins answer, and how samples are cut."""

    seed: int
    settings: Settings
    scripts: dict[str, Script]
    """By ``<task>/<plugin>``."""
    num_steps: int = 2
    layout: str = "auto"
    tokens_per_microbatch: int = 16384
    tied: bool = False
    num_rows: dict[str, int] = field(default_factory=dict)
    """Training rows of each task that does not have ``NUM_ROWS``."""
    late: float = 0.0
    """Chance that a group's rewards come late."""
    engine_failing: float = 0.0
    """Chance that the engine loses a first attempt."""
    past_steps: int = 0
    past: dict[str, Past] = field(default_factory=dict)
    """What the scheduler has seen of each task before the first step."""
    resumed_at: int = 0
    """Step before which the product's run is saved and begins anew from its checkpoint; 0 = it is not."""
    resumed_after_rollback: bool = False
    """The same after its first rollback."""
    everyone: list[Task | Anchor] = field(default_factory=list)
    """All tasks and anchors that the run has at some time."""
    watched: list[str] = field(default_factory=list)
    """What the guard watches of them beside primary metrics."""
    changes: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Step of a resume (0: the start) -> tasks and anchors from there on, in order, with changed settings."""
    renamed: dict[str, str] = field(default_factory=dict)
    """New names of tasks and anchors from the first resume on."""
    renames: dict[int, dict[str, str]] = field(default_factory=dict)
    """Step of a resume -> name at first -> name from there on, of some that stay until the end."""
    origins: dict[str, str] = field(default_factory=dict)
    """Name -> the name at first, of those that were renamed."""
    former: dict[str, str] = field(default_factory=dict)
    """Name -> the one before it."""
    spelled: list[list[int]] = field(default_factory=list)
    """Tokens that responses hold often."""
    template: str = ""
    """Kind of the chat template; empty: there is none."""
    form: str = ""
    """In which calls of tools are written; each is one token."""
    named: list[str] = field(default_factory=list)
    """Tasks whose world gives rewards by name."""
    limiting: dict[str, list[str]] = field(default_factory=dict)
    """Task whose world limits the next answer at times -> texts that it ends it with."""
    collapsed: list[int] = field(default_factory=list)
    """Versions of the weights whose responses are bad."""
    arithmetic: str = "float64"
    """Of the product: ``float64`` shows faults of the formulas, ``float32`` those of rounding."""

    def origin(self, task: str) -> str:
        """The name that the task or anchor had at first."""
        return self.origins.get(task, task)

    def script(self, task: str, plugin: str) -> Script:
        """How the plugin of a task answers; one that is of the world never does."""
        owner = self.settings[task]
        rule = next(r for r in (*owner.rewards, *owner.constraints) if r.name == plugin)
        return self.scripts.get(script_key(self.origin(task), rule), Script(""))

    def rename(self, names: Mapping[str, str]) -> None:
        """Give tasks other names: former name -> name."""
        self.settings.rename(names)
        self.past = {names.get(name, name): past for name, past in self.past.items()}
        self.origins |= {new: self.origin(old) for old, new in names.items()}
        self.former |= {new: old for old, new in names.items()}

    def change(self, step: int) -> None:
        """Go on with the tasks of the resume at ``step``."""
        settings, chosen = self.settings, self.changes[step]
        owners = {self.origin(owner.name): owner for owner in self.everyone}
        settings.quantiles_before = len(settings.control_tokens) if step else 0
        now = [owners[name] for name in chosen]
        for origin, owner in zip(chosen, now, strict=True):
            for key, value in chosen[origin].items():
                if key == "algorithm":
                    owner.become(*value)
                else:
                    setattr(owner, key, value)
        settings.tasks = [owner for owner in now if isinstance(owner, Task)]
        settings.anchors = [owner for owner in now if isinstance(owner, Anchor)]
        settings.watched = []
        for key in self.watched:
            origin, _, metric = key.partition("/")
            owner = owners[origin]
            if origin in chosen and (isinstance(owner, Anchor) or owner.can_be_watched(metric)):
                settings.watched.append(f"{owner.name}/{metric}")

    def describe(self) -> str:
        """All of it in one line, to be read."""
        return json.dumps(asdict(self), default=str)


def script_key(task: str, rule: RewardRule | ConstraintRule) -> str:
    """Name of the script by which a rule answers."""
    return f"{task}/{rule.name}" + (f"@{rule.version}" if rule.version else "")


def draw_case(
    seed: int, *, with_more: bool = True, acting: bool | None = None, changing: bool | None = None
) -> Case:
    """Return the case of ``seed``; half of them get ``with_more`` what ``_more`` adds.

    ``acting``: whether the guard acts; ``changing``: whether tasks change at resumes; None: as drawn.
    """
    case = _draw_case(seed)
    if with_more and random.Random(f"more{STREAM} {seed}").random() < 0.5:
        _more(case)
        if random.Random(f"chosen{CURRICULA} {seed}").random() < 0.5:
            _chosen(case)
    for name, share, add in (
        (f"stops{NEWER}", STOPPED, _stops),
        (f"long{NEWER}", LONG, _long),
        (f"untrained{NEWER}", UNTRAINED, _untrained),
        (f"over{NEWER}", OVERRUN, _overrun),
        (f"tools{NEWER}", TOOLS, _tools),
        ("templates", TEMPLATES, _template),
        (f"streamed{NEWEST}", STREAMED, _streamed),
        (f"named{NEWEST}", NAMED, _named),
    ):
        if with_more and random.Random(f"{name} {seed}").random() < share:
            add(case)
    if acting if acting is not None else random.Random(f"acting {seed}").random() < ACTING:
        _acting(case)
    rng = random.Random(f"changes{NEWEST} {seed}")
    if changing if changing is not None else with_more and rng.random() < CHANGED:
        _changing(case)
        rng = random.Random(f"redefined {seed}")
        if rng.random() < REDEFINED:
            _redefining(case, rng)
    rng = random.Random(f"renamed{NEWER} {seed}")
    if not case.changes and (case.resumed_at or case.resumed_after_rollback) and rng.random() < RENAMED:
        names = [owner.name for owner in [*case.settings.tasks, *case.settings.anchors]]
        case.renamed = {name: f"new_{name}" for name in names if rng.random() < 0.6}
    return case


def _draw_case(seed: int) -> Case:
    rng = random.Random(f"case {seed}")
    number = rng.choice([1, 2, 2, 3])
    scripts: dict[str, Script] = {}
    group_size = rng.choice([2, 3, 4])
    quorum = rng.choice([1.0] * 4 + [0.5, 0.8])
    staleness = rng.choice([0, 0, 0, 1, 2]) if quorum == 1.0 else rng.choice([1, 2])
    tasks = [_task(rng, "abc"[i], group_size, staleness, scripts) for i in range(number)]
    settings = Settings(
        tasks=tasks,
        prompts_per_step=rng.randint(number, 8),
        num_minibatches=rng.choice([1, 1, 2, 3]),
        num_epochs=rng.choice([1, 1, 1, 2]),
        refill_rounds=rng.choice([0, 1, 1, 2]),
        quorum=quorum,
        max_staleness=staleness,
        max_steps=rng.choice([10, 30]),
        learning_rate=rng.choice([1e-3, 3e-4]),
        critic_learning_rate=rng.choice([0.0, 2e-3]),
        betas=rng.choice([(0.9, 0.99), (0.8, 0.95)]),
        weight_decay=rng.choice([0.0, 0.0, 0.1]),
        max_grad_norm=rng.choice([1.0, 0.1, 0.0]),
        warmup_steps=rng.choice([0, 0, 3]),
        schedule=rng.choice(["constant", "linear", "cosine"]),
        reference_decay=rng.choice([1.0, 1.0, 0.7]),
        critic_trunk=rng.choice(["actor", "actor", "separate"]),
        eval_every=rng.choice([0, 0, 0, 1, 2]),
        policy=rng.choice(POLICY_NAMES),
        min_weight=rng.choice([None, None, 0.0, 0.05]),
    )
    # a stream of its own, so that all other draws of a seed stay as they were
    settings.adam_eps = random.Random(f"adam_eps {seed}").choice([1e-8, 1e-8, 1e-3])
    for task in tasks:
        if random.Random(f"mask_truncated {seed} {task.name}").random() < 0.2:
            task.given["mask_truncated"] = task.config["mask_truncated"] = True
    settings.policy_config = draw_policy(rng, settings.policy)
    num_steps = rng.choice([1, 2, 3])
    if settings.eval_every:
        settings.watched = _watched(rng, tasks)
    if settings.eval_every == 1 and rng.random() < 0.25:  # past the guard's warm-up
        num_steps, settings.prompts_per_step = 9, number
    past_steps = rng.choice([0] * 5 + [30, 260, 300])
    return Case(
        seed=seed,
        settings=settings,
        scripts=scripts,
        num_steps=num_steps,
        layout=rng.choice(["auto", "shared", "bucketed", "packed"]),
        tokens_per_microbatch=rng.choice([16384, 16384, 40, 90]),
        late=rng.choice([0.2, 0.6]) if quorum < 1.0 else 0.0,
        engine_failing=rng.choice([0.0] * 4 + [0.15]),
        past_steps=past_steps,
        past={t.name: _past(rng) for t in tasks} if past_steps else {},
        arithmetic="float32" if rng.random() < 0.1 else "float64",
    )


def _more(case: Case) -> None:
    """Give tasks grammars and worlds, and make some of them ones of given answers or of a teacher."""
    rng, settings = random.Random(f"kinds{STREAM} {case.seed}"), case.settings
    for i, task in enumerate(settings.tasks):
        settings.tasks[i] = task = _other_kind(rng, task, case.scripts, settings.max_staleness)
        if task.has_rewards:
            task.eval_samples = rng.choice([1, 1, 2, 3])
        if task.type == "sft":
            continue
        if rng.random() < 0.3:
            task.grammar, task.sentences = _grammar(rng, task.max_new_tokens)
        if rng.random() < 0.35:
            task.max_turns = rng.choice([1, 2, 3])
            task.max_episode_tokens = rng.choice([0, 0, 4, 8])
            if not task.rewards or rng.random() < 0.4:  # without others it is added
                ends = rng.choice([{}, {"low": 0.0, "high": 3.0}])
                rule = RewardRule(name="environment", is_of_world=True, weight=rng.choice([1.0, 0.5]), **ends)
                task.rewards.append(rule)
    has_control = any(t.type == "reward_conditioned" for t in settings.tasks)
    if rng.random() < 0.2 and settings.reference_decay == 1.0 and not has_control:
        settings.lora_rank = rng.choice([1, 2])
        settings.lora_dropout = random.Random(f"dropout {case.seed}").choice([0.0, 0.0, 0.4])
    case.tied = rng.random() < 0.15
    settings.guard_factors = [
        {t.name: rng.choice([0.0, 0.5, 2.0]) for t in settings.tasks if rng.random() < 0.5}
        for _ in range(rng.choice([0, 0, 1, 2]))
    ]
    settings.guard_rate = rng.choice([1.0, 0.5])
    if rng.random() < 0.3:
        settings.anchors = [_anchor(rng, settings)]
    if (settings.anchors or any(settings.guard_factors)) and not settings.eval_every:
        settings.eval_every, case.num_steps = 1, max(2, case.num_steps)
    for rule in [c for t in settings.tasks for c in t.constraints if c.mode == "lagrangian"]:
        rule.multiplier |= {key: rng.choice(own) for key, own in MULTIPLIER.items() if rng.random() < 0.3}
    if case.num_steps > 1 and rng.random() < 0.25:
        case.resumed_at = rng.randrange(1, case.num_steps)
    known = [f"{t.name}/reward/{r.name}" for t in settings.tasks for r in t.rewards]
    known += [
        f"{t.name}/{m}"
        for t in settings.tasks
        if t.has_rewards
        for m in ("truncated_rate", "failure_rate", "reward_mean")
    ]
    known += [
        f"{t.name}/{m}"
        for t in settings.tasks
        if t.constraints
        for m in ("violation_rate", "served_violation_rate", "rejection_rate", "cost")
    ]
    settings.watched = [name for name in settings.watched if name in known]
    settings.watched += [f"{a.name}/kl" for a in settings.anchors if a.has_kl and rng.random() < 0.5]


def _stops(case: Case) -> None:
    """Let texts end responses: of the run, of a task, or of a world."""
    rng, settings = random.Random(f"stopped{NEWER} {case.seed}"), case.settings
    texts = rng.sample(ENDS, rng.choice([2, 3, 4]))
    case.spelled = [tokens("<pad>" if text == "d>" else text) for text in texts]

    def some() -> tuple[str, ...]:
        return tuple(rng.sample(texts, rng.choice([1, 1, 2])))

    settings.stop = some() if rng.random() < 0.5 else ()
    for owner in [*settings.tasks, *settings.anchors]:
        owner.stop = settings.stop
        if isinstance(owner, Task):
            if owner.grammar:
                owner.stop = ()
            elif rng.random() < 0.5:
                owner.stop = some() if rng.random() < 0.8 else ()
            if owner.max_turns and rng.random() < 0.6:
                case.limiting[owner.name] = [] if owner.grammar else texts


def _untrained(case: Case) -> None:
    """Train some of the tasks only, and let some be only reported."""
    rng, settings = random.Random(f"not trained{NEWER} {case.seed}"), case.settings
    for task in rng.sample(settings.tasks, rng.randrange(len(settings.tasks))):
        if rng.random() < 0.5:
            task.evaluation_only = True
        else:
            task.weight, task.min_share = 0.0, rng.choice([None, None, 0.0, 0.1, 0.25])
    for task in settings.tasks:
        task.is_reported = rng.random() < 0.25
    hidden = [t.name for t in settings.tasks if t.is_reported]
    settings.watched = [key for key in settings.watched if key.partition("/")[0] not in hidden]
    if not settings.eval_every:
        settings.eval_every, case.num_steps = 1, max(2, case.num_steps)


def _changing(case: Case) -> None:
    """Let tasks come, go and come back at resumes, with other weights and on other held-out rows."""
    rng, settings = random.Random(f"changing{NEWEST} {case.seed}"), case.settings
    if not settings.eval_every:
        settings.eval_every = rng.choice([1, 2])
    case.num_steps = max(case.num_steps, rng.choice([3, 4, 6]))
    case.everyone, case.watched = [*settings.tasks, *settings.anchors], settings.watched
    known = {t.name: {"weight": t.weight, "evaluation_only": t.evaluation_only} for t in settings.tasks}
    at = sorted(rng.sample(range(1, case.num_steps), min(rng.choice([1, 2, 2, 3]), case.num_steps - 1)))
    for step in [0, *at]:
        chosen: dict[str, dict[str, Any]] = {}
        while not any(n in chosen and x["weight"] and not x["evaluation_only"] for n, x in known.items()):
            owners = [o for o in case.everyone if rng.random() < 0.7]
            chosen = {o.name: {} for o in rng.sample(owners, len(owners))}
            for name in known if step else ():
                own = {key: rng.choice(options) for key, options in CHANGES.items() if rng.random() < 0.15}
                known[name] |= {key: own[key] for key in known[name] if key in own}
                if name in chosen:
                    chosen[name] = dict(own)
        for name in chosen:
            if name in known:
                chosen[name] |= known[name]
        case.changes[step] = chosen
    case.change(0)


def _redefining(case: Case, rng: random.Random) -> None:
    """Let tasks have other rewards, constraints, algorithms and names from a resume on."""
    steps = [step for step in sorted(case.changes) if step]
    now = {o.name: Changing(case, o, rng) for o in case.everyone if isinstance(o, Task) and o.type != "sft"}
    for step in steps:
        for name in case.changes[step]:
            if name in now:
                if rng.random() < 0.6:
                    for _ in range(rng.choice([1, 1, 2])):
                        now[name].change()
                case.changes[step][name] |= now[name].settings()
    for place, step in enumerate(steps):
        later = [case.changes[at] for at in steps[place:]]
        known = [n for n in case.changes[[0, *steps][place]] if all(n in own for own in later)]
        if rng.random() < 0.5:
            case.renames[step] = {n: f"new{step}_{n}" for n in known if rng.random() < 0.6}


class Changing:
    """A task's settings as they change from resume to resume."""

    def __init__(self, case: Case, task: Task, rng: random.Random) -> None:
        self.case, self.task, self.rng = case, task, rng
        self.rewards, self.constraints = list(task.rewards), list(task.constraints)
        self.algorithm = task.type, task.given
        self.primary = task.primary_metric, task.higher_is_better
        self.limits = task.max_turns, task.max_episode_tokens
        self.versions: dict[str, int] = {}

    def settings(self) -> dict[str, Any]:
        """By attribute of the task; ``algorithm`` is for ``Task.become``."""
        return {
            "rewards": list(self.rewards),
            "constraints": list(self.constraints),
            "algorithm": self.algorithm,
            "primary_metric": self.primary[0],
            "higher_is_better": self.primary[1],
            "max_turns": self.limits[0],
            "max_episode_tokens": self.limits[1],
        }

    def change(self) -> None:
        """Change one thing."""
        options = []
        if self.rewards:
            options += [self.weigh, self.rescore, self.add_reward, self.remove_reward, self.choose_primary]
        if self.constraints:
            options += [self.limit, self.rejudge, self.remove_constraint]
        if self.rewards and self.task.type != "distill":
            options += [self.add_constraint]
        if self.task.type != "distill":
            options += [self.learn, self.learn]
        if self.task.max_turns:
            options += [self.cut]
        if options:
            self.rng.choice(options)()

    def new_version(self, name: str, script: Script) -> int:
        """Let a plugin of that name answer so from now on."""
        version = self.versions[name] = self.versions.get(name, 0) + 1
        key = f"{self.task.name}/{name}@{version}"
        self.case.scripts[key] = replace(script, name=key)
        return version

    def weigh(self) -> None:
        place = self.rng.randrange(len(self.rewards))
        changed = replace(self.rewards[place], weight=self.rng.choice([0.0, 0.3, 1.0, 2.0]))
        rewards = [*self.rewards[:place], changed, *self.rewards[place + 1 :]]
        self.rewards = rewards if any(r.weight for r in rewards) else self.rewards

    def rescore(self) -> None:
        """Let a reward answer otherwise, in another range or direction."""
        able = [i for i, r in enumerate(self.rewards) if not r.is_of_world]
        if able:
            place = self.rng.choice(able)
            former = self.rewards[place]
            own = self.drawn_reward(former.name)
            if self.rng.random() < 0.5:
                own = replace(own, higher_is_better=former.higher_is_better)
            self.rewards[place] = replace(own, weight=former.weight, overrun=former.overrun)
            if self.primary[0].partition("/")[0] == former.name:
                self.primary = former.name, own.higher_is_better

    def drawn_reward(self, name: str) -> RewardRule:
        scripts: dict[str, Script] = {}
        rule = _reward(self.rng, self.task.name, 1, scripts)
        return replace(rule, name=name, version=self.new_version(name, *scripts.values()))

    def add_reward(self) -> None:
        names = [f"reward{i}" for i in range(4) if f"reward{i}" not in [r.name for r in self.rewards]]
        if names:
            place = self.rng.randint(0, len(self.rewards))
            self.rewards.insert(place, self.drawn_reward(names[0]))

    def remove_reward(self) -> None:
        gone = self.rng.choice(self.rewards)
        rewards = [r for r in self.rewards if r is not gone]
        if any(r.weight for r in rewards):
            self.rewards = rewards
            if self.primary[0].partition("/")[0] == gone.name:
                self.primary = "reward", True

    def choose_primary(self) -> None:
        rule = self.rng.choice(self.rewards)
        self.primary = self.rng.choice([("reward", True), (rule.name, rule.higher_is_better)])

    def limit(self) -> None:
        """Give a constraint other numbers."""
        place = self.rng.randrange(len(self.constraints))
        rule = self.constraints[place]
        if rule.mode == "lagrangian":
            more = {key: self.rng.choice(own) for key, own in MULTIPLIER.items() if self.rng.random() < 0.2}
            more |= {"mode": self.rng.choice(["pid", "log"])} if self.rng.random() < 0.2 else {}
            rule = replace(rule, limit=self.rng.choice([0.05, 0.3]), multiplier=rule.multiplier | more)
        elif rule.mode == "penalty" and self.rewards:
            rule = replace(rule, weight=self.rng.choice([1.0, 0.5, 0.0]))
        else:
            rule = replace(rule, max_attempts=self.rng.choice([1, 2, 3]))
        self.constraints[place] = rule

    def rejudge(self) -> None:
        """Let a constraint answer otherwise, or act otherwise."""
        place = self.rng.randrange(len(self.constraints))
        rule, own = self.constraints[place], self.drawn_constraint(self.constraints[place].name)
        if self.rng.random() < 0.5 and self.rewards and self.task.type != "distill":
            self.constraints[place] = replace(own, version=rule.version)
        else:
            self.constraints[place] = replace(rule, version=own.version, stream_every=0)

    def drawn_constraint(self, name: str) -> ConstraintRule:
        scripts: dict[str, Script] = {}
        rule = _constraint(self.rng, self.algorithm[0], self.task.name, 1, scripts)
        return replace(rule, name=name, version=self.new_version(name, *scripts.values()))

    def add_constraint(self) -> None:
        known = [c.name for c in self.constraints]
        names = [f"constraint{i}" for i in range(3) if f"constraint{i}" not in known]
        if names:
            self.constraints.append(self.drawn_constraint(names[0]))

    def remove_constraint(self) -> None:
        if self.rewards:
            self.constraints.remove(self.rng.choice(self.constraints))

    def learn(self) -> None:
        """Learn by another algorithm, or with another configuration of the same."""
        task, settings = self.task, self.case.settings
        kinds = [kind for kind in DEFAULTS if kind not in ("sft", "distill")]
        has_price = any(c.mode == "lagrangian" for c in self.constraints)
        if has_price or task.kl_target is not None or settings.lora_rank:
            kinds.remove("reward_conditioned")
        if task.group_size == 1:
            kinds = ["ppo"]
        kind = self.rng.choice([*kinds, self.algorithm[0], self.algorithm[0]])
        config = _config(self.rng, kind, settings.max_staleness)
        if task.group_size == 1 and "group_baseline" in DEFAULTS[kind]:
            config["group_baseline"] = False
        former = dict(self.algorithm[1]) if kind == self.algorithm[0] else {}
        config.pop("popart_rate", None)  # the average of what was seen with another rate is no formula
        self.algorithm = kind, config | {k: v for k, v in former.items() if k == "popart_rate"}

    def cut(self) -> None:
        """Give episodes other limits."""
        turns, tokens = self.rng.choice([1, 2, 3]), self.rng.choice([0, 0, 4, 8])
        self.limits = max(2, turns) if self.task.has_tools else turns, tokens


def _overrun(case: Case) -> None:
    """Let checks of responses exceed their limits, subtract some rewards, and look at parts of others."""
    rng = random.Random(f"overrun{NEWER} {case.seed}")
    for task in case.settings.tasks:
        for rule in [*task.rewards, *task.constraints]:
            key = f"{task.name}/{rule.name}"
            if key not in case.scripts or rng.random() < 0.3:
                continue
            over, has_part = rng.choice([0.0, 0.1, 0.3]), rng.random() < 0.5
            script = case.scripts[key]
            failing = 0.0 if over else script.failing  # a check that ends fails before or behind its limit
            case.scripts[key] = replace(script, over=over, failing=failing, has_part=has_part)
            if isinstance(rule, RewardRule):
                rule.overrun = rng.choice([None, None, 0.2, 1.0])
                if rule.higher_is_better and rng.random() < 0.2:
                    rule.weight *= -1.0
                if has_part and rng.random() < 0.4:
                    task.primary_metric, task.higher_is_better = f"{rule.name}/part", rng.random() < 0.7


def _tools(case: Case) -> None:
    """Let worlds answer calls of tools."""
    rng, settings = random.Random(f"with tools{NEWER} {case.seed}"), case.settings
    for task in settings.tasks:
        if task.type == "sft" or task.grammar or rng.random() < 0.3:
            continue
        if not task.max_turns or not any(rule.is_of_world for rule in task.rewards):
            task.rewards.append(RewardRule(name="environment", is_of_world=True))
        task.has_tools, task.max_turns = True, rng.choice([2, 3, 4])
        task.max_tool_calls, task.stop = rng.choice([0, 0, 1, 2]), ()
        case.limiting.pop(task.name, None)
    case.form = rng.choice(FORMS)
    calls = range(len(VOCABULARY), len(VOCABULARY) + len(CALLS))
    settings.first_control_token = calls.stop
    case.spelled = [*case.spelled, *([call] for call in calls)]


def _streamed(case: Case) -> None:
    """Let constraints read responses while they are written."""
    rng = random.Random(f"looks{NEWEST} {case.seed}")
    for task in case.settings.tasks:
        for rule in task.constraints:
            if rng.random() < 0.7:
                rule.stream_every = rng.choice([1, 2, 2, 3])
                key = f"{task.name}/{rule.name}"
                values = rng.choice([(0.0, 1.0), (0.0, 0.2, 0.3, 0.9), (0.0,) * 5 + (0.6,)])
                script = replace(case.scripts[key], values=values, over=0.0)
                case.scripts[key] = replace(script, same=0.0, same_silent=0.0)


def _named(case: Case) -> None:
    """Let worlds give rewards by name, and tasks take some of them alone."""
    rng = random.Random(f"names{NEWEST} {case.seed}")
    for task in case.settings.tasks:
        if task.max_turns and rng.random() < 0.8:
            case.named.append(task.name)
            for rule in [r for r in task.rewards if r.is_of_world]:
                rule.key = rng.choice(["", "", "right", "form"])
            for name in rng.sample(["right", "form"], rng.choice([0, 1, 1, 2])):
                weight = rng.choice([1.0, 0.5, 0.0, -1.0])
                task.rewards.append(RewardRule(name=name, is_of_world=True, key=name, weight=weight))


def _template(case: Case) -> None:
    """Let a chat template show conversations, and most often rewrite what was said before."""
    rng, settings = random.Random(f"template {case.seed}"), case.settings
    case.template = rng.choice(KINDS)
    number = len(vocabulary(case.form, case.template))
    settings.first_control_token = number
    settings.max_prompt_tokens += 3
    case.spelled = [*case.spelled, [number - 2], [number - 1], [VOCABULARY.index("t")]]


def _long(case: Case) -> None:
    """Let a third of a task's prompts be too long, or half, but not nearly all."""
    most = random.Random(f"longest{NEWER} {case.seed}").choice([3, 4, 5])
    for task in case.settings.tasks:
        rows = range(case.num_rows.get(task.name, NUM_ROWS))
        lengths = sorted(len(prompt_ids(case.seed, task.name, row)) for row in rows)
        most = max(most, lengths[len(rows) // 3])
    case.settings.max_prompt_tokens = most


def _chosen(case: Case) -> None:
    """Let curricula choose prompts, and further policies the shares."""
    rng, settings = random.Random(f"curricula{CURRICULA} {case.seed}"), case.settings
    for task in settings.tasks:
        if rng.random() < 0.6:
            by = rng.choice(["pass_rate", "pass_rate", "grade", "number"])
            if by == "number" and random.Random(f"length {case.seed} {task.name}").random() < 0.5:
                by = "length"
            curriculum = Curriculum(by=by, pools=rng.choice([3, 5]), floor=rng.choice([0.1, 0.0, 0.5]))
            if task.type != "sft" and (task.type != "distill" or task.rewards):
                task.curriculum = curriculum
            case.num_rows[task.name] = rng.choice([5, 12, 40])
    if settings.policy in ("static", "uniform"):
        settings.policy = rng.choice(["bandit", "patience", "learnability", "tac"])
        settings.policy_config = draw_policy(rng, settings.policy)
        if not case.past_steps and rng.random() < 0.6:  # without one no difference is clear
            case.past_steps, case.past = rng.choice([30, 260]), {t.name: _past(rng) for t in settings.tasks}
    elif rng.random() < 0.2:
        settings.policy_config["gradients_every"] = 1
    for task in settings.tasks:
        if task.eval_samples > 1 and rng.random() < 0.3:
            task.solved_at = rng.choice([0.3, 0.5, 2.5])
        for rule in task.rewards if task.eval_samples > 1 else ():
            if not rule.is_of_world and rng.random() < 0.6:
                key, answers = f"{task.name}/{rule.name}", rng.choice(["xy", "xyz"])
                case.scripts[key] = replace(case.scripts[key], answers=("", *answers))
    if any(t.curriculum for t in settings.tasks) and rng.random() < 0.7:
        case.num_steps = rng.choice([4, 6, 10])
        if rng.random() < 0.4:
            case.resumed_at = rng.randrange(1, case.num_steps)


def _acting(case: Case) -> None:
    """Let the policy collapse, and the guard answer."""
    rng, settings = random.Random(f"guard {case.seed}"), case.settings
    settings.acting = GuardRules(
        drop=rng.choice([0.15, 0.05, 0.3]),
        absolute=rng.random() < 0.25,
        rollback_steps=rng.choice([1, 2, 4, 10, 100]),
        max_rollbacks=rng.choice([1, 2, 3]),
        rollback_window=rng.choice([1000, 1000, 4]),
        warmup=rng.choice([1, 2]),
        cusum_limit=rng.choice([0.5, 1.0, 2.0]),
        min_demonstrated=rng.choice([0.05, 0.0]),
        cooldown_steps=rng.choice([0, 0, 2, 100]),
        confirm=rng.random() < 0.6,
        confirm_z=rng.choice([0.5, 1.0, 3.09]),
        stored_z=rng.choice([0.5, 2.33]),
        on_changed_task=rng.choice(["stop", "warn", "warn"]),
        ladder=rng.choice([["rollback"], ["rollback"], ["reweight", "rollback"], ["freeze", "rollback"]]),
        skip_data=rng.random() < 0.7,
        lr_factor=rng.choice([0.5, 0.9, 1.0]),
        lr_hold_steps=rng.choice([50, 1, 0]),
        lr_rewarm_steps=rng.choice([50, 2, 0]),
        culprit_factor=rng.choice([0.5, 0.0, 1.0]),
        victim_factor=rng.choice([2.0, 1.0]),
    )
    settings.guard_factors, settings.guard_rate = [], 1.0
    settings.checkpoint_every = rng.choice([0, 0, 1, 2, 3])
    settings.checkpoint_keep = rng.choice([1, 2, 4])
    settings.eval_every = rng.choice([1, 1, 2])
    settings.max_steps = 30
    settings.prompts_per_step = min(settings.prompts_per_step, 1 + len(settings.tasks))
    case.num_steps, case.arithmetic = 12, "float64"
    case.resumed_at = rng.choice([0, 0, 0, 3])
    case.resumed_after_rollback = rng.random() < 0.3
    first = rng.choice([4, 5, 6])
    case.collapsed = list(range(first, first + rng.choice([1, 2, 30])))
    for task in settings.tasks:
        for rule in [*task.rewards, *task.constraints]:
            if (key := f"{task.name}/{rule.name}") in case.scripts and rng.random() < 0.85:
                script = case.scripts[key]
                is_cost = not isinstance(rule, RewardRule) or not rule.higher_is_better
                worst = max(script.values) if is_cost else min(script.values)
                case.scripts[key] = replace(script, if_bad=worst, same=0.0)


def _anchor(rng: random.Random, settings: Settings) -> Anchor:
    has_answers = rng.random() < 0.7
    return Anchor(
        name="anchor",
        has_answers=has_answers,
        is_plain=has_answers and rng.random() < 0.4,
        has_kl=settings.reference_decay == 1.0 and rng.random() < 0.7,
        max_tokens=rng.choice([512, 2]),
    )


def _other_kind(rng: random.Random, task: Task, scripts: dict[str, Script], staleness: int) -> Task:
    """The task as one of given answers or of a teacher; three of four stay as they are."""
    kind = rng.choice(["", "", "", "", "", "sft", "distill", "distill"])
    if not kind:
        return task
    rewards = task.rewards if rng.random() < 0.4 else []
    constraints = [c for c in task.constraints if c.mode == "reject" and kind == "distill" and rewards]
    config = _config(rng, kind, staleness)
    if rng.random() < 0.2:
        config["mask_truncated"] = True
    names = ("name", "weight", "min_share", "loss_weight", "max_new_tokens", "temperature", "top_k", "top_p")
    own = {name: getattr(task, name) for name in (*names, "target")}
    known = task.primary_metric in [r.name for r in rewards]
    return Task(
        **own,
        type=kind,
        config=config,
        rewards=rewards,
        constraints=constraints,
        group_size=1 if kind == "sft" else task.group_size,
        primary_metric=task.primary_metric if known else "reward",
        higher_is_better=task.higher_is_better if known else True,
    )


def _grammar(rng: random.Random, most: int) -> tuple[dict[str, Any], list[list[int]]]:
    """A grammar and its sentences: some texts that fit, or digits that may not."""
    if rng.random() < 0.3:
        digits = range(2, 5)
        number = rng.choice([1, most])
        sentences = [[]]
        found: list[list[int]] = []
        for _ in range(number):
            sentences = [[*s, d] for s in sentences for d in digits]
            found += sentences
        return {"regex": f"[0-2]{{1,{number}}}"}, found
    texts = {
        "".join(rng.choice("0123") for _ in range(rng.randint(1, most - 1))) for _ in range(rng.randint(2, 6))
    }
    texts |= {"4", "0"}
    choices = sorted(texts)
    return {"choices": choices}, [[VOCABULARY.index(c) for c in text] for text in choices]


def draw_policy(rng: random.Random, name: str) -> dict[str, float]:
    """Settings of a policy."""
    options: dict[str, list[float]] = {
        "prior_prompts": [100, 20, 0],
        "smoothing": [0.1, 0.5],
        "prompts_averaged": [1, 5],
        "sharpness": [1.0],
        "exponent": [0.0, 3.0],
        "rate": [0.3],
        "level_weight": [0.0, 0.2],
        "temperature": [0.1, 0.5],
        "alpha": [0.0, 3.0],
        "gradients_every": [1, 2],
        "share": [0.0, 0.2],
        "exploration": [0.0, 0.5],
        "patience": [1, 3],
        "min_delta": [0.003, 0.1],
        "factor": [0.5],
        "max_change": [1.5],
        "literal": [True],
    }
    known = POLICIES[name] if name not in ("static", "uniform") else {}
    return {key: rng.choice(options[key]) for key in known if rng.random() < 0.4}


def _past(rng: random.Random) -> Past:
    return Past(
        dead_steps=rng.choice([0, 250, 270, 1000]),
        level=rng.choice([0.0, 0.0, 0.3, 0.95]),
        after=rng.choice(["alive", "form", "solved", "rare"]),
    )


def _watched(rng: random.Random, tasks: Sequence[Task]) -> list[str]:
    found = [f"{t.name}/reward/{r.name}" for t in tasks for r in t.rewards]
    found += [f"{t.name}/{m}" for t in tasks for m in ("truncated_rate", "failure_rate", "reward_mean")]
    for t in tasks:
        if t.constraints:
            names = ("violation_rate", "served_violation_rate", "rejection_rate", "cost")
            found += [f"{t.name}/{name}" for name in names]
    return rng.sample(found, rng.randint(0, 2))


def _some(rng: random.Random, chance: float, options: Sequence[Any], otherwise: Any) -> Any:
    return rng.choice(options) if rng.random() < chance else otherwise


def _task(rng: random.Random, name: str, group_size: int, staleness: int, scripts: dict[str, Script]) -> Task:
    kind = rng.choice([name for name in DEFAULTS if name not in ("sft", "distill")])
    rewards = [_reward(rng, name, i, scripts) for i in range(rng.choice([1, 1, 2, 3]))]
    if not any(r.weight for r in rewards):
        rewards[0].weight = 1.0
    constraints = [_constraint(rng, kind, name, i, scripts) for i in range(rng.choice([0, 0, 1, 1, 2]))]
    if constraints and rng.random() < 0.15:
        rewards = []  # the reward is what the constraints leave
        constraints[0].weight = 1.0
    config = _config(rng, kind, staleness)
    size = rng.choice([group_size, 2, 5]) if rng.random() < 0.3 else group_size
    alone = kind in ("ppo", "reward_conditioned") or config.get("group_baseline") is False
    if alone and rng.random() < 0.3:
        size = 1
    has_kl = rng.random() < 0.4
    is_exact = kind == "reward_conditioned"
    target = rng.choice([0.01, 0.5]) if has_kl and not is_exact and rng.random() < 0.5 else None
    chosen = rng.choice(rewards) if rewards and rng.random() < 0.3 else None
    return Task(
        name=name,
        type=kind,
        config=config,
        rewards=rewards,
        constraints=constraints,
        weight=rng.choice([0.5, 1.0, 1.0, 2.0, 3.0]),
        min_share=_some(rng, 0.2, [0.0, 0.1, 0.25], None),
        target=rng.choice([1.0, 1.0, 0.6]),
        loss_weight=rng.choice([1.0, 1.0, 0.5, 2.0]),
        group_size=size,
        max_new_tokens=rng.choice([3, 5, 7]),
        temperature=rng.choice([1.0, 1.0, 0.7, 1.3]),
        top_k=rng.choice([0, 0, 0, 9]),
        top_p=rng.choice([1.0, 1.0, 1.0, 0.8]),
        kl_coefficient=rng.choice([0.01, 0.2]) if has_kl else 0.0,
        kl_placement=rng.choice(["reward", "loss"]),
        kl_estimator=rng.choice(["k2", "k3"]),
        kl_target=target,
        kl_horizon=rng.choice([5.0, 100.0]),
        primary_metric=chosen.name if chosen else "reward",
        higher_is_better=chosen.higher_is_better if chosen else True,
    )


def _reward(rng: random.Random, task: str, index: int, scripts: dict[str, Script]) -> RewardRule:
    name = f"reward{index}"
    has_range = rng.random() < 0.7
    values = rng.choice(UNIT if has_range else NO_RANGE)
    scripts[f"{task}/{name}"] = Script(
        name=f"{task}/{name}",
        values=values,
        same=rng.choice([0.0, 0.4, 0.8]),
        failing=rng.choice([0.0, 0.0, 0.1]),
        silent=rng.choice([0.0, 0.0, 0.15]),
        same_silent=rng.choice([0.0, 0.0, 0.3]) if index else 0.0,
    )
    ends = {"low": 0.0, "high": 1.0} if has_range else {}
    higher = rng.random() < 0.75
    return RewardRule(
        name=name, weight=rng.choice([1.0, 1.0, 0.3, 2.0, 0.0]), higher_is_better=higher, **ends
    )


def _constraint(
    rng: random.Random, kind: str, task: str, index: int, scripts: dict[str, Script]
) -> ConstraintRule:
    name = f"constraint{index}"
    modes = ["reject", "penalty"] + (["lagrangian", "lagrangian"] if kind != "reward_conditioned" else [])
    mode = rng.choice(modes)
    scripts[f"{task}/{name}"] = Script(
        name=f"{task}/{name}",
        values=rng.choice([(0.0, 1.0), (0.0, 0.0, 1.0), (0.0, 0.2, 0.5, 0.9)]),
        same=rng.choice([0.0, 0.3]),
        failing=rng.choice([0.0, 0.0, 0.0, 0.1]),
        silent=rng.choice([0.0, 0.2]),
        same_silent=rng.choice([0.0, 0.3]),
    )
    multiplier: dict[str, Any] = {}
    if mode == "lagrangian":
        multiplier = {
            "initial_value": rng.choice([0.0, 0.0, 0.7]),
            "mode": rng.choice(["pid", "pid", "log"]),
        }
    return ConstraintRule(
        name=name,
        mode=mode,
        weight=rng.choice([1.0, 0.5, 0.0]) if mode == "penalty" else 1.0,
        limit=rng.choice([0.05, 0.3]),
        max_attempts=rng.choice([1, 2, 3]),
        multiplier=multiplier,
    )


def _config(rng: random.Random, kind: str, staleness: int) -> dict[str, Any]:
    known, config = DEFAULTS[kind], dict[str, Any]()

    def maybe(name: str, *options: Any) -> None:
        if name in known and rng.random() < 0.4:
            config[name] = rng.choice(options)

    maybe("aggregation", "token", "sequence", "constant")
    maybe("normalisation", "group", "task", "none")
    maybe("entropy_coefficient", 0.0, 0.05)
    maybe("truncated_is", *([1.1, 3.0] if staleness else [0.0, 1.1, 3.0]))
    if kind not in ("gspo", "cispo"):
        maybe("clip_low", 0.01, 0.1)
        maybe("clip_high", 0.01, 0.4)
        maybe("dual_clip", 0.0, 1.5)
    maybe("exact", True, False)
    maybe("group_baseline", True, False)
    maybe("rejected_reward", -1.0, 0.3)
    maybe("overlong_buffer", 1, 2)
    maybe("overlong_weight", 0.5)
    maybe("gamma", 0.9)
    maybe("gae_lambda", 0.0, 0.5, 1.0)
    maybe("value_coefficient", 0.1)
    maybe("value_clip", 0.0, 0.01)
    maybe("popart", True)
    maybe("popart_rate", 0.3)
    maybe("quantiles", 2, 3)
    maybe("buffer_size", 6, 20)
    return config
