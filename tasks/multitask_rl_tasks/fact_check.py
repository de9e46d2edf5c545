"""Task ``fact_check``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry

_LABELS = ["SUPPORTS", "REFUTES"]


class FactCheck(SourcedTask):
    """FEVER: does the evidence support or refute the claim? (arXiv:1803.05355).

    Rows hold ``claim`` and ``evidence`` apart, so that ``fact_checker`` can be added as a constraint.
    """

    licence: ClassVar[str] = "CC BY-SA 3.0"
    files: ClassVar[tuple[str, ...]] = ("factcheck_fever.jsonl",)
    columns: ClassVar[tuple[str, ...]] = ("prompt", "reference", "labels", "claim", "evidence")

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = "copenlu/fever_gold_evidence"
        """Hugging Face id, file or directory."""
        checker: str = ""
        """Model of ``fact_checker`` that rejects responses the evidence contradicts; empty = none."""

    config: Config

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        settings: dict[str, Any] = {
            "prompt": "{prompt}\n\nDoes the evidence support the claim? Answer SUPPORTS or REFUTES.",
            "rewards": [plugin_entry("label_match")],
            "primary_metric": "label_match",
        }
        if self.config.checker:
            settings["type"] = "constrained_decoding"
            settings["constraints"] = [
                {"plugin": "fact_checker", "config": {"model_name": self.config.checker}}
            ]
        return settings

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Translate ``claim``, ``label``, ``evidence`` of the hub, or a prompt with lines of these names."""
        label = row.get("label") or row.get("reference")
        if label not in _LABELS:
            return None
        if row.get("claim"):
            claim, evidence = str(row["claim"]), _join(row["evidence"])
        else:
            claim, _, evidence = str(row["prompt"]).removeprefix("Claim:").partition("\nEvidence:")
        claim, evidence = claim.strip(), evidence.strip()
        prompt = f"Claim: {claim}\nEvidence: {evidence}"
        given = {"id": row["id"]} if isinstance(row.get("id"), str) else {}
        return {
            **given,
            "prompt": prompt,
            "claim": claim,
            "evidence": evidence,
            "reference": label,
            "labels": _LABELS,
        }


def _join(evidence: Any) -> str:
    """Evidence is text, or a list of [page, sentence number, sentence]."""
    if isinstance(evidence, str):
        return evidence
    return " ".join(str(item[-1]) if isinstance(item, (list, tuple)) else str(item) for item in evidence)
