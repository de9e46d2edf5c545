"""The limit: a bare torch loop over ``transformers`` modules, no framework at all.

Fixed lengths: one prefill a prompt, cached decode, forward and backward. Mixed: the kinds apart (no prompt
padding), finished rows leave the cache, groups without variance are not trained on, the others in
length-sorted micro-batches under one global token denominator.
"""

from __future__ import annotations

import inspect
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast
from workload import (
    EOS,
    GROUP,
    LEARNING_RATE,
    MICROBATCH,
    PROMPTS,
    arguments,
    new_tokens,
    now,
    prompts,
    reward,
    serve,
)

args = arguments(__doc__)
torch.set_num_threads(args.threads)
torch.manual_seed(args.seed)
MIXED = args.workload == "mixed"
NEW = new_tokens(args.workload)
DEVICE = torch.device(args.device)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(DEVICE)
tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
# transformers 5.24 renames the argument
CACHE = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16")
texts = prompts(PROMPTS * args.steps, args.seed, args.workload)


def generate(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return responses [N * GROUP, NEW] and their lengths; uniform rows never end early."""
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
    cache.batch_repeat_interleave(GROUP)
    logits = logits.repeat_interleave(GROUP, 0)
    out = torch.zeros(len(logits), NEW, dtype=torch.long, device=DEVICE)
    lengths = torch.zeros(len(logits), dtype=torch.long, device=DEVICE)
    alive = torch.arange(len(logits), device=DEVICE)
    for t in range(NEW):
        token = torch.multinomial(logits.float().softmax(-1), 1)
        out[alive, t] = token[:, 0]
        lengths[alive] += 1
        keep = token[:, 0] != EOS
        if t == NEW - 1 or (MIXED and not keep.any()):
            break
        if MIXED and not keep.all():
            cache.batch_select_indices(keep.nonzero()[:, 0])
            alive, token = alive[keep], token[keep]
        logits = model(input_ids=token, **{CACHE: cache}, use_cache=True).logits[:, -1]
    return out, lengths


def step(number: int) -> dict[str, float]:
    """One step of reinforcement learning."""
    mine = texts[number * PROMPTS : (number + 1) * PROMPTS]
    kinds = list(dict.fromkeys(t[0] for t in mine)) if MIXED else [""]
    began, cpu = now(), time.process_time()
    parts = []
    with torch.inference_mode(), autocast:
        for kind in kinds:
            own = [t for t in mine if t.startswith(kind)]
            ids = torch.tensor([tokenizer(t)["input_ids"] for t in own], device=DEVICE)
            parts.append((own, ids, *generate(ids)))
    sampled = now()
    chunks = []
    for own, ids, out, lengths in parts:
        decoded = [
            tokenizer.decode(r[:n], skip_special_tokens=True)
            for r, n in zip(out.tolist(), lengths.tolist(), strict=True)
        ]
        scores = [reward(own[i // GROUP], text, args.workload) for i, text in enumerate(decoded)]
        grouped = torch.tensor(scores, device=DEVICE).view(-1, GROUP)
        spread = grouped.std(1, keepdim=True)
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / (spread + 1e-4)).view(-1)
        index = (spread[:, 0] > 0).repeat_interleave(GROUP).nonzero()[:, 0]
        full = torch.cat([ids.repeat_interleave(GROUP, 0), out], 1)
        for c in index[lengths[index].argsort()].split(MICROBATCH[args.workload]) if len(index) else []:
            width = ids.shape[1] + int(lengths[c].max())
            chunks.append((full[c, :width].clone(), ids.shape[1], lengths[c], advantages[c]))
    tokens = sum(int(n.sum()) for _, _, n, _ in chunks)
    rewarded = now()
    for x, prompt, lengths, advantages in chunks:
        t = x.shape[1] - prompt
        with autocast:
            logits = model(input_ids=x, logits_to_keep=t + 1).logits[:, :-1].float()
        logp = logits.log_softmax(-1).gather(-1, x[:, prompt:, None]).squeeze(-1)
        mask = torch.arange(t, device=DEVICE)[None] < lengths[:, None]
        (-(advantages[:, None] * (logp - logp.detach()).exp() * mask).sum() / tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    ended = now()
    new = sum(int(n.sum()) for _, _, _, n in parts)
    return {
        "step_s": ended - began,
        "cpu_s": time.process_time() - cpu,
        "gen_s": sampled - began,
        "train_s": ended - rewarded,
        "new_tokens": new,
    }


serve(step)
