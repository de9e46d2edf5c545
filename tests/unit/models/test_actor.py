"""Loading the actor."""

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch
from transformers import GPTJConfig, GPTJForCausalLM, MambaConfig, MambaForCausalLM

from model_builders import build_actor, build_model, build_tokenizer
from multitask_rl.config.run import ModelConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.data.render import render_prompt
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import load_actor, make_actor

MODELS = {
    "attention of its own": lambda: GPTJForCausalLM(
        GPTJConfig(vocab_size=60, n_positions=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=8)
    ),
    "none": lambda: MambaForCausalLM(MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1)),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
@torch.no_grad()
def test_a_model_without_the_usual_attention_is_loaded(build, tmp_path):
    model = build().eval()
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    loaded = load_actor(ModelConfig(name_or_path=str(tmp_path)), "cpu").model
    ids = torch.arange(2, 12).unsqueeze(0)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("setting", [{"autocast": True}, {"dtype": "bfloat16"}])
def test_bfloat16_is_warned_of_where_the_cpu_emulates_it(setting, tmp_path, monkeypatch, caplog):
    MODELS["attention of its own"]().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    config = ModelConfig(name_or_path=str(tmp_path), **setting)
    told = []
    for known in (
        {"architecture": "x86_64", "avx2": True},
        {"avx512_bf16": True},
        {"neon": True, "bf16": True},
    ):
        caplog.clear()
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known)
        load_actor(config, "cpu")
        told.append([record.getMessage() for record in caplog.records])
    name = "autocast" if "autocast" in setting else "dtype"
    assert told[1:] == [[], []]
    assert [f"model.{name}=" in text and "60 times as long" in text for text in told[0]] == [True]


def test_a_chat_template_in_the_model_s_directory_is_read_and_saved(tmp_path):
    MODELS["attention of its own"]().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    actor = load_actor(ModelConfig(name_or_path=str(tmp_path)), "cpu")
    actor.save(tmp_path / "saved")
    again = load_actor(ModelConfig(name_or_path=str(tmp_path / "saved")), "cpu")
    for tokenizer in (actor.tokenizer, again.tokenizer):
        assert render_prompt(TaskSpec(name="t"), {"prompt": "ab"}, tokenizer)[0] == "<ab>"


def test_a_saved_actor_is_loaded_with_its_own_tokenizer(tmp_path):
    # transformers takes its own class for "qwen2", which has a token more and drops spaces
    actor = build_actor()
    actor.save(tmp_path)
    again = load_actor(ModelConfig(name_or_path=str(tmp_path)), "cpu")
    assert again.model.config.model_type == "qwen2"
    assert len(again.tokenizer) == len(actor.tokenizer)
    assert again.tokenizer("ab c")["input_ids"] == actor.tokenizer("ab c")["input_ids"]


def test_an_actor_in_host_memory_names_the_device_that_it_will_compute_on():
    actor = build_actor()
    actor.place("cuda:1", on_host=True)
    assert actor.device == torch.device("cuda:1")
    assert next(actor.model.parameters()).device.type == "cpu"
    actor.place("cpu")
    assert actor.device == torch.device("cpu")


def test_adapters_whose_configuration_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="without a loadable causal language model"):
        load_actor(ModelConfig(name_or_path=str(tmp_path)), "cpu")


@pytest.mark.parametrize("given", [".", "checkpoints/step_00000020"])
def test_a_run_in_place_of_a_model_names_the_model_in_it(tmp_path, given):
    for step in (3, 20):
        build_actor().save(tmp_path / "checkpoints" / f"step_{step:08}" / "actor")
    with pytest.raises(ConfigError, match="is a run or a checkpoint") as refused:
        load_actor(ModelConfig(name_or_path=str(tmp_path / given)), "cpu")
    told = str(refused.value).rpartition("model.name_or_path=")[2]
    assert told == str(tmp_path / "checkpoints" / "step_00000020" / "actor")
    load_actor(ModelConfig(name_or_path=told), "cpu")


