"""Sandbox: runs untrusted programs."""

from multitask_rl.sandbox.base import (
    AssertsTask,
    Ending,
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
    open_sandbox,
    shared_sandbox,
)

__all__ = [
    "AssertsTask", "Ending", "Limits", "Outcome", "Program", "Sandbox", "ScriptTask", "StdioTask",
    "StdioTest", "Task", "TestResult", "UnittestTask", "open_sandbox", "shared_sandbox",
]  # fmt: skip
