"""Runs a case on both sides and names every difference.

The reference computes in float64 always. In nine of ten cases the product does, too: gradients then agree to
1e-9 of their norm. In the others the product computes what it calls float32 in float32, and gradients agree
to 1e-5 of their norm wherever float32 can show it. It cannot where a gradient is the difference of nearly
equal numbers: that of a KL term while the policy is still close to its reference, or of an advantage whose
reward and costs cancel. There the reference repeats its step with noise of 2^-24 (half a unit in the last
place) on the weights of every forward pass and on the advantages; the product may be ``ROUNDINGS`` times as
far off as the furthest of ``REPEATS`` repeats: its gradient is then the exact one of a problem that float32
does not tell from the given one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multitask_rl.guard.decision import GuardAction
from multitask_rl.records import Failure, NotApplicable, Score, Scored, Statistic, TaskEvaluation, Verdict
from multitask_rl.training.backend import CreditedSample

from .cases import Case
from .naive.guard import ActingGuard
from .naive.records import Attempt, Number, Sample
from .naive.settings import FAILED
from .naive.step import Result, Run, Teacher
from .product import (
    Product,
    ProductStep,
    arithmetic,
    given_of,
    rename_given,
    temporary_directory,
    without_a_clock,
)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What both sides may be apart."""

    relative: float
    """Gradients (of the norm of the whole), means over tokens and samples (of their size, at least 0.3)."""
    noise: float = 0.0
    """A gradient may be further apart where this relative noise moves it as far (see above)."""
    update: float
    """... of weights after the same gradient, of the norm of the update."""
    per_token: float
    """... of advantages, log-probabilities, values and returns, of their largest, at least 1."""
    too_close: float
    """A clip or filter nearer than this may fall either way: such a step is not compared further."""
    tiny: float
    """An advantage below this may be 0 on one side: its sign and what is counted by it are not compared."""


NUMBER = 1e-9
"""... of rewards, costs, statistics, levels, shares, multipliers (of their size, at least 0.3)."""
TOLERANCES = {
    # the same sums in another order
    "float64": Tolerance(relative=1e-9, update=1e-9, per_token=1e-9, too_close=1e-10, tiny=1e-9),
    # logits, norms and rotary angles of the forward pass, values, rewards, advantages, averaged reference
    "float32": Tolerance(
        relative=1e-5, noise=2.0**-24, update=1e-5, per_token=2e-5, too_close=1e-5, tiny=1e-6
    ),
}
NOTHING = 1e-12
"""A gradient, and a difference of weights, that is 0 but for float64's rounding."""
SKETCH = 1e-5
"""... of norms of the tasks' gradients, of the largest."""
ROUNDINGS = 4.0
REPEATS = 8

TOKEN_METRICS = ("loss", "entropy", "ratio", "approx_kl", "clip_fraction", "dual_clip_fraction", "is_weight")
TOKEN_METRICS += (
    "mismatch",
    "kl_loss",
    "nll",
    "value_loss",
    "value_clip_fraction",
    "policy_loss",
    "teacher_kl",
)
CREDIT_METRICS = ("kl", "response_kl", "reward_scale", "advantage_rms", "reward_running_mean")
CREDIT_METRICS += ("value_mean", "value_scale")
STEP_METRICS = ("weight", "share_requested", "share_sampled", "share_trained", "kl_coefficient")
STEP_METRICS += ("reward_std", "headroom", "informative_rate", "overlong_prompts")


@dataclass
class Comparison:
    """Of one case."""

    problems: list[str] = field(default_factory=list)
    compared: int = 0
    """Steps."""
    rollbacks: int = 0
    too_close: int = 0
    """Steps of which a decision was too close to call; the later steps of the case are left out."""


