"""Samples of many turns: the learner against a loop over the sampled tokens that shares no code with it."""

import json
import random
from dataclasses import replace

import pytest
import torch

from learner_benches import Bench, RanksBench, moments, relative_difference
from model_builders import VOCABULARY, build_actor, sample_scored
from multitask_rl.algorithms.base import TokenBatch
from multitask_rl.config.run import LoraConfig, ModelConfig
from multitask_rl.config.task import KLSpec
from multitask_rl.models.actor import Actor
from multitask_rl.models.lora import add_adapters
from multitask_rl.plugins import ALGORITHMS, build_plugin, load_plugin
from multitask_rl.records import SamplingParams, Turn
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.training.microbatch import build_microbatches

ON_POLICY = [
    "ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo", "cispo", "opo", "gdpo",
    "constrained_decoding",
]  # fmt: skip
LAYOUTS = [("bucketed", 100), ("packed", 100_000), ("shared", 100_000), ("shared", 150)]


def as_episodes(scored, *, forks=False, seed=0):
    """Cut each response into turns and put random tokens of a world between them."""
    rng = random.Random(seed)
    episodes = []
    for one in scored:
        left, turns = len(one.rollout.response_ids), []
        while left:
            number = rng.randint(1, left)
            given = [rng.randrange(2, 20) for _ in range(rng.randint(1, 6))] if turns else []
            context = None
            if forks and turns and rng.random() < 0.4:
                given, context = [], [rng.randrange(2, 20) for _ in range(rng.randint(2, 12))]
            turns.append(Turn(num_tokens=number, given_ids=given, context_ids=context))
            left -= number
        rollout = replace(
            one.rollout, turns=turns, token_limit=64, sampling=SamplingParams(max_new_tokens=20)
        )
        episodes.append(replace(one, rollout=rollout))
    return episodes


CHOICES = ["ab", "abba", "cab=", "+1-1", "7"]


def under_grammar(episodes, *, forks=False):
    """Sample each again: every answer is one of ``CHOICES``, perhaps cut, between tokens of a world."""
    actor, rng = build_actor(), random.Random(3)
    engine = HFEngine(actor.model, eos_token_ids=[1], pad_token_id=0, grammars=lambda: actor.grammars)
    for one in episodes:
        rollout = one.rollout
        rollout.response_ids, rollout.rollout_logprobs, rollout.turns = [], [], []
        rollout.token_limit = 64
        rollout.sampling = SamplingParams(max_new_tokens=4, grammar=json.dumps({"choices": CHOICES}))
        context = list(rollout.prompt.prompt_ids)
        for number in range(rng.randint(2, 3) if forks else rng.randint(1, 3)):
            turn = Turn(num_tokens=0)
            if number and forks and rng.random() < 0.6:
                turn.context_ids = context = [rng.randrange(2, 20) for _ in range(5)]
            elif number:
                turn.given_ids = [rng.randrange(30, len(VOCABULARY)) for _ in range(rng.randint(1, 4))]
                context = context + turn.given_ids
            request = GenerationRequest(
                prompt_ids=context, sampling=rollout.sampling, seeds=[rng.randrange(2**60)]
            )
            ((answer,),) = engine.generate([request])
            turn.num_tokens = len(answer.response_ids)
            context = context + answer.response_ids
            rollout.turns.append(turn)
            rollout.response_ids += answer.response_ids
            rollout.rollout_logprobs += answer.rollout_logprobs
    return episodes


def allowed_after(written):
    """Return the tokens that lead on to one of ``CHOICES``, whose every character is a token, or end it."""
    text = "".join(VOCABULARY[i] for i in written)
    following = {c[len(text)] for c in CHOICES if c.startswith(text) and c != text}
    return [1] * (text in CHOICES) + sorted(map(VOCABULARY.index, following))


