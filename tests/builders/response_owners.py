"""Table of all readers of response text, with process, size, limits and escaping of each.

A response is untrusted input. Every module that reads ``Rollout.response`` appears in ``OWNERS`` exactly
once; a test checks this. ``docs/security.md`` shows the table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """One kind of consumer of response text."""

    name: str
    modules: tuple[str, ...]
    """Modules that read ``.response``; a name covers the modules below it."""
    process: str
    """Where the text is read."""
    size: str
    """How much text is read, and what happens to the rest."""
    limits: str
    """Limits of time and memory, and the effect of exceeding them."""
    escaping: str
    """Protection against the text being interpreted as something else."""


OWNERS = (
    Owner(
        name="programs",
        modules=("multitask_rl_rewards.code_evaluator",),
        process="sandbox: a process and namespaces per program; its source is read in a reward worker",
        size="20,000 characters are parsed (never compiled) outside; the sandbox takes the source whole",
        limits="`timeout`, `memory_mb` of the plugin; tests that a program does not live to see fail",
        escaping="source travels as bytes with a length; results come back in a closed format",
    ),
    Owner(
        name="checks in worker processes",
        modules=(
            "multitask_rl_rewards.ifeval",
            "multitask_rl_rewards.label_match",
            "multitask_rl_rewards.math_answer",
            "multitask_rl_rewards.refusal",
            "multitask_rl_rewards.rm_generative",
            "multitask_rl_rewards.shape",
            "multitask_rl_rewards.text",
            "multitask_rl_tasks.suite.expressions",
            "multitask_rl.scoring.shapes",
            "multitask_rl.scoring.foreign",
        ),
        process="reward worker: a killable process per plugin",
        size="whole; `math_answer` reads the last 4,000 characters",
        limits="`timeout_s` of the plugin, `scoring.worker_memory_mb`; the response alone pays (`overrun`)",
        escaping="none needed: text is compared, not run; patterns of this package take one pass",
    ),
    Owner(
        name="comparisons in the trainer's process",
        modules=("multitask_rl_rewards.text_match", "multitask_rl_rewards.tool_use"),
        process="trainer; a reward worker where the user gives a `pattern` or expressions for `arguments`",
        size="whole",
        limits="linear in the response and in the reference; a pattern has the limits of a worker",
        escaping="lone surrogates are replaced",
    ),
    Owner(
        name="reward models, classifiers and judges",
        modules=(
            "multitask_rl_rewards.fact_checker",
            "multitask_rl_rewards.llama_guard",
            "multitask_rl_rewards.rm_hf",
            "multitask_rl_rewards.safety_classifier",
        ),
        process="trainer (models on a device)",
        size="`max_length` tokens an input, `batch_size` inputs of 512 tokens or one longer a forward. "
        "Classifiers and guards read up to `max_parts` (64) overlapping parts of a response, and one of more "
        "counts as unsafe; reward models say `truncated`",
        limits="a forward cannot be killed: a response is bounded to `max_parts` inputs "
        "(a reward model: one)",
        escaping="special tokens are removed before the judge's template is filled in",
    ),
    Owner(
        name="environments",
        modules=("multitask_rl.step.episodes",),
        process="worker process of the worlds, killable; programs in the sandbox",
        size="whole",
        limits="`turn_timeout_s`; a call that takes longer ends its process",
        escaping="a tool gets arguments of its declared types; a call that cannot be read comes back",
    ),
    Owner(
        name="transport and cache",
        modules=("multitask_rl.scoring.round",),
        process="trainer",
        size="whole, once; the cache keeps a digest",
        limits="linear",
        escaping="pickled as text between the trainer and its own processes",
    ),
    Owner(
        name="records and trackers",
        modules=(
            "multitask_rl.records",
            "multitask_rl.tracking.jsonl",
            "multitask_rl.tracking.base",
            "multitask_rl.tracking.tensorboard",
            "multitask_rl.scoring.stats",
        ),
        process="trainer",
        size="whole, `tracking.store_rollouts` per task and step; an error of rewards quotes 200 characters",
        limits="linear",
        escaping="JSON; what a command shows of it goes through `printable`",
    ),
)
"""By kind; each module is owned once."""


def table() -> str:
    """Return the owners as a Markdown table."""
    rows = ["| text goes to | process | size | limits | escaping |", "|---|---|---|---|---|"]
    rows += [f"| {o.name} | {o.process} | {o.size} | {o.limits} | {o.escaping} |" for o in OWNERS]
    return "\n".join(rows)
