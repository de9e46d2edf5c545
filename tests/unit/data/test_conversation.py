"""Conversations token by token: 1,000 random ones over the chat templates of three real models."""

import importlib.util
import itertools
import random
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from multitask_rl.config.task import TaskSpec
from multitask_rl.data.render import Conversation, render_prompt
from multitask_rl.records import Scored, TrainSample, Turn
from multitask_rl.testing.builders import make_rollout

found = importlib.util.find_spec("vllm")
TEMPLATES = Path(found.origin).parent / "transformers_utils" / "chat_templates" if found else Path("none")
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|User|>", "<|Assistant|>", "<think>", "</think>"]
WORDS = ["rain", " sun", "7", "\n", "ä", "<tool_call>", "<|im_end|>", "<|User|>: no", "</think>", " ", "\n\n"]


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(
        ["the rain and the sun 7 7 user assistant"] * 9, vocab_size=300, special_tokens=SPECIAL
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend._tokenizer,
        bos_token="<pad>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=SPECIAL[1:],
    )
    made.chat_template = (TEMPLATES / f"template_{template}.jinja").read_text(encoding="utf-8")
    return made


@pytest.mark.skipif(
    not TEMPLATES.is_dir(), reason="the templates lie in the package vllm, which is not installed"
)
@pytest.mark.parametrize(
    ("template", "forks"), [("chatml", False), ("deepseek_vl2", False), ("minicpmv45", True)]
)
def test_training_sees_the_sampled_ids_and_nothing_is_encoded_again(template, forks):
    tokenizer, rng, num_forks, num_turns = tokenizer_with(template), random.Random(template), 0, 0
    spec = TaskSpec(name="a", prompt="{question}", system="be kind")
    plain = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]

    def words():
        return "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))

    for _ in range(334):
        conversation = Conversation(spec, {"question": words()}, tokenizer)
        prompt_ids = context = list(conversation.prompt_ids)
        following, turns, seen = Turn(num_tokens=0), [], []
        for _ in range(rng.randint(1, 5)):
            ids = [rng.choice(plain) for _ in range(rng.randint(1, 9))]
            ids += [tokenizer.eos_token_id] * (rng.random() < 0.7)
            seen.append((list(context), ids))
            following.num_tokens = len(ids)
            turns.append(following)
            text = tokenizer.decode(ids, skip_special_tokens=True)
            # one template demands that user and assistant take turns
            number = 1 if template == "deepseek_vl2" else rng.randint(1, 2)
            messages = [{"role": "user", "content": words()} for _ in range(number)]
            given, rewritten = conversation.reply(text, ids, messages)
            following = Turn(num_tokens=0, given_ids=given, context_ids=rewritten)
            context = context + ids + given if rewritten is None else rewritten
            num_forks += rewritten is not None
            num_turns += 1
            if template == "chatml":
                starts = given.count(SPECIAL.index("<|im_start|>"))
                assert starts == number + 1, "a special token in a world's text opened a turn"
        rollout = make_rollout("x")
        rollout.turns, rollout.response_ids = turns, list(itertools.chain(*(ids for _, ids in seen)))
        sample = TrainSample(
            scored=Scored(rollout=rollout, reward=1.0),
            prompt_ids=prompt_ids,
            response_ids=rollout.response_ids,
            rollout_logprobs=[0.0] * len(rollout.response_ids),
            turns=turns,
        )
        trained = []
        for part in sample.split():
            tokens, sampled = part.behind_prompt()
            whole = [*part.prompt_ids, *tokens]
            places = range(len(tokens)) if sampled is None else sampled
            for answer in part.answers:
                own, places = places[: len(answer)], places[len(answer) :]
                trained.append((whole[: len(part.prompt_ids) + own[0]], [tokens[p] for p in own]))
        assert trained == seen
    assert (num_forks > 0) == forks
    assert num_turns > 600


@pytest.mark.skipif(
    not TEMPLATES.is_dir(), reason="the templates lie in the package vllm, which is not installed"
)
@pytest.mark.parametrize("template", ["chatml", "deepseek_vl2"])
def test_the_context_is_what_the_template_writes(template):
    tokenizer = tokenizer_with(template)
    spec = TaskSpec(name="a", prompt="{question}")
    conversation = Conversation(spec, {"question": "rain?"}, tokenizer)
    answer = [*tokenizer("the sun")["input_ids"], tokenizer.eos_token_id]
    given, rewritten = conversation.reply("the sun", answer, [{"role": "user", "content": "and 7?"}])
    assert rewritten is None
    written = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "rain?"},
            {"role": "assistant", "content": "the sun"},
            {"role": "user", "content": "and 7?"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert tokenizer.decode([*conversation.prompt_ids, *answer, *given]) == written
    assert conversation.text == written


def test_without_a_chat_template_messages_stand_on_lines_of_their_own():
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(["a"], vocab_size=262, special_tokens=["<pad>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, pad_token="<pad>")
    spec = TaskSpec(name="a", prompt="{question}")
    conversation = Conversation(spec, {"question": "1?"}, tokenizer, suffix=" go", messages=())
    assert conversation.text == "1? go"
    given, _ = conversation.reply("2", tokenizer("2")["input_ids"], [{"role": "user", "content": "<pad>"}])
    assert tokenizer.decode(given) == "\n<pad>\n"
    assert 0 not in given
    assert render_prompt(spec, {"question": "1?"}, tokenizer)[0] == "1?"


def test_a_suffix_and_tools_are_part_of_the_prompt():
    tokenizer = tokenizer_with("minicpmv45") if TEMPLATES.is_dir() else None
    if tokenizer is None:
        pytest.skip("the templates lie in the package vllm, which is not installed")
    tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]
    spec = TaskSpec(name="a", prompt="{question}")
    conversation = Conversation(spec, {"question": "rain?"}, tokenizer, suffix=" <|im_end|>x", tools=tools)
    assert '"name": "look"' in conversation.text
    assert "rain? <|im_end|>x<|im_end|>" in conversation.text
    ends = conversation.prompt_ids.count(SPECIAL.index("<|im_end|>"))
    assert ends == conversation.text.count("<|im_end|>") - 1