def contexts(sample):
    """Yield every sampled token with all tokens before it and those that were allowed in its place."""
    tokens, answers = list(sample.prompt_ids), iter(sample.response_ids)
    for turn in sample.turns:
        tokens = list(turn.context_ids) if turn.context_ids is not None else tokens + turn.given_ids
        written = []
        for _ in range(turn.num_tokens):
            token = next(answers)
            has_grammar = bool(sample.scored.rollout.sampling.grammar)
            yield list(tokens), token, allowed_after(written) if has_grammar else list(range(len(VOCABULARY)))
            tokens.append(token)
            written.append(token)


def naive_gradient(bench, task, shares):
    """One forward per sampled token; the algorithm's own loss; sums over rollouts as the definition says."""
    actor, algorithm, spec = bench.actor, bench.tasks[task].algorithm, bench.tasks[task].spec
    reference = bench.main.runner.reference
    for parameter in [*actor.model.parameters(), *bench.critic.parameters()]:
        parameter.grad = None
    own = [c for c in bench.credited if c.sample.task == task]
    logprobs, entropy, values, ref, sequence, counts = [], [], [], [], [], []
    for number, c in enumerate(own):
        for before, token, allowed in contexts(c.sample):
            out = actor.model(torch.tensor([before]), output_hidden_states=True)
            distribution = torch.distributions.Categorical(logits=out.logits[0, -1, allowed])
            place = allowed.index(token)
            logprobs.append(distribution.log_prob(torch.tensor(place)))
            # a forced token counts for a critic alone
            counts.append(len(allowed) > 1 or algorithm.needs_critic)
            entropy.append(distribution.entropy())
            if algorithm.needs_critic:
                trunk = bench.critic.trunk
                read = out if trunk is None else trunk(torch.tensor([before]), output_hidden_states=True)
                values.append(bench.critic.values(task, read.hidden_states[-1][0, -1:])[0])
            if reference is not None:
                with torch.no_grad():
                    other = reference(torch.tensor([before])).logits[0, -1, allowed]
                    ref.append(other.log_softmax(-1)[place])
            sequence.append(number)
    if spec.kl.coefficient:
        wanted = torch.cat([c.ref_logprobs for c in own])
        torch.testing.assert_close(torch.stack(ref), wanted, rtol=1e-4, atol=1e-5)
    kept = torch.tensor(counts)
    stack = torch.stack(logprobs)[kept]
    rollout = [x for c in own for x in c.sample.rollout_logprobs]
    sequence = torch.tensor(sequence)[kept]
    batch = TokenBatch(
        logprobs=stack,
        old_logprobs=stack.detach(),
        advantages=torch.cat([c.advantages for c in own])[kept],
        sequence=sequence,
        num_sequences=len(own),
        rollout_logprobs=torch.tensor(rollout)[kept],
        ref_logprobs=torch.stack(ref)[kept] if spec.kl.coefficient else None,
        entropy=torch.stack(entropy)[kept] if algorithm.config.entropy_coefficient else None,
        values=torch.stack(values) if values else None,
        old_values=torch.cat([c.old_values for c in own]) if values else None,
        returns=torch.cat([c.returns for c in own]) if values else None,
        kl_coefficient=bench.tasks[task].kl_coefficient if spec.kl.placement == "loss" else 0.0,
        kl_estimator=spec.kl.estimator,
    )
    loss = algorithm.loss(batch).loss
    rollouts = {id(c.sample.scored) for c in own}
    whole = {
        key: sum(int((sequence == i).sum()) for i, c in enumerate(own) if id(c.sample.scored) == key)
        for key in rollouts
    }
    total = torch.zeros(())
    for number, c in enumerate(own):
        part = loss[sequence == number]
        denominator = {
            "token": sum(whole.values()),
            "sequence": len(rollouts) * whole[id(c.sample.scored)],
            "constant": len(rollouts) * c.sample.scored.rollout.token_limit,
        }[algorithm.config.aggregation]
        total = total + shares * part.sum() / max(denominator, 1)
    total.backward()
    named = [*actor.model.named_parameters(), *bench.critic.named_parameters()]
    return {n: p.grad.clone() for n, p in named if p.grad is not None}


