"""Task ``helpful_instructions``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry


class HelpfulInstructions(SourcedTask):
    """Instructions with a written answer: Dolly (human), Alpaca, or rows with ``prompt`` and ``reference``.

    Overlap with the written answer (ROUGE-L), or a reward model where one is named.

    ROUGE knows words, not help: with it alone this is a task for supervised warm starts and smoke tests.
    """

    licence: ClassVar[str] = "CC BY-SA 3.0 (Dolly); CC BY-NC 4.0 (Alpaca)"
    files: ClassVar[tuple[str, ...]] = ("sft_dolly.jsonl", "sft_alpaca.jsonl.gz")

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = "databricks/databricks-dolly-15k"
        """Hugging Face id, file or directory."""
        reward_model: str = ""
        """Reward model (``rm_hf``) that replaces ROUGE as the reward; ROUGE stays as a metric."""

    config: Config

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        model = self.config.reward_model
        judges = [plugin_entry("rm_hf", model_name=model)] if model else []
        rewards = [*judges, plugin_entry("rouge", weight=0.0 if model else 1.0)]
        return {"prompt": "{prompt}", "rewards": rewards, "primary_metric": rewards[0]["plugin"]}

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Translate ``instruction`` with ``context``, ``response`` (Dolly) or ``input``, ``output``."""
        answer = row.get("response") or row.get("output")
        if not answer or not row.get("instruction"):
            return None
        context = row.get("context") or row.get("input")
        prompt = f"{row['instruction']}\n\n{context}" if context else row["instruction"]
        return {"prompt": prompt, "reference": answer}
