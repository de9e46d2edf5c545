"""Task ``hh_preference``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry

_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


class HHPreference(SourcedTask):
    """HH-RLHF: helpful and harmless assistant answers by a preference reward model (arXiv:2204.05862).

    Single-turn prompts; the reward is a reward model's, the overlap with the chosen answer a metric.

    Content warning: prompts and rejected answers are offensive in part.
    """

    licence: ClassVar[str] = "MIT"
    files: ClassVar[tuple[str, ...]] = ("hh_pref_train.jsonl.gz", "hh_pref_test.jsonl")
    columns: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected")

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = "Anthropic/hh-rlhf"
        """Hugging Face id, file or directory."""
        reward_model: str = "OpenAssistant/reward-model-deberta-v3-large-v2"
        """Directory or Hugging Face id of the reward model (``rm_hf``)."""

    config: Config

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        return {
            "type": "ppo",
            "prompt": "{prompt}",
            "rewards": [
                plugin_entry("rm_hf", model_name=self.config.reward_model),
                plugin_entry("rouge", weight=0.0, reference_column="chosen"),
            ],
            "kl": {"coefficient": 0.05},
            "primary_metric": "rm_hf",
        }

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Translate two dialogues with the same first question; longer dialogues are left out."""
        chosen, rejected = str(row["chosen"]), str(row["rejected"])
        if chosen.count(_HUMAN) != 1 or rejected.count(_HUMAN) != 1:
            return None
        prompt, _, good = chosen.partition(_ASSISTANT)
        _, _, bad = rejected.partition(_ASSISTANT)
        if not good.strip() or not bad.strip():
            return None
        return {
            "prompt": prompt.removeprefix(_HUMAN).strip(),
            "chosen": good.strip(),
            "rejected": bad.strip(),
        }

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """The answer people preferred (full marks in the metric; a reward model may think otherwise)."""
        return str(row["chosen"])