class _FromProduct(Teacher):
    """Every update starts from the product's weights, so that no rounding adds up."""

    def __init__(self, found: ProductStep) -> None:
        self._updates = iter(found.updates)
        self._now: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None

    def gradients(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        self._now = next(self._updates, None)
        return own if self._now is None or set(self._now[0]) != set(own) else self._now[0]

    def weights(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        return own if self._now is None else dict(self._now[1])


def compare(case: Case) -> Comparison:
    """Run ``case`` on both sides."""
    torch.set_num_threads(1)
    result = Comparison()
    with arithmetic(case.arithmetic), without_a_clock(), temporary_directory() as directory:
        product = Product(case, Path(directory))
        try:
            result.problems += _compare(case, product, result)
        finally:
            product.close()
    return result


def _compare(case: Case, product: Product, count: Comparison) -> Iterator[str]:
    run = Run(case.settings, given_of(case, product), product.weights())
    tolerance = TOLERANCES[case.arithmetic]
    every = case.settings.eval_every
    resumed_at, resumes = {case.resumed_at, *case.changes} - {0}, case.resumed_after_rollback
    for _ in range(case.num_steps):
        number = run.step_number
        if number in resumed_at:
            resumed_at.discard(number)
            problems = [f"resume at {number}: {text}" for text in _reopen(product, run, number)]
            yield from problems
            if problems:
                return
        if case.settings.acting:
            action = "rollback"
            while action == "rollback":
                action, differences = _compare_inspection(run, product, tolerance)
                count.rollbacks += action == "rollback"
                problems = [f"evaluation {number}, {action or 'go on'}: {text}" for text in differences]
                yield from problems
                if problems or action == "stop":
                    return
                if action == "rollback" and resumes:
                    yield from _reopen(product, run)
                    resumes = False
            number = run.step_number
        elif run.unmeasured and number % every:
            product.evaluate()
            run.look_at_new()
            problems = [f"look at {number}: {text}" for text in _compare_looks(run, product, tolerance)]
            yield from problems
            if problems:
                return
        elif every and (number or case.changes) and number % every == 0:
            problems = [
                f"evaluation {number}: {text}" for text in _compare_evaluation(run, product, tolerance)
            ]
            yield from problems
            if problems or product.guard.decision.action is GuardAction.rollback:
                return
        found = product.step()
        found.updates = [u for u in found.updates if u[0]]
        start = copy.deepcopy(run) if tolerance.noise else run  # what noise does is computed from it
        before = {name: w.clone() for name, w in run.weights.items()}
        try:
            result = run.step(_FromProduct(found))
        except AssertionError as error:
            yield f"step {number}: {error}"
            return
        # what is 0 but for rounding, an advantage or a KL term's gradient, is a step on one side only
        is_tiny = any(_is_rounding(c, tolerance.tiny) for c in found.credited)
        both = [*(g for g, _ in found.updates), *(u.gradients for u in result.updates)]
        is_tiny |= any(_norm(gradients.values()) < tolerance.tiny for gradients in both)
        is_cut = is_tiny and len(found.updates) != len(result.updates)
        is_cut |= any(
            0.0
            < _norm(w for n, w in (ours | own.gradients).items() if (n in ours) != (n in own.gradients))
            < tolerance.tiny
            for (ours, _), own in zip(found.updates, result.updates, strict=False)
        )
        if result.margin < tolerance.too_close or is_cut:
            count.too_close += 1
            return
        count.compared += 1
        differences = _compare_step(run, start, before, result, found, tolerance)
        problems = [f"step {number}: {text}" for text in differences]
        yield from problems
        if problems:
            return


def _reopen(product: Product, run: Run, step: int | None = None) -> Iterator[str]:
    """End and begin anew; tasks may be others then, or get other names."""
    case = product.case
    product.end()
    run.reopen()

    def rename(origins: Mapping[str, str]) -> None:
        known = {case.origin(o.name): o.name for o in [*case.settings.tasks, *case.settings.anchors]}
        names = {known[origin]: new for origin, new in origins.items()}
        if names:
            case.rename(names)
            rename_given(run.given, case, names)
            run.rename(names)

    if step is not None and step in case.changes:
        case.change(step)
        rename(case.renames.get(step, {}))
        product.begin_anew()
        product.open()
        known, given = run.given.chosen, given_of(case, product)
        given.chosen |= {name: known.get(name, {}) for name in given.chosen}
        run.refit(given, product.weights())
        for name, weight in product.weights().items():
            if _norm([weight - run.weights[name]]) > NOTHING:
                yield f"weight {name} is not the same"
        return
    if case.renamed and not case.origins:
        rename(case.renamed)
    product.begin_anew()


def _compare_inspection(run: Run, product: Product, tolerance: Tolerance) -> tuple[str, list[str]]:
    """Let both evaluate, judge and save what is due; return what the guard did, and the differences."""
    action = product.evaluate()
    numbers, own_action, is_good = run.inspect()
    if action != own_action:
        said = product.guard.decision.reason
        return action, [
            f"the guard's action is {action or 'none'} ({said}), reference {own_action or 'none'}"
        ]
    problems = list(_compare_numbers(run, product, numbers, tolerance)) if numbers else []
    problems += _compare_looks(run, product, tolerance)
    if numbers and product.guard.decision.judged_good != is_good:
        problems.append(f"judged good {product.guard.decision.judged_good}, reference {is_good}")
    return action, problems + list(_compare_state(run, product, tolerance))


def _compare_state(run: Run, product: Product, tolerance: Tolerance) -> Iterator[str]:
    """What a rollback restores, and what a guard that acts changes."""
    guard, trainer = run.guard, product.trainer
    assert isinstance(guard, ActingGuard)
    names = [t.name for t in run.settings.trained]
    known = {s: entry.judged_good for s, entry in trainer.parts.store.checkpoints.entries.items()}
    for name, found, own in (
        ("checkpoints", known, {at: c.is_good for at, c in run.checkpoints.items()}),
        ("factors", product.guard.weight_factors(), guard.factors),
        ("version", trainer.actor.policy_version, run.version),
        ("left out", {n: trainer.tasks[n].num_overlong for n in names}, {n: run.left_out[n] for n in names}),
        ("draws", {n: trainer.tasks[n].stream.draw for n in names}, {n: run.draws[n] for n in names}),  # type: ignore[union-attr]
    ):
        if found != own:
            yield f"{name} {found}, reference {own}"
    rate = product.guard.lr_factor(trainer.step)
    yield from _compare_number("factor on the learning rate", rate, guard.rate(run.step_number))
    for name, weight in product.weights().items():
        if _norm([weight - run.weights[name]]) > NOTHING:
            yield f"weight {name} is not the same"
    shares = trainer.scheduler.weights()
    for name, share in run.scheduler.shares().items():
        yield from _compare_number(f"share of {name}", shares[name], share)
        owed = trainer.scheduler.carry.get(name)
        yield from _compare_number(f"owed to {name}", owed or 0.0, run.scheduler.carry.get(name, 0.0))
    for name in names:
        beta = trainer.tasks[name].kl.coefficient
        yield from _compare_number(f"beta of {name}", beta, run.kls[name].beta, tolerance.relative)
        for m in run.multipliers[name]:
            found_value = trainer.tasks[name].multipliers[m.rule.name].value
            yield from _compare_number(f"multiplier {name}/{m.rule.name}", found_value, m.value)


def _compare_evaluation(run: Run, product: Product, tolerance: Tolerance) -> Iterator[str]:
    product.evaluate()
    numbers, alarms, is_good = run.evaluate()
    yield from _compare_numbers(run, product, numbers, tolerance)
    decision = product.guard.decision
    if (decision.action is GuardAction.rollback) != alarms:
        yield f"guard decides {decision.action}, reference: alarm {alarms}"
    if decision.judged_good != is_good:
        yield f"judged good {decision.judged_good}, reference {is_good}"


def _compare_looks(run: Run, product: Product, tolerance: Tolerance) -> Iterator[str]:
    """Compare the evaluation of what is new since a resume."""
    names = {key.partition("/")[0] for key in run.looks}
    if found := names ^ set(product.looks):
        yield f"evaluated at the resume {sorted(product.looks)}, not the same: {sorted(found)}"
        return
    for name, evaluation in product.looks.items():
        yield from _compare_task(run, name, evaluation, run.looks, tolerance)
    product.looks = {}


def _compare_task(
    run: Run, name: str, found: TaskEvaluation, numbers: Mapping[str, Number], tolerance: Tolerance
) -> Iterator[str]:
    is_scored = any(t.name == name and t.has_rewards for t in run.settings.tasks)
    relative = NUMBER if is_scored else tolerance.relative  # a loss or a KL comes of the model
    own = {k.removeprefix(f"{name}/"): v for k, v in numbers.items() if k.startswith(f"{name}/")}
    yield from _compare_statistics(name, found.metrics, own, relative)
    main = {"primary": numbers[name]} if name in numbers else {}
    yield from _compare_statistics(name, {"primary": found.primary}, main, relative)


def _compare_numbers(
    run: Run, product: Product, numbers: Mapping[str, Number], tolerance: Tolerance
) -> Iterator[str]:
    for task in [*run.settings.tasks, *run.settings.anchors]:
        evaluation = product.evaluations[task.name]
        yield from _compare_task(run, task.name, evaluation, numbers, tolerance)
    scored = [t.name for t in run.settings.tasks if t.has_rewards]
    metrics = product.guard.metrics()
    for key, detector in run.guard.detectors.items():
        if detector.count:
            demonstrated = detector.value if detector.demonstrated is None else detector.demonstrated
            known = {"value": detector.value, "demonstrated": demonstrated, "cusum": detector.cusum}
            for name, value in (known | {"cusum_limit": detector.limit}).items():
                found = metrics.get(f"guard/{key}/{name}")
                own_relative = NUMBER if key.partition("/")[0] in scored else tolerance.relative
                yield from _compare_number(f"guard/{key}/{name}", found, value, own_relative)
    for task in run.settings.trained:
        level = product.trainer.scheduler.metrics().get(f"task/{task.name}/level")
        if level is not None:
            yield from _compare_number(f"level of {task.name}", level, run.scheduler.level(task.name))


def _compare_step(
    run: Run,
    start: Run,
    before: Mapping[str, Tensor],
    result: Result,
    found: ProductStep,
    tolerance: Tolerance,
) -> Iterator[str]:
    if dict(found.report.quotas) != result.quotas:
        yield f"quotas {dict(found.report.quotas)}, reference {result.quotas}"
        return
    yield from _compare_records("drawn", found.report.drawn, result.drawn)
    yield from _compare_records("kept", found.report.kept, result.kept)
    yield from _compare_samples(found, result.samples, tolerance)
    yield from _compare_updates(start, before, found, result, tolerance)
    tiny = tolerance.tiny
    rounded = {c.sample.task for c in found.credited if _is_tiny(c.advantages, tiny)}
    rounded |= {s.task for s in result.samples if s.advantages is not None and _is_tiny(s.advantages, tiny)}
    for task in run.settings.tasks:
        beside = [n for n in found.numbers if n.startswith(f"task/{task.name}/") and task.evaluation_only]
        if beside:
            yield f"{beside} of a task that is only evaluated"
    for task in run.settings.trained:
        own = {**result.metrics[task.name], **{n: x.mean for n, x in result.numbers[task.name].items()}}
        tokens = () if task.name in rounded else TOKEN_METRICS
        names = (*tokens, *CREDIT_METRICS, *STEP_METRICS, *result.numbers[task.name])
        names += tuple(n for n in own if n.startswith(("multiplier/", "pool/")))
        largest = max(
            (float(s.advantages.abs().max()) for s in result.samples if s.task == task.name), default=0.0
        )
        longest = max((len(s.ids) for s in result.samples if s.task == task.name), default=0)
        for name in names:
            # losses are sums that nearly cancel, a KL one over all tokens of a response
            size = largest if name in tokens else float(longest) if name in ("kl", "response_kl") else 0.0
            of_tensors = name in (*tokens, *CREDIT_METRICS, "kl_coefficient")
            number = found.numbers.get(f"task/{task.name}/{name}")
            yield from _compare_number(
                f"{task.name}/{name}",
                number,
                own.get(name),
                tolerance.relative if of_tensors else NUMBER,
                size,
            )
        yield from _compare_statistics(task.name, found.statistics[task.name], result.numbers[task.name])
        known = set(result.numbers[task.name])
        for name in found.numbers:
            prefix = f"task/{task.name}/"
            if (
                name.startswith((f"{prefix}cost", f"{prefix}reward/", f"{prefix}environment/"))
                and name.removeprefix(prefix) not in known
            ):
                yield f"{name} is {found.numbers[name]}, the reference has none"
        if task.name in found.levels:
            yield from _compare_number(
                f"level of {task.name}", found.levels[task.name], run.scheduler.level(task.name)
            )
        beta = run.kls[task.name].beta
        yield from _compare_number(f"beta of {task.name}", found.betas[task.name], beta, tolerance.relative)
        for m in run.multipliers[task.name]:
            yield from _compare_number(
                f"multiplier {task.name}/{m.rule.name}", found.multipliers[task.name][m.rule.name], m.value
            )
    yield from _compare_parts(run, result, found)
    if found.held != run.scheduler.held:
        yield f"held by the gate: {sorted(found.held)}, reference {sorted(run.scheduler.held)}"
    for name, share in run.scheduler.shares().items():
        yield from _compare_number(f"share of {name}", found.shares[name], share)


def _compare_parts(run: Run, result: Result, found: ProductStep) -> Iterator[str]:
    """Compare norms and cosines of the tasks' gradients, which the product knows to float32."""
    names = [t.name for t in run.settings.tasks]
    known = {key for key in found.numbers if "/cosine/" in key or key.endswith("/grad_norm")}
    known = {key for key in known if key.startswith("task/")}
    largest = max((float(g.norm()) for g in result.parts.values()), default=0.0)
    for a, own in result.parts.items():
        key = f"task/{a}/grad_norm"
        yield from _compare_number(key, found.numbers.get(key), float(own.norm()), SKETCH, largest)
        known.discard(key)
    clear = [n for n in names if n in result.parts and float(result.parts[n].norm()) > 0.01 * largest > 0.0]
    for a in clear:
        for b in clear:
            if a != b:
                key, (x, y) = f"task/{a}/cosine/{b}", (result.parts[a], result.parts[b])
                cosine = float(x @ y) / float(x.norm() * y.norm())
                yield from _compare_number(key, found.numbers.get(key), cosine, 100.0 * SKETCH)
    if not result.parts and known:
        yield f"gradients are compared: {sorted(known)}, not in the reference"


def _compare_statistics(
    task: str, found: Mapping[str, Statistic], expected: Mapping[str, Number], relative: float = NUMBER
) -> Iterator[str]:
    for name in found:
        if name.startswith(("pass@", "maj@")) and name not in expected:
            yield f"{task}/{name} is {found[name]}, the reference has none"
    for name, own in expected.items():
        if name not in found:
            yield f"{task}/{name} is missing"
            continue
        s = found[name]
        if (s.n, s.direction.value) != (own.n, own.direction):
            yield f"{task}/{name}: n, direction {s.n, s.direction.value}, reference {own.n, own.direction}"
        yield from _compare_number(f"{task}/{name}", s.mean, own.mean, relative)
        yield from _compare_number(f"error of {task}/{name}", s.error, own.error, relative)


def _compare_number(
    name: str, found: float | None, expected: float | None, relative: float = NUMBER, size: float = 0.0
) -> Iterator[str]:
    if found is not None and not math.isfinite(found):
        found = None
    if expected is not None and not math.isfinite(expected):
        expected = None
    if found is None or expected is None:
        if found is not expected:
            yield f"{name} is {found}, reference {expected}"
    elif abs(found - expected) > relative * max(0.3, size, abs(expected)):
        yield f"{name} is {found!r}, reference {expected!r}"


def _name(scored: Scored) -> tuple[str, int, int, int]:
    r = scored.rollout
    return r.task, r.prompt.draw, r.sample, r.attempt


def _compare_records(what: str, found: Sequence[Scored], expected: Sequence[Attempt]) -> Iterator[str]:
    ours, theirs = [_name(s) for s in found], [a.name for a in expected]
    if sorted(ours) != sorted(theirs):
        yield (
            f"{what}: only product {sorted(set(ours) - set(theirs))}, only reference "
            f"{sorted(set(theirs) - set(ours))}"
        )
        return
    if ours != theirs:
        yield f"{what}: another order: {ours}, reference {theirs}"
    by_name = {a.name: a for a in expected}
    for s in found:
        a = by_name[_name(s)]
        failed = s.failure is not None or s.rollout.failure is not None
        if (failed, s.rollout.rejected) != (a.failed, a.refused):
            yield f"{what} {a.name}: failed, refused {failed, s.rollout.rejected}, {a.failed, a.refused}"
        if s.rollout.response_ids != a.ids or s.rollout.policy_version != a.version:
            yield f"{what} {a.name}: response of version {s.rollout.policy_version}, reference {a.version}"
        if not a.failed and a.answers[0].logprobs:
            turns = s.rollout.turns or [s.rollout]
            found = [(turn.response, turn.finish_reason) for turn in turns]
            own = [(answer.text, answer.finish) for answer in a.answers]
            if (found, s.rollout.response, s.rollout.finish_reason) != (own, own[-1][0], a.finish):
                said = [*found, (s.rollout.response, s.rollout.finish_reason)]
                yield f"{what} {a.name}: text and end {said}, reference {own}, {a.finish}"
        yield from _compare_number(f"{what} {a.name} reward", s.reward, a.reward)
        for name, result in s.breakdown.items():
            yield from _compare_number(f"{what} {a.name} {name}", _value(result), _plain(a.values.get(name)))
        for name, verdict in s.rollout.verdicts.items():
            cost = verdict.cost if isinstance(verdict, Verdict) and verdict.applicable else None
            yield from _compare_number(f"{what} {a.name} cost {name}", cost, a.cost(name))


def _value(result: Score | Failure | NotApplicable) -> float | None:
    return result.value if isinstance(result, Score) else None


def _plain(value: float | str | None) -> float | None:
    return None if value == FAILED or isinstance(value, str) else value


def _compare_samples(found: ProductStep, expected: Sequence[Sample], tolerance: Tolerance) -> Iterator[str]:
    if len(found.credited) != len(expected):
        yield f"{len(found.credited)} samples, reference {len(expected)}"
        return
    for c, s in zip(found.credited, expected, strict=True):
        name = _name(c.sample.scored)
        is_same = list(c.sample.prompt_ids) == s.answers[0].context and list(c.sample.response_ids) == s.ids
        if name[:3] != s.name[:3] or not is_same:
            yield f"sample {name}, reference {s.name}"
            return
        counted = c.choices.tolist() if c.choices is not None else [True] * len(s.ids)
        if counted != [is_choice and not s.is_masked for is_choice in s.is_choice]:
            yield f"{name}: in the loss {counted}, reference {s.is_choice}, masked {s.is_masked}"
        yield from _compare_number(f"{name} fraction", c.fraction, s.fraction)
        yield from _compare_number(f"{name} credited reward", c.sample.reward, s.reward)
        chosen = torch.tensor(s.is_choice)
        assert s.advantages is not None
        yield from _compare_tensor(
            f"{name} advantages", c.advantages[chosen], s.advantages[chosen], tolerance
        )
        for what in ("old_logprobs", "old_values", "returns"):
            yield from _compare_tensor(f"{name} {what}", getattr(c, what), getattr(s, what), tolerance)
        yield from _compare_tensor(f"{name} ref_logprobs", c.ref_logprobs, s.reference_logprobs, tolerance)
        if c.has_gradient != s.is_active and not _is_rounding(c, tolerance.tiny):
            yield f"{name}: trained on {c.has_gradient}, reference {s.is_active}"


def _is_tiny(advantages: Tensor, bound: float) -> bool:
    """Whether the sign of an advantage is a matter of its last bit."""
    return bool(((advantages != 0.0) & (advantages.abs() < bound)).any())


def _is_rounding(c: CreditedSample, bound: float) -> bool:
    """Whether an advantage of 0 came out as the last bit of a sum: the sample is then computed in vain."""
    return 0.0 < float(c.advantages.abs().max()) < bound


def _compare_tensor(
    name: str, found: Tensor | None, expected: Tensor | None, tolerance: Tolerance
) -> Iterator[str]:
    if found is None or expected is None:
        if found is not expected:
            yield f"{name} is {found}, reference {expected}"
        return
    if not expected.numel():
        return
    gap = (found.double() - expected).abs().max()
    if gap > tolerance.per_token * max(1.0, float(expected.abs().max())):
        yield f"{name} is {found.tolist()}, reference {expected.tolist()}"


def _compare_updates(
    start: Run, before: Mapping[str, Tensor], found: ProductStep, result: Result, tolerance: Tolerance
) -> Iterator[str]:
    updates = found.updates
    if len(updates) != len(result.updates):
        yield f"{len(updates)} optimizer steps, reference {len(result.updates)}"
        return
    for number, ((gradients, weights), own) in enumerate(zip(updates, result.updates, strict=True)):
        for part in ("actor", "critic"):
            ours = {n: g for n, g in gradients.items() if n.startswith("critic.") == (part == "critic")}
            theirs = {n: g for n, g in own.gradients.items() if n.startswith("critic.") == (part == "critic")}
            if set(ours) != set(theirs):
                yield f"update {number}: gradients of {sorted(set(ours) ^ set(theirs))} on one side only"
                continue
            size = _norm(theirs.values())
            gap = _norm([ours[n] - theirs[n] for n in ours])
            if gap <= tolerance.relative * size + NOTHING:
                continue
            if gap > ROUNDINGS * _moved_by_noise(start, found, result, number, set(ours), tolerance.noise):
                worst = max(ours, key=lambda n: float((ours[n] - theirs[n]).norm()))
                off = f"off by {gap / max(size, 1e-30):.2g} of its norm {size:.3g}"
                yield f"update {number}: {part}'s gradient is {off}, most in {worst}"
        moved = _norm([own.weights[n] - before[n] for n in weights])
        gap = _norm([weights[n] - own.weights[n] for n in weights])
        if gap > tolerance.update * moved + NOTHING:
            yield f"update {number}: weights are off by {gap:.2g}, the update is {moved:.2g}"
        before = weights


def _moved_by_noise(
    start: Run, found: ProductStep, exact: Result, update: int, names: set[str], noise: float
) -> float:
    """How far noise moves the gradient of one update, by norm over ``names``."""
    furthest = 0.0
    for repeat in range(REPEATS if noise else 0):
        run = copy.deepcopy(start)
        run.noise = noise
        torch.manual_seed(repeat)
        gradients = run.step(_FromProduct(found)).updates[update].gradients
        moved = _norm([gradients[n] - exact.updates[update].gradients[n] for n in names])
        furthest = max(furthest, moved)
    return furthest


def _norm(tensors: Any) -> float:
    return math.sqrt(math.fsum(float(t.square().sum()) for t in tensors))
