"""A Llama in a few lines, over right-padded rows; weights by their usual names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
LORA_ALPHA = 32.0
PAD = 0


def merged(weights: Weights) -> Weights:
    """The weights with low-rank adapters added: W + scale B A."""
    ends = (".lora_A.default.weight", ".lora_B.default.weight")
    adapted = [name.removesuffix(ends[0]) for name in weights if name.endswith(ends[0])]
    plain = {name: w for name, w in weights.items() if not name.endswith(ends)}
    for name in adapted:
        a, b = (weights[name + end] for end in ends)
        plain[f"{name}.weight"] = plain[f"{name}.weight"] + LORA_ALPHA / a.shape[0] * b @ a
    return plain


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _rotate(x: Tensor) -> Tensor:
    """Rotary positions of ``x`` [B, heads, T, D]; the two halves of D are the pairs."""
    length, width = x.shape[-2], x.shape[-1]
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    angle = torch.arange(length, dtype=x.dtype)[:, None] * frequency
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    first, second = x[..., : width // 2], x[..., width // 2 :]
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def hidden_states(weights: Weights, ids: Tensor, num_heads: int, num_kv: int) -> Tensor:
    """Return the last hidden states [B, T, H] of ``ids`` [B, T]."""
    # as everywhere with transformers, no gradient trains the padding token as an input
    x = torch.nn.functional.embedding(ids, weights["model.embed_tokens.weight"], padding_idx=PAD)
    rows, length, width = x.shape
    size = width // num_heads
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    number = 0
    while f"model.layers.{number}.input_layernorm.weight" in weights:
        own = f"model.layers.{number}."
        number += 1
        y = _rms_norm(x, weights[own + "input_layernorm.weight"])

        def heads(name: str, count: int, y: Tensor = y, own: str = own) -> Tensor:
            projected = y @ weights[f"{own}self_attn.{name}_proj.weight"].T
            return projected.view(rows, length, count, size).transpose(1, 2)

        q, k, v = _rotate(heads("q", num_heads)), _rotate(heads("k", num_kv)), heads("v", num_kv)
        k, v = (t.repeat_interleave(num_heads // num_kv, dim=1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(size)).masked_fill(future, -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width)
        x = x + mixed @ weights[own + "self_attn.o_proj.weight"].T
        y = _rms_norm(x, weights[own + "post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(y @ weights[own + "mlp.gate_proj.weight"].T)
        up = y @ weights[own + "mlp.up_proj.weight"].T
        x = x + (gate * up) @ weights[own + "mlp.down_proj.weight"].T
    return _rms_norm(x, weights["model.norm.weight"])


def before_each_token(
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    num_heads: int,
    num_kv: int,
) -> list[Tensor]:
    """Return the hidden states from which each response token is predicted: [T, H] per sample."""
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    hidden = hidden_states(weights, ids, num_heads, num_kv)
    return [
        hidden[i, len(prompt) - 1 : len(prompt) - 1 + len(response)]
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]


def logits_of(weights: Weights, hidden: Tensor) -> Tensor:
    """With one weight for embeddings and output where there is no other."""
    return hidden @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def sampled_logits(
    logits: Tensor, tokens: Sequence[int], temperature: float, top_k: int, top_p: float, margins: list[float]
) -> Tensor:
    """Return the logits [T, V] of the distribution that is sampled; a token that was sampled stays possible.

    Divided by the temperature, then the ``top_k`` likeliest, then of those the likeliest ones that together
    reach ``top_p``. ``margins`` gets how close the nearest decision was.
    """
    logits = logits / temperature
    if top_k <= 0 and top_p >= 1.0:
        return logits
    result = logits.clone()
    for t, row in enumerate(logits.detach()):
        order = row.argsort(descending=True)[: int((row > -math.inf).sum())].tolist()
        kept = order[:top_k] if top_k > 0 else order
        if 0 < top_k < len(order):
            margins.append(float(row[order[top_k - 1]] - row[order[top_k]]))
        if top_p < 1.0:
            mass, nucleus = 0.0, []
            for token, p in zip(kept, row[kept].softmax(-1).tolist(), strict=True):
                if nucleus:
                    margins.append(abs(mass - top_p))
                if nucleus and mass >= top_p:
                    break
                nucleus.append(token)
                mass += p
            if len(nucleus) < len(kept):  # of equal ones either may be the last
                margins.append(float(row[nucleus[-1]] - row[kept[len(nucleus)]]))
            kept = nucleus
        lost = [v for v in order if v not in kept and v != tokens[t]]
        result[t, lost] = -math.inf
    return result


def scores_of(logits: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of ``tokens`` [T] and entropies [T]."""
    logp = logits.log_softmax(-1)
    picked = logp[torch.arange(len(tokens)), torch.tensor(list(tokens))]
    entropy = -(logp.exp() * logp.masked_fill(logp == -math.inf, 0.0)).sum(-1)
    return picked, entropy
