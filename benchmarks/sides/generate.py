"""``model.generate`` on the whole step's padded batch: sampling only."""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from workload import EOS, GROUP, PROMPTS, arguments, new_tokens, now, prompts, serve

args = arguments(__doc__)
torch.set_num_threads(args.threads)
torch.manual_seed(args.seed)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model, padding_side="left")
autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16")
texts = prompts(PROMPTS * args.steps, args.seed, args.workload)
new = new_tokens(args.workload)
minimum = {} if args.workload == "mixed" else {"min_new_tokens": new}


def step(number: int) -> dict[str, float]:
    """Sample one step's rollouts."""
    mine = texts[number * PROMPTS : (number + 1) * PROMPTS]
    began, cpu = now(), time.process_time()
    batch = tokenizer([t for t in mine for _ in range(GROUP)], return_tensors="pt", padding=True)
    with torch.inference_mode(), autocast:
        out = model.generate(
            input_ids=batch["input_ids"].to(args.device),
            attention_mask=batch["attention_mask"].to(args.device),
            do_sample=True,
            max_new_tokens=new,
            top_k=0,
            **minimum,
        )
    seconds, cpu = now() - began, time.process_time() - cpu
    response = out[:, batch["input_ids"].shape[1] :]
    ended = (response == EOS).cumsum(-1).cumsum(-1)
    return {"step_s": seconds, "cpu_s": cpu, "gen_s": seconds, "new_tokens": int((ended <= 1).sum())}


serve(step)
