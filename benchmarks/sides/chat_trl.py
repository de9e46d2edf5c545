"""A whole step of TRL's ``GRPOTrainer`` on a chat model; driven by ``chat_speed.py``."""

from __future__ import annotations

import tempfile
import time

import torch
from chat_prompts import LEARNING_RATE, TEMPERATURE, arguments, questions, reward
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer
from workload import answer, await_turn

args = arguments(__doc__)
ROWS = args.prompts * args.group
PASS_ROWS = max(number for number in range(1, 33) if ROWS % number == 0)
"""Responses of a forward and backward pass: 32 take 11 to 13 GiB. A step has ``ROWS``, whatever they are."""
torch.set_num_threads(args.threads)
set_seed(0)


class Turns(TrainerCallback):
    """Waits for the driver before each step and reports after it."""

    tokens = 0

    def on_step_begin(self, _arguments: object, _state: object, control: object, **_: object) -> None:
        """Wait for the turn."""
        control.should_training_stop = not await_turn()
        self.tokens, self.began, self.cpu = 0, time.perf_counter(), time.process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Report."""
        cpu = time.process_time() - self.cpu
        answer({"step_s": time.perf_counter() - self.began, "cpu_s": cpu, "new_tokens": self.tokens})


turns = Turns()


def score(
    completions: list[list[dict[str, str]]], completion_ids: list[list[int]], **_: object
) -> list[float]:
    """The reward; also counts what was generated."""
    turns.tokens += sum(map(len, completion_ids))
    return [reward(messages[0]["content"]) for messages in completions]


rows = [
    {"prompt": [{"role": "user", "content": text}]}
    for step in range(args.steps + 1)
    for text in questions(step, args.prompts, args.rows)
]
with tempfile.TemporaryDirectory() as output:
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=score,
        args=GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=args.engine.endswith("bfloat16"),
            fp16=False,
            per_device_train_batch_size=PASS_ROWS,
            gradient_accumulation_steps=ROWS // PASS_ROWS,
            num_generations=args.group,
            max_completion_length=args.new_tokens,
            max_steps=args.steps,
            learning_rate=LEARNING_RATE,
            beta=0.0,
            temperature=TEMPERATURE,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            gradient_checkpointing=False,
            disable_tqdm=True,
            shuffle_dataset=False,
            seed=0,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        callbacks=[turns],
    ).train()
