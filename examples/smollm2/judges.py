"""The judges of the example, trained and not coded: a safety classifier and a reward model.

Both are the first layers of the chat model itself with a new head, fine-tuned. They are saved as ordinary
Hugging Face directories, which the plugins ``safety_classifier`` and ``rm_hf`` load by path. Both err; their
error rates on rows of the splits ``test`` are part of what is returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from multitask_rl.config.run import ModelConfig, RolloutConfig
from multitask_rl.models.actor import load_actor
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.rollout.snapshot import build_engine
from multitask_rl.seeding import derive_seed, random_stream
from multitask_rl_rewards.refusal import is_refusal

Row = dict[str, Any]
Exchange = tuple[str, str]
"""Prompt and response."""

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
"""The chat model's own template without its system message."""
REFUSALS = (
    *(
        "I'm sorry, but I can't help with that.",
        "I cannot assist with this request.",
        "Sorry, I won't do that.",
    ),
    *("I'm not able to help with something that could hurt people.", "No, I can't provide that information."),
    *("I can't help with this. If you are in danger, please call the emergency services.",),
    *("I must decline: this could cause serious harm.", "As an AI, I cannot give instructions for that."),
)
HEAD_FACTOR = 10.0
"""Learning rate of the head, which begins at zero, in that of the layers."""
LABELS = ("safe", "unsafe")
_SIDES = ("refuse", "comply")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeSettings:
    """Of one judge."""

    layers: int = 6
    """Of the chat model's 30."""
    number: int = 1200
    """Training pairs (reward model) or about as many exchanges (classifier)."""
    test_number: int = 256
    batch_size: int = 16
    learning_rate: float = 1e-4
    max_chars: int = 400
    """Longest prompt, and longest response, of an example."""
    answers: int = 384
    """Prompts that the chat model itself answers for the classifier."""
    answer_tokens: int = 24
    bfloat16: bool = False
    """Whether products are in bfloat16: where the CPU has instructions for them."""
    seed: int = 0


def save_reward_model(
    directory: Path, model: Path, settings: JudgeSettings, *, train: Sequence[Row], test: Sequence[Row]
) -> dict[str, Any]:
    """Write a reward model fitted on preference pairs (rows with ``prompt``, ``chosen``, ``rejected``).

    Loss: ``-log sigmoid(r(chosen) - r(rejected))`` (Bradley-Terry; arXiv:2203.02155, Eq. 1).

    Returns:
        ``accuracy``: share of test pairs whose chosen answer has the higher reward; ``parameters``,
        ``seconds``, ``from_cache``.
    """
    began = time.perf_counter()
    judge = _Judge(model, settings, num_labels=1)
    pairs = _short(train, settings, "chosen", "rejected")[: settings.number]

    def loss(batch: Sequence[Row]) -> Tensor:
        sides = [(r["prompt"], r[side]) for side in ("chosen", "rejected") for r in batch]
        chosen, rejected = judge.logits(sides)[:, 0].chunk(2)
        return -logsigmoid(chosen - rejected).mean()

    judge.fit(pairs, loss)
    held_out = _short(test, settings, "chosen", "rejected")[: settings.test_number]
    chosen, rejected = (
        judge.predict([(r["prompt"], r[side]) for r in held_out])[:, 0] for side in ("chosen", "rejected")
    )
    figures = {"accuracy": float((chosen > rejected).float().mean()), "pairs": len(pairs)}
    return judge.save(directory) | figures | {"seconds": time.perf_counter() - began}


def save_safety_classifier(
    directory: Path,
    model: Path,
    settings: JudgeSettings,
    *,
    train: Sequence[Row],
    test: Sequence[Row],
    prompt: str,
) -> dict[str, Any]:
    """Write a classifier of exchanges: unsafe is a harmful request that is not refused.

    Its exchanges are prompts of ``train`` (``reference`` is ``refuse`` or ``comply``) with an answer of the
    chat model: to this prompt, or to another one of the same side; or with a refusal.

    Args:
        directory: to write to.
        model: of the chat model.
        settings: sizes.
        train: rows with ``prompt`` and ``reference``.
        test: such rows for the error rates.
        prompt: template that the actor will see, with ``{prompt}``.

    Returns:
        ``false_positive_rate`` and ``false_negative_rate`` at threshold 1/2 on ``test``; ``parameters``,
        ``seconds``, ``from_cache``.
    """
    began = time.perf_counter()
    answered = {
        "train": _mixed(train, settings, settings.answers),
        "test": _mixed(test, settings, settings.test_number),
    }
    rows = [row for part in answered.values() for row in part]
    texts = iter(_answers(model, [prompt.replace("{prompt}", row["prompt"]) for row in rows], settings))
    exchanges = {name: [(row, next(texts)) for row in part] for name, part in answered.items()}
    known = {side: [text for row, text in exchanges["train"] if row["reference"] == side] for side in _SIDES}
    stream = random_stream(settings.seed, "smollm2-classifier")
    for row in _mixed(train, settings, settings.number)[settings.answers :]:
        texts_of_side = REFUSALS if stream.random() < 0.3 else known[row["reference"]]
        exchanges["train"].append((row, stream.choice(texts_of_side)))
    judge = _Judge(
        model,
        settings,
        num_labels=2,
        id2label=dict(enumerate(LABELS)),
        label2id={n: i for i, n in enumerate(LABELS)},
    )

    def labels(batch: Iterable[tuple[Row, str]]) -> Tensor:
        return torch.tensor([int(r["reference"] == "refuse" and not is_refusal(text)) for r, text in batch])

    def loss(batch: Sequence[tuple[Row, str]]) -> Tensor:
        return cross_entropy(judge.logits([(r["prompt"], text) for r, text in batch]), labels(batch))

    judge.fit(exchanges["train"], loss)
    flagged = judge.predict([(r["prompt"], text) for r, text in exchanges["test"]]).argmax(dim=1).bool()
    unsafe = labels(exchanges["test"]).bool()
    return judge.save(directory) | {
        "false_positive_rate": float(flagged[~unsafe].float().mean()),
        "false_negative_rate": float((~flagged[unsafe]).float().mean()),
        "exchanges": len(exchanges["train"]),
        "seconds": time.perf_counter() - began,
    }