def bench_of(kind, **settings):
    bench = Bench(rate=1e-12, **settings)  # the loop meets the same weights
    if kind != "ppo":
        bench.algorithms["b"] = build_plugin(
            load_plugin(ALGORITHMS, kind, expects=("credit",)), {}, where="test"
        )
    bench.tasks["b"].algorithm = bench.algorithms["b"]
    bench.tasks["b"].spec.kl = KLSpec(coefficient=0.1)
    bench.tasks["b"].kl_coefficient = 0.1
    return bench


@pytest.mark.parametrize(
    ("kind", "forks"), [*((kind, True) for kind in ON_POLICY), ("ppo", False), ("grpo", False)]
)
def test_every_algorithm_has_the_gradient_of_the_loop_over_sampled_tokens(kind, forks):
    """Half of the episodes are sampled under a grammar."""
    task = "a" if kind == "ppo" else "b"
    scored = sample_scored(build_actor(), task, groups=2)
    episodes = as_episodes(scored[:4], forks=forks) + under_grammar(scored[4:], forks=forks)
    bench = bench_of(kind)
    bench.update(episodes, {task: 1.0})
    own = {True: [], False: []}
    for c in bench.credited:
        own[bool(c.sample.scored.rollout.sampling.grammar)].append(c)
    for credited in own.values():
        assert len(credited) > 4 if forks else len(credited) == 4
        assert any(c.advantages.any() for c in credited)
    if kind != "ppo":
        assert not all(c.choices.all() for c in own[True])
    assert relative_difference(bench.gradient, naive_gradient(bench, task, 1.0)) < 1e-5


def test_a_critic_with_a_trunk_of_its_own_reads_what_stands_before_the_sampled_tokens():
    episodes = as_episodes(sample_scored(build_actor(), "a", groups=2), forks=True)
    bench = bench_of("ppo", trunk="separate")
    bench.update(episodes, {"a": 1.0})
    expected = naive_gradient(bench, "a", 1.0)
    assert any(name.startswith("trunk") for name in expected)
    assert relative_difference(bench.gradient, expected) < 1e-5


@pytest.mark.parametrize("part", ["entropy", "correction", "kl in the loss", "adapters"])
def test_every_part_of_the_loss_meets_the_sampled_tokens(part):
    actor = build_actor()
    episodes = as_episodes(sample_scored(actor, "b", groups=2), forks=True)
    if part == "adapters":
        lora = LoraConfig(rank=2, target_modules="q_proj,v_proj")
        actor = Actor(add_adapters(actor.model, lora, 0), actor.tokenizer, ModelConfig(lora=lora))
        for name, parameter in actor.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    bench = bench_of("grpo", actor=actor, layout="shared")
    config = bench.algorithms["b"].config
    if part == "entropy":
        config.entropy_coefficient = 0.1
    if part == "correction":  # the engine's log-probabilities differ token by token
        config.truncated_is = 1.1
        rng = random.Random(1)
        for one in episodes:
            own = one.rollout
            own.rollout_logprobs = [x + rng.uniform(-0.5, 0.5) for x in own.rollout_logprobs]
    bench.tasks["b"].spec.kl = KLSpec(coefficient=0.1, placement="loss" if "kl" in part else "reward")
    if part == "adapters":  # their reference is the model without them
        bench.tasks["b"].spec.kl, bench.tasks["b"].kl_coefficient = KLSpec(), 0.0
    bench.update(episodes, {"b": 1.0})
    expected = naive_gradient(bench, "b", 1.0)
    assert relative_difference({n: bench.gradient[n] for n in expected}, expected) < 1e-5


