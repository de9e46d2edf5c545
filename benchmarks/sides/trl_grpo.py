"""The peer: TRL's ``GRPOTrainer``, in an environment of its own."""

from __future__ import annotations

import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer
from workload import (
    GROUP,
    LEARNING_RATE,
    MICROBATCH,
    PROMPTS,
    answer,
    arguments,
    await_turn,
    new_tokens,
    now,
    prompts,
    reward,
)

args = arguments(__doc__)
torch.set_num_threads(args.threads)
set_seed(args.seed)
new = new_tokens(args.workload)
at_once = MICROBATCH["long"] if args.workload == "long" else PROMPTS * GROUP


class Turns(TrainerCallback):
    """Waits for the driver before each step and reports after it."""

    tokens = 0

    def on_step_begin(self, _arguments: object, _state: object, control: object, **_: object) -> None:
        """Wait for the turn."""
        control.should_training_stop = not await_turn()
        self.tokens, self.began, self.cpu = 0, now(), time.process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Report."""
        cpu = time.process_time() - self.cpu
        answer({"step_s": now() - self.began, "cpu_s": cpu, "new_tokens": self.tokens})


turns = Turns()


def score(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: object
) -> list[float]:
    """The reward; also counts what was generated."""
    turns.tokens += sum(map(len, completion_ids))
    return [reward(p, c, args.workload) for p, c in zip(prompts, completions, strict=True)]


with tempfile.TemporaryDirectory() as output:
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=score,
        args=GRPOConfig(
            output_dir=output,
            use_cpu=args.device == "cpu",
            bf16=args.dtype == "bfloat16",
            fp16=False,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=PROMPTS * GROUP // at_once,
            num_generations=GROUP,
            max_completion_length=new,
            max_steps=args.steps,
            learning_rate=LEARNING_RATE,
            beta=0.0,
            temperature=1.0,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=args.seed,
            dataloader_pin_memory=False,
            generation_kwargs=None if args.workload == "mixed" else {"min_new_tokens": new},
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": p} for p in prompts(PROMPTS * (args.steps + 1), args.seed, args.workload)]
        ),
        processing_class=PreTrainedTokenizerFast.from_pretrained(args.model, padding_side="left"),
        callbacks=[turns],
    ).train()