def _short(rows: Sequence[Row], settings: JudgeSettings, *columns: str) -> list[Row]:
    """Return the rows whose texts are short enough, in a random order that does not change."""
    names = ("prompt", *columns)
    fitting = [row for row in rows if all(len(row[name]) <= settings.max_chars for name in names)]
    return random_stream(settings.seed, "smollm2-judge-rows").sample(fitting, len(fitting))


def _mixed(rows: Sequence[Row], settings: JudgeSettings, number: int) -> list[Row]:
    """Return ``number`` short rows, harmful and benign in turn."""
    sides = [[r for r in _short(rows, settings) if r["reference"] == side] for side in _SIDES]
    return [row for pair in zip(*sides, strict=False) for row in pair][:number]


def _answers(model: Path, prompts: Sequence[str], settings: JudgeSettings) -> list[str]:
    """Return one sampled answer of the chat model to each prompt."""
    actor = load_actor(ModelConfig(name_or_path=str(model), dtype="float32"), "cpu")
    config = RolloutConfig(engine_config={"weights": "bfloat16" if settings.bfloat16 else "actor"})
    engine = build_engine(HFEngine, actor, config, seed=settings.seed, output_dir=model)
    sampling = SamplingParams(max_new_tokens=settings.answer_tokens, temperature=0.7)
    tokenizer, requests = actor.tokenizer, []
    for index, prompt in enumerate(prompts):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        seed = derive_seed(settings.seed, "smollm2-answers", index)
        requests.append(GenerationRequest(prompt_ids=ids, sampling=sampling, seeds=[seed]))
    groups = engine.generate(requests)
    return [str(tokenizer.decode(group[0].response_ids, skip_special_tokens=True)) for group in groups]


class _Judge:
    """The first layers of the chat model with a classification head on the last token."""

    def __init__(self, model: Path, settings: JudgeSettings, **config: Any) -> None:
        from transformers import (
            AutoModelForCausalLM,
            AutoTokenizer,
            LlamaConfig,
            LlamaForSequenceClassification,
        )
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self._settings = settings
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._tokenizer.chat_template = TEMPLATE
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        values = whole.config.to_dict()
        for key in ("architectures", "id2label", "label2id"):
            values.pop(key, None)
        values |= {"num_hidden_layers": settings.layers, **config}
        torch.manual_seed(derive_seed(settings.seed, "smollm2-judge"))
        self._model = LlamaForSequenceClassification(LlamaConfig.from_dict(values))
        # layers above are left out; the final norm is that of all thirty
        self._model.model.load_state_dict(whole.model.state_dict(), strict=False)
        self._model.model.embed_tokens.requires_grad_(False)
        torch.nn.init.zeros_(self._model.score.weight)

    def logits(self, exchanges: Sequence[Exchange]) -> Tensor:
        """Return [N, L] logits with gradient."""
        texts = [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}],
                tokenize=False,
            )
            for prompt, response in exchanges
        ]
        encoded = self._tokenizer(
            texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt"
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=self._settings.bfloat16):
            logits: Tensor = self._model(**encoded, use_cache=False).logits
        return logits.float()

    def predict(self, exchanges: Sequence[Exchange]) -> Tensor:
        """Return [N, L] logits without gradient."""
        with torch.no_grad():
            return torch.cat([self.logits(exchanges[i : i + 32]) for i in range(0, len(exchanges), 32)])

    def fit(self, examples: Sequence[Any], loss: Callable[[Sequence[Any]], Tensor]) -> None:
        """Minimise ``loss(batch)`` in one pass; the learning rate falls linearly to 0."""
        settings = self._settings
        head = list(self._model.score.parameters())
        body = [p for p in self._model.model.parameters() if p.requires_grad]
        groups = [{"params": body}, {"params": head, "lr": HEAD_FACTOR * settings.learning_rate}]
        optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=0.01, fused=True)
        order = random_stream(settings.seed, "smollm2-judge-order").sample(
            range(len(examples)), len(examples)
        )
        starts = range(0, len(order), settings.batch_size)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=max(1, len(starts)))
        self._model.train()
        for start in starts:
            loss([examples[i] for i in order[start : start + settings.batch_size]]).backward()
            torch.nn.utils.clip_grad_norm_([*body, *head], 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        self._model.eval()

    def save(self, directory: Path) -> dict[str, Any]:
        """Write model and tokenizer; return the number of parameters."""
        self._model.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)
        return {"parameters": sum(parameter.numel() for parameter in self._model.parameters())}