def test_conditioning_has_the_gradient_of_the_loop_in_every_layout_and_the_reference_sees_no_control_token():
    episodes = as_episodes(sample_scored(build_actor(), "b", groups=2), forks=True)
    benches = []
    for layout, tokens in LAYOUTS:
        benches.append(Bench(rate=1e-12, second="reward_conditioned", layout=layout, tokens=tokens))
        benches[-1].update(episodes, {"b": 1.0})
    bench = benches[0]
    for parameter in bench.actor.model.parameters():
        parameter.grad = None
    actor, reference = bench.actor.model, bench.main.runner.reference
    loss, number = torch.zeros(()), 0
    for sample in (c.sample for c in bench.credited):
        assert sample.prompt_ids[0] in range(40, 45)
        for before, token, _ in contexts(sample):
            assert before[0] == sample.prompt_ids[0]
            own = actor(torch.tensor([before])).logits[0, -1].log_softmax(-1)
            with torch.no_grad():
                other = reference(torch.tensor([before[1:]])).logits[0, -1].log_softmax(-1)
            loss = loss - own[token] + 0.1 * (own.exp() * (own - other)).sum()
            number += 1
    (loss / number).backward()
    named = actor.named_parameters()
    expected = {n: p.grad for n, p in named if p.grad is not None}
    for bench in benches:
        assert relative_difference({n: bench.gradient[n] for n in expected}, expected) < 1e-5


@pytest.mark.parametrize("kind", ["ppo", "grpo", "grpo under a grammar"])
def test_every_layout_has_the_gradient_of_the_loop(kind):
    kind, _, has_grammar = kind.partition(" under ")
    task = "a" if kind == "ppo" else "b"
    scored = sample_scored(build_actor(), task, groups=3)
    episodes = under_grammar(scored, forks=True) if has_grammar else as_episodes(scored, forks=True)
    benches = []
    for layout, tokens in LAYOUTS:
        benches.append(bench_of(kind, layout=layout, tokens=tokens))
        benches[-1].update(episodes, {task: 1.0})
    expected = naive_gradient(benches[0], task, 1.0)
    for bench in benches:
        assert relative_difference(bench.gradient, expected) < 1e-5
        for found, first in zip(bench.credited, benches[0].credited, strict=True):
            torch.testing.assert_close(found.ref_logprobs, first.ref_logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aggregation", ["sequence", "constant"])  # "token": the tests above
def test_the_samples_of_a_forked_episode_count_as_one_by_their_tokens_in_the_loss(aggregation):
    episodes = under_grammar(sample_scored(build_actor(), "b", groups=2), forks=True)
    bench = bench_of("grpo")
    bench.algorithms["b"].config.aggregation = aggregation
    bench.update(episodes, {"b": 1.0})
    assert relative_difference(bench.gradient, naive_gradient(bench, "b", 1.0)) < 1e-5


@pytest.mark.parametrize("context", [1, 2])
def test_ranks_have_the_gradient_of_one_process(context):
    scored = sample_scored(build_actor(), "ab", groups=2)
    episodes = under_grammar(scored, forks=True) if context == 1 else as_episodes(scored, forks=True)
    alone, ranks = Bench(), RanksBench(num_ranks=2, context=context)
    try:
        alone.update(episodes)
        ranks.update(episodes)
        assert relative_difference(moments(ranks), moments(alone)) < 1e-5
    finally:
        ranks.backend.close()


def test_tokens_of_the_world_are_no_targets_in_any_layout():
    poison = 55
    episodes = as_episodes(sample_scored(build_actor(), "b", groups=2))
    for one in episodes:
        for turn in one.rollout.turns:
            turn.given_ids = [poison] * len(turn.given_ids)
        one.rollout.response_ids = [3 if i == poison else i for i in one.rollout.response_ids]
    samples = bench_of("grpo").algorithms["b"].select(episodes)
    behind = [s.behind_prompt() for s in samples]
    assert any(poison in tokens for tokens, _ in behind)
    for layout in ("bucketed", "packed", "shared"):
        for batch in build_microbatches(
            [s.prompt_ids for s in samples],
            [tokens for tokens, _ in behind],
            [sampled for _, sampled in behind],
            max_tokens=10**6,
            layout=layout,
            pad_token_id=0,
        ):
            assert poison not in batch.targets
            wanted = [token for i in batch.indices for token in samples[i].response_ids]
            assert batch.targets.tolist() == wanted
