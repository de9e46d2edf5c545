"""Sandbox: runs untrusted programs."""

from multitask_rl.sandbox.base import (
    AssertsTask,
    Limits,
    Outcome,
    Program,
    Sandbox,
    ScriptTask,
    StdioTask,
    StdioTest,
    Task,
    TestResult,
    UnittestTask,
    Verdict,
    open_sandbox,
    shared_sandbox,
)

__all__ = [
    "AssertsTask", "Limits", "Outcome", "Program", "Sandbox", "ScriptTask", "StdioTask", "StdioTest", "Task",
    "TestResult", "UnittestTask", "Verdict", "open_sandbox", "shared_sandbox",
]  # fmt: skip