def test_a_model_whose_sampling_settings_transformers_does_not_save_is_saved(tmp_path):
    """Hub models hold a temperature without ``do_sample``: transformers loads and does not save them."""
    build_actor().save(tmp_path)
    given = {"temperature": 0.6, "eos_token_id": [1, 5]}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    actor = load_actor(ModelConfig(name_or_path=str(tmp_path)), "cpu")
    actor.save(tmp_path / "saved")
    saved = load_actor(ModelConfig(name_or_path=str(tmp_path / "saved")), "cpu").model.generation_config
    assert (saved.do_sample, saved.temperature, saved.eos_token_id) == (True, 0.6, [1, 5])


def test_generation_settings_that_no_save_takes_are_refused_before_training():
    model = build_model()
    model.generation_config.max_new_tokens = -1
    with pytest.raises(ConfigError, match=r"cannot save the model's generation_config.*max_new"):
        make_actor(model, build_tokenizer())


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("by_peft", [True, False])
def test_a_model_with_adapters_inside_is_refused(by_peft):
    """A checkpoint would hold adapters alone, or layers that transformers does not load."""
    import peft

    model, settings = build_model(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    if by_peft:
        model = peft.get_peft_model(model, settings).base_model.model
    else:
        try:
            model.add_adapter(settings)
        except ValueError as error:  # transformers 5.24 asks for a PEFT that is not out
            pytest.skip(str(error))
    with pytest.raises(ConfigError, match=r"has adapters.*merge_and_unload\(\).*model\.lora\.rank"):
        make_actor(model, build_tokenizer())


class Int8Linear(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.register_buffer("rounded", linear.weight.detach().to(torch.int8))


def share(model):
    model.model.layers[1].mlp = model.model.layers[0].mlp


def quantise(model):
    model.model.layers[0].mlp.up_proj = Int8Linear(model.model.layers[0].mlp.up_proj)


def round_in_place(model):
    weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    weight.data = weight.data.to(torch.int8)


def prepare_by_accelerate(model):
    model._original_forward = model.forward  # as prepare of Accelerator(mixed_precision="bf16")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (share, r"layers\.0\.mlp.*layers\.1\.mlp.* are one tensor"),
        (quantise, r"no 'model\.layers\.0\.mlp\.up_proj\.weight', as its Int8Linear"),
        (round_in_place, r"is quantised \('model\.layers\.0\.mlp\.up_proj\.weight'"),
        (prepare_by_accelerate, r"Accelerate prepared the model .*keep_fp32_wrapper=False"),
    ],
)
def test_a_model_that_a_checkpoint_would_not_hold_is_refused(change, told):
    model = build_model()
    change(model)
    with pytest.raises(ConfigError, match=told):
        make_actor(model, build_tokenizer())


def test_a_model_without_generation_settings_or_compiled_in_place_is_taken(tmp_path, caplog):
    model = build_model()
    model.generation_config = None
    model.compile(backend="eager")
    actor = make_actor(model, build_tokenizer())
    assert actor.model._compiled_call_impl is None
    assert "compile() is dropped" in caplog.text
    actor.save(tmp_path)
    assert load_actor(ModelConfig(name_or_path=str(tmp_path)), "cpu").model.generation_config is not None


def test_two_threads_may_load_at_the_same_time(tmp_path):
    build_actor().save(tmp_path)
    config = ModelConfig(name_or_path=str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        actors = list(pool.map(lambda _: load_actor(config, "cpu"), range(6)))
    assert not any(p.is_meta for actor in actors for p in actor.model.parameters())


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_warned_of(caplog):
    tokenizer, model = build_tokenizer(), build_model()
    make_actor(model, tokenizer)
    assert "embeds" not in caplog.text
    tokenizer.add_tokens(["<tool>"])
    size = len(tokenizer)
    make_actor(model, tokenizer)
    told = f"the tokenizer has {size} tokens and the model embeds {size - 1}: "
    assert told in caplog.text
    assert f"resize_token_embeddings({size})" in caplog.text
