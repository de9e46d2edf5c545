"""Scaled rotary positions: what each type does to the frequencies, by identities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, Phi3Config, Qwen2Config, Qwen2ForCausalLM

from model_builders import build_tokenizer
from multitask_rl.config.run import ModelConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import load_actor
from multitask_rl.models.rope import context_length, scale_rope

TRAINED = 32
THETA = 10_000.0


def _config(**further: Any) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=TRAINED,
        initializer_range=0.4,
        rope_theta=THETA,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **further,
    )


def _model(scaling: dict[str, Any] | None = None) -> Any:
    config = _config()
    if scaling:
        scale_rope(config, scaling)
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).eval()


def _frequencies(model: Any) -> torch.Tensor:
    return model.model.rotary_emb.inv_freq


IDS = torch.randint(2, 64, (1, 3 * TRAINED), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_linear_scaling_is_the_trained_model_at_divided_positions() -> None:
    positions = torch.arange(3 * TRAINED).unsqueeze(0)
    # without a mask, positions that do not go up by one would be read as packed sequences
    given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "use_cache": False}
    scaled = _model({"type": "linear", "factor": 4.0})
    expected = _model()(position_ids=positions / 4.0, **given).logits
    found = scaled(position_ids=positions, **given).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert context_length(scaled.config) == 4 * TRAINED


def test_ntk_keeps_the_fastest_frequency_and_divides_the_slowest_by_the_factor() -> None:
    plain, scaled = _model(), _model({"type": "ntk", "factor": 8.0})
    ratio = _frequencies(plain) / _frequencies(scaled)
    torch.testing.assert_close(ratio[0], torch.tensor(1.0))
    torch.testing.assert_close(ratio[-1], torch.tensor(8.0))
    assert bool((ratio.diff() > 0).all())
    assert context_length(scaled.config) == 8 * TRAINED


def test_yarn_interpolates_by_wavelength_and_sharpens_attention() -> None:
    plain, scaled = _model(), _model({"type": "yarn", "factor": 4.0})
    ratio = _frequencies(plain) / _frequencies(scaled)
    # shorter than the trained context by far: as trained; longer than it: interpolated
    wavelength = 2 * torch.pi / _frequencies(plain)
    assert bool((ratio[wavelength > TRAINED] > 3.9).all())
    torch.testing.assert_close(ratio[0], torch.tensor(1.0))
    # eq. 22 of the paper
    expected = 0.1 * torch.log(torch.tensor(4.0)).item() + 1.0
    assert scaled.model.rotary_emb.attention_scaling == pytest.approx(expected)
    assert context_length(scaled.config) == 4 * TRAINED


@torch.no_grad()
def test_dynamic_scaling_changes_nothing_within_the_trained_length() -> None:
    plain, scaled = _model(), _model({"type": "dynamic", "factor": 2.0})
    short = IDS[:, :TRAINED]
    assert torch.equal(plain(input_ids=short).logits, scaled(input_ids=short).logits)
    assert not torch.allclose(plain(input_ids=IDS).logits, scaled(input_ids=IDS).logits, atol=1e-3)
    assert context_length(scaled.config) == 2 * TRAINED


def test_longrope_covers_the_length_in_which_its_frequencies_stay() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [float(i) for i in range(1, 9)]}
    rope = {"rope_type": "longrope", "rope_theta": THETA, **factors}
    config = Phi3Config(
        **{"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 2, "pad_token_id": 0},
        **{"max_position_embeddings": 256, "original_max_position_embeddings": 48},
        rope_parameters={**rope, "original_max_position_embeddings": 48},
    )
    assert context_length(config) == 48


def test_further_keys_go_to_the_model_and_the_base_stays() -> None:
    config = _config()
    scale_rope(config, {"type": "yarn", "factor": 4.0, "beta_fast": 16, "attention_factor": 1.0})
    assert config.rope_parameters["beta_fast"] == 16
    assert config.rope_parameters["rope_theta"] == THETA
    torch.manual_seed(0)
    assert Qwen2ForCausalLM(config).model.rotary_emb.attention_scaling == 1.0


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"type": "su", "factor": 2.0}, "type is 'su'; allowed: linear, ntk, dynamic, yarn"),
        ({"factor": 2.0}, "type is None"),
        ({"type": "yarn"}, "factor is None; it must be a number > 1"),
        ({"type": "yarn", "factor": 1}, "must be a number > 1"),
        ({"type": "yarn", "factor": "4"}, "must be a number > 1"),
    ],
)
def test_what_cannot_be_is_refused(scaling: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        scale_rope(_config(), scaling)


def test_models_without_rotary_positions_or_already_scaled_are_refused() -> None:
    with pytest.raises(ConfigError, match="a gpt2 model has no rotary positions"):
        scale_rope(GPT2Config(), {"type": "linear", "factor": 2.0})
    config = _config()
    scale_rope(config, {"type": "yarn", "factor": 2.0})
    with pytest.raises(ConfigError, match=r"already scales its positions \(yarn, factor 2.0\)"):
        scale_rope(config, {"type": "yarn", "factor": 2.0})


def test_an_actor_is_loaded_scaled_and_hands_the_scaling_on(tmp_path: Path) -> None:
    _model().save_pretrained(tmp_path / "actor")
    build_tokenizer().save_pretrained(tmp_path / "actor")
    name = str(tmp_path / "actor")
    assert load_actor(ModelConfig(name_or_path=name)).max_length == TRAINED
    scaling = {"type": "yarn", "factor": 4.0}
    actor = load_actor(ModelConfig(name_or_path=name, rope_scaling=scaling))
    assert actor.max_length == 4 * TRAINED
    actor.save_for_engine(tmp_path / "engine")
    again = load_actor(ModelConfig(name_or_path=str(tmp_path / "engine")))
    assert again.max_length == 4 * TRAINED
    assert torch.equal(_frequencies(again.model), _frequencies(actor.model))
    with pytest.raises(ConfigError, match="type is 'fast'"):
        load_actor(ModelConfig(name_or_path=name, rope_scaling={"type": "fast", "factor": 2}))
