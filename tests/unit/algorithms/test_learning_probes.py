"""Small policies that must learn, and must not: a two-token softmax policy of four prompts."""

from importlib.metadata import entry_points

import pytest
import torch
from algorithm_builders import credit_batch

from multitask_rl.algorithms.base import TokenBatch

VOCABULARY, PROMPTS, GROUP, TARGET = 6, 4, 16, 4
LENGTHS = torch.full((PROMPTS * GROUP,), 2)
CLASSES = {
    e.name: e.load() for e in entry_points(group="multitask_rl.algorithms") if e.name != "reward_conditioned"
}


def _train(name, reward_of, num_steps=60, seed=0):
    """Return the probability of TARGET as first token, averaged over prompts, before and after."""
    generator = torch.Generator().manual_seed(seed)
    algorithm = CLASSES[name](CLASSES[name].Config())
    logits = (0.1 * torch.randn(PROMPTS, 2, VOCABULARY, generator=generator)).double().requires_grad_(True)
    critic = torch.zeros(PROMPTS, 2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits, critic], lr=0.2)
    prompts = torch.arange(PROMPTS).repeat_interleave(GROUP)
    first = logits.detach().softmax(-1)[:, 0, TARGET].mean().item()
    for _ in range(num_steps):
        log_softmax = logits.log_softmax(-1)
        tokens = torch.multinomial(
            log_softmax.detach().exp()[prompts].view(-1, VOCABULARY), 1, generator=generator
        ).view(-1, 2)
        logprobs = log_softmax[prompts].gather(2, tokens[:, :, None]).flatten()
        values = critic[prompts].flatten()
        credit = algorithm.credit(
            credit_batch(reward_of(tokens, generator), prompts, LENGTHS, values=values.detach())
        )
        out = algorithm.loss(
            TokenBatch(
                logprobs=logprobs,
                old_logprobs=logprobs.detach(),
                advantages=credit.advantages,
                sequence=torch.arange(len(prompts)).repeat_interleave(2),
                num_sequences=len(prompts),
                values=values,
                old_values=values.detach(),
                returns=credit.returns,
            )
        )
        optimizer.zero_grad()
        out.loss.mean().backward()  # all responses have two tokens: every aggregation agrees
        optimizer.step()
    return first, logits.detach().softmax(-1)[:, 0, TARGET].mean().item(), logits.grad


def _target(tokens, generator):
    return (tokens[:, 0] == TARGET).double()


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_learns_the_first_token_in_60_steps(name):
    before, after, _ = _train(name, _target)
    assert before < 0.3
    assert after > 0.95


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_constant_reward_is_no_gradient(name):
    before, after, gradient = _train(name, lambda tokens, generator: torch.full((len(tokens),), 0.3), 1)
    assert after == before
    assert (gradient == 0).all()


@pytest.mark.parametrize("name", ["grpo", "ppo", "reinforce_pp", "rloo"])
def test_rewards_without_relation_to_the_answer_teach_nothing(name):
    # shuffling real rewards would not do: a baseline that lags lets a lucky batch reward itself
    def unrelated(tokens, generator):
        return torch.randint(0, 2, (len(tokens),), generator=generator).double()

    gains = []
    for seed in range(12):
        before, after, _ = _train(name, unrelated, num_steps=15, seed=seed)
        gains.append(after - before)
    standard_error = torch.tensor(gains).std().item() / len(gains) ** 0.5
    assert abs(sum(gains) / len(gains)) < 3 * standard_error
