"""Small policies that must learn, and must not: a two-token softmax policy of four prompts."""

from importlib.metadata import entry_points

import pytest
import torch

from algorithm_builders import credit_batch, scored
from multitask_rl.algorithms.base import TokenBatch
from multitask_rl.algorithms.reward_conditioned import RewardConditioned

VOCABULARY, PROMPTS, GROUP, TARGET = 6, 4, 16, 4
LENGTHS = torch.full((PROMPTS * GROUP,), 2)
OTHERS = {"reward_conditioned", "anchor", "distill", "sft"}
"""Rewards do not move these by a policy gradient."""
CLASSES = {e.name: e.load() for e in entry_points(group="multitask_rl.algorithms") if e.name not in OTHERS}


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


def test_ppo_learns_alike_from_a_reward_model_of_another_scale():
    _, plain, _ = _train("ppo", _target)
    _, wild, _ = _train("ppo", lambda tokens, generator: 20.0 * _target(tokens, generator) - 50.0)
    assert wild == pytest.approx(plain, abs=1e-6)


def test_constrained_decoding_learns_to_be_accepted_from_its_refused_attempts():
    generator = torch.Generator().manual_seed(0)
    accepted = torch.tensor([True, True, False, False, False, False])
    after = {}
    for uses_refused in (True, False):
        algorithm = CLASSES["constrained_decoding"](CLASSES["constrained_decoding"].Config())
        logits = torch.zeros(VOCABULARY, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([logits], lr=0.1)
        for _ in range(60):
            log_softmax = logits.log_softmax(-1)
            attempts = _resample(log_softmax.detach().exp(), accepted, generator)
            if not uses_refused:
                attempts = attempts[accepted[attempts]]
            if len(attempts) == 0:
                continue
            rewards = accepted[attempts].double() + 0.1 * torch.rand(len(attempts), generator=generator)
            rewards = torch.where(accepted[attempts], rewards, algorithm.config.rejected_reward)
            credit = algorithm.credit(credit_batch(rewards))
            logprobs = log_softmax[attempts]
            batch = TokenBatch(
                logprobs=logprobs,
                old_logprobs=logprobs.detach(),
                advantages=credit.advantages,
                sequence=torch.arange(len(attempts)),
                num_sequences=len(attempts),
            )
            optimizer.zero_grad()
            algorithm.loss(batch).loss.mean().backward()
            optimizer.step()
        after[uses_refused] = logits.detach().softmax(-1)[accepted].sum().item()
    assert after[True] > 0.95
    assert after[False] < 0.8


def _resample(probs, accepted, generator):
    """Return all attempts of 16 slots, at most 4 each."""
    attempts = []
    for _ in range(16):
        for _ in range(4):
            token = torch.multinomial(probs, 1, generator=generator)
            attempts.append(token)
            if accepted[token]:
                break
    return torch.cat(attempts)


def test_reward_conditioning_concentrates_on_the_best_answers():
    quantiles = 4
    algorithm = RewardConditioned(RewardConditioned.Config(quantiles=quantiles, buffer_size=256))
    algorithm.bind(list(range(100, 100 + quantiles)))
    generator = torch.Generator().manual_seed(0)
    # one context per control token and one for the bare prompt [7]
    logits = torch.zeros(quantiles + 1, VOCABULARY, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)

    def context(prompt_ids):
        return prompt_ids[0] - 100 if prompt_ids[0] >= 100 else quantiles

    for step in range(60):
        prompt_ids = algorithm.condition([7], evaluation=False)
        probs = logits.detach()[context(prompt_ids)].softmax(-1)
        tokens = torch.multinomial(probs, 32, replacement=True, generator=generator).tolist()
        step_samples = [
            scored(float(t == TARGET), prompt_ids=prompt_ids, response_ids=[t], sample=i, draw=step)
            for i, t in enumerate(tokens)
        ]
        samples = algorithm.select(step_samples)
        rows = logits.log_softmax(-1)[[context(s.prompt_ids) for s in samples]]
        logprobs = rows[torch.arange(len(samples)), [s.response_ids[0] for s in samples]]
        batch = TokenBatch(
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            advantages=torch.ones(len(samples)),
            sequence=torch.arange(len(samples)),
            num_sequences=len(samples),
        )
        optimizer.zero_grad()
        algorithm.loss(batch).loss.mean().backward()
        optimizer.step()
    best = context(algorithm.condition([7], evaluation=True))
    assert logits.detach()[best].softmax(-1)[TARGET] > 0.9
    assert logits.detach()[quantiles].softmax(-1)[TARGET] == pytest.approx(1 / VOCABULARY)
