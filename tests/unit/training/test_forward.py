import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM

from model_builders import build_model
from multitask_rl.models.actor import learning
from multitask_rl.models.sampling import TokenMask
from multitask_rl.records import SamplingParams
from multitask_rl.training import forward
from multitask_rl.training.forward import forward_tokens, response_hidden, split_head
from multitask_rl.training.microbatch import build_microbatches

PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9, 10, 11, 12], [13, 14], [13, 14]]
RESPONSES = [[3 + (7 * i + j) % 40 for j in range(20 + 9 * i)] for i in range(5)]
SAMPLING = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=1.3, top_k=9),
    SamplingParams(),
]
TOKENS = sum(map(len, RESPONSES))
ROWS = 40
"""Tokens in a slice."""
BLOCK = 7
"""Tokens in a block: the last one of a slice is shorter."""


def run(model, layout, *, sliced, monkeypatch, entropy_gradient=True, mask_of=lambda batch: None):
    """Return log-probabilities, entropies and the gradient of a sum that weighs every token differently."""
    vocabulary = model.config.vocab_size
    monkeypatch.setattr(forward, "SLICE_CELLS", ROWS * vocabulary if sliced else 10**9)
    monkeypatch.setattr(forward, "BLOCK_CELLS", BLOCK * vocabulary if sliced else 10**9)
    (batch,) = build_microbatches(PROMPTS, RESPONSES, max_tokens=10**6, layout=layout, pad_token_id=0)
    model.zero_grad()
    sampling = [SAMPLING[i] for i in batch.indices]
    out = forward_tokens(model, batch, sampling, entropy_gradient=entropy_gradient, mask=mask_of(batch))
    weights = torch.linspace(-1, 2, TOKENS)
    loss = out.logprobs @ weights
    if entropy_gradient:
        loss = loss + out.entropy @ weights.flip(0)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    return out.logprobs.detach(), out.entropy.detach(), gradients


class RowsOfLogits(TorchDispatchMode):
    """The most rows that any tensor as wide as the vocabulary has, forward and backward; or any of a type."""

    def __init__(self, vocabulary, dtype=None):
        super().__init__()
        self.vocabulary, self.dtype, self.most = vocabulary, dtype, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            is_wide = isinstance(one, torch.Tensor) and one.dim() and one.shape[-1] == self.vocabulary
            if is_wide and self.dtype in (None, one.dtype):
                self.most = max(self.most, one.numel() // self.vocabulary)
        return result


@pytest.mark.parametrize("layout", ["bucketed", "packed", "shared"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kept", ["entropy", 0, 2 * ROWS, 10**9])
def test_slices_change_neither_values_nor_gradients(layout, tied, kept, monkeypatch):
    model = build_model(tied=tied)
    learns = {"entropy_gradient": kept == "entropy", "monkeypatch": monkeypatch}
    if kept != "entropy":
        monkeypatch.setattr(forward, "KEPT_BYTES", kept * 4 * model.config.vocab_size)
    whole = run(model, layout, sliced=False, **learns)
    slices = run(model, layout, sliced=True, **learns)
    assert torch.allclose(slices[0], whole[0], atol=1e-6)
    assert torch.allclose(slices[1], whole[1], atol=1e-6)
    scale = max(float(g.abs().max()) for g in whole[2])
    for found, expected in zip(slices[2], whole[2], strict=True):
        assert float((found - expected).abs().max()) <= 1e-6 * scale


def test_slices_computed_again_have_the_dropout_of_adapters_on_the_head_as_before(monkeypatch):
    adapters = LoraConfig(r=4, lora_dropout=0.5, target_modules="lm_head", task_type="CAUSAL_LM")
    model = get_peft_model(build_model(tied=False), adapters).eval()
    split_head(model)
    drawn = []
    (dropout,) = (m for n, m in model.named_modules() if n.endswith("lora_dropout.default"))
    dropout.register_forward_hook(lambda _module, _given, out: drawn.append(out == 0))
    monkeypatch.setattr(forward, "KEPT_BYTES", 0)
    with learning(model):
        run(model, "bucketed", sliced=True, entropy_gradient=False, monkeypatch=monkeypatch)
    first, again = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    assert len(first) == -(-TOKENS // ROWS)
    assert all(any(torch.equal(one, other) for other in again) for one in first)


@pytest.mark.parametrize("learns", [True, False])
def test_grammars_allow_the_same_tokens_in_slices(learns, monkeypatch):
    model = build_model()
    width = model.config.vocab_size

    def mask_of(batch):
        tokens = torch.arange(0, TOKENS, 3)  # the others are free; a block may have none or several
        allowed = torch.rand(len(tokens), width, generator=torch.Generator().manual_seed(0)) < 0.3
        allowed[torch.arange(len(tokens)), batch.targets[tokens]] = True
        padded = torch.nn.functional.pad(allowed, (0, -width % 8)).view(len(tokens), -1, 8)
        packed = (padded * 2 ** torch.arange(8)).sum(-1).to(torch.uint8)
        return TokenMask(
            tokens, packed, torch.arange(len(tokens)), torch.zeros(len(tokens), dtype=torch.bool)
        )

    options = {"monkeypatch": monkeypatch, "entropy_gradient": learns}
    whole = run(model, "packed", sliced=False, mask_of=mask_of, **options)
    slices = run(model, "packed", sliced=True, mask_of=mask_of, **options)
    free = run(model, "packed", sliced=True, **options)
    assert float((free[0] - whole[0]).abs().max()) > 0.1, "the masks have an effect"
    scale = max(float(g.abs().max()) for g in whole[2])
    for found, expected in zip((*slices[:2], *slices[2]), (*whole[:2], *whole[2]), strict=True):
        assert float((found - expected).abs().max()) <= 1e-6 * max(1.0, scale)


def test_on_a_cpu_no_operation_after_the_head_reads_more_than_a_block(monkeypatch):
    model = build_model(vocab_size=211)  # as wide as nothing else
    with torch.autocast("cpu", torch.bfloat16), RowsOfLogits(211, torch.float32) as seen:
        run(model, "shared", sliced=True, monkeypatch=monkeypatch, entropy_gradient=False)
    assert seen.most == BLOCK


def test_a_model_in_float64_learns_the_same(monkeypatch):
    found = [
        run(model, "packed", sliced=True, monkeypatch=monkeypatch, entropy_gradient=False)
        for model in (build_model(), build_model().double())
    ]
    scale = max(float(g.abs().max()) for g in found[0][2])
    for narrow, wide in zip(found[0][2], found[1][2], strict=True):
        assert float((narrow - wide).abs().max()) <= 1e-5 * scale


def test_no_tensor_of_all_tokens_times_the_vocabulary_exists(monkeypatch):
    model = build_model(vocab_size=211)  # as wide as nothing else
    rows = {}
    for sliced in (True, False):
        with RowsOfLogits(model.config.vocab_size) as seen:
            for learns in (True, False):
                run(model, "shared", sliced=sliced, monkeypatch=monkeypatch, entropy_gradient=learns)
        rows[sliced] = seen.most
    assert rows[False] >= TOKENS
    assert rows[True] <= ROWS


@pytest.mark.parametrize("kept", [0, 10**9])
def test_a_head_in_bfloat16_learns_as_much_from_tokens_it_is_sure_of(kept, monkeypatch):
    model = build_model(tied=False)
    head = model.get_output_embeddings()
    head.weight.data *= 150.0
    monkeypatch.setattr(forward, "KEPT_BYTES", kept)
    monkeypatch.setattr(forward, "SLICE_CELLS", 9 * model.config.vocab_size)
    prompts = [[3 + i, j] for i in range(36) for j in (5, 9, 17, 30)]
    with torch.no_grad():
        last = torch.stack([model(torch.tensor([p])).logits[0, -1] for p in prompts])
    # in bfloat16 such a probability is 1, and the gradient would be 0
    sure = [i for i, p in enumerate(last.softmax(-1).amax(-1).tolist()) if 0.999 < p < 0.99999]
    assert len(sure) > 9
    chosen = [prompts[i] for i in sure], [[int(last[i].argmax())] for i in sure]
    (batch,) = build_microbatches(*chosen, max_tokens=10**6, layout="packed", pad_token_id=0)
    gradients = []
    for is_bfloat16 in (False, True):
        head.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
            forward_tokens(model, batch, [SamplingParams()] * len(sure)).logprobs.sum().backward()
        gradients.append(head.weight.grad)
    gap = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    assert gap < 0.2


def waiting(model, sampling, *, mask=None):
    """Return the bytes of tensors as wide as the vocabulary that wait for a backward pass, weights apart."""
    width = model.config.vocab_size
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def pack(tensor):
        memory = tensor.untyped_storage()
        if width in tensor.shape and memory.data_ptr() not in weights:
            found[memory.data_ptr()] = memory
        return tensor

    (batch,) = build_microbatches(PROMPTS, RESPONSES, max_tokens=10**6, layout="packed", pad_token_id=0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward_tokens(model, batch, [sampling] * len(PROMPTS), mask=mask).logprobs.sum()
    return sum(memory.nbytes() for memory in found.values())


@pytest.mark.parametrize("way", ["plain", "nucleus", "grammar", "adapters", "no cache"])
def test_no_more_waits_for_the_backward_pass_than_is_said(way, monkeypatch):
    model = build_model(vocab_size=211)  # as wide as nothing else
    limit = 3 * ROWS * 211 * 4
    monkeypatch.setattr(forward, "SLICE_CELLS", ROWS * 211)
    monkeypatch.setattr(forward, "BLOCK_CELLS", BLOCK * 211)
    monkeypatch.setattr(forward, "KEPT_BYTES", limit)
    mask = None
    if way == "grammar":
        none, row = torch.zeros(TOKENS, dtype=torch.bool), torch.zeros(TOKENS, dtype=torch.long)
        whole = torch.full((1, 27), 255, dtype=torch.uint8)
        mask = TokenMask(torch.arange(TOKENS), whole, row, none)
    if way == "adapters":  # autocast casts a frozen head for every slice
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).eval()
    nucleus = SamplingParams(top_p=0.8, temperature=0.7, suppressed_ids=(2,))
    sampling = nucleus if way == "nucleus" else SamplingParams()
    is_cast = way in ("adapters", "no cache")
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast, cache_enabled=way != "no cache"):
        held = waiting(model, sampling, mask=mask)
    if way in ("plain", "nucleus"):
        assert held == limit
    assert held <= limit


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_small_probabilities_have_a_gradient_under_a_scaled_loss(dtype):
    model, whole = build_model(tied=False).to(dtype), build_model(tied=False).double()
    for head in (model.get_output_embeddings(), whole.get_output_embeddings()):
        head.weight.data *= 96
    logprobs = whole(torch.tensor([[3, 9]])).logits[0, -1].log_softmax(-1)
    logprobs[5].backward()
    (batch,) = build_microbatches([[3, 9]], [[5]], max_tokens=10**6, layout="packed", pad_token_id=0)
    scale = 2.0**16
    (scale * forward_tokens(model, batch, [SamplingParams()]).logprobs.sum()).backward()
    rare = (logprobs.exp() > 1e-9) & (logprobs.exp() < 2e-8)
    assert rare.sum() > 2
    found = model.get_output_embeddings().weight.grad[rare].double() / scale
    expected = whole.get_output_embeddings().weight.grad[rare]
    assert float((found - expected).norm()) < 0.1 * float(expected.norm())


def test_an_entropy_nobody_learns_from_has_no_gradient(monkeypatch):
    model = build_model()
    (batch,) = build_microbatches(PROMPTS, RESPONSES, max_tokens=10**6, layout="packed", pad_token_id=0)
    assert not forward_tokens(model, batch, [SAMPLING[i] for i in batch.indices]).entropy.requires_grad


@pytest.mark.parametrize("layout", ["bucketed", "packed", "shared"])
@torch.no_grad()
def test_every_sample_is_scored_under_its_own_distribution(layout):
    model = build_model()
    (batch,) = build_microbatches(PROMPTS, RESPONSES, max_tokens=10**6, layout=layout, pad_token_id=0)
    out = forward_tokens(model, batch, [SAMPLING[i] for i in batch.indices], want_logits=True)
    hidden = response_hidden(model, batch)
    for place, i in enumerate(batch.indices):
        ids = torch.tensor([[*PROMPTS[i], *RESPONSES[i]]])
        plain = model(ids, output_hidden_states=True)
        own = batch.sequence == place
        assert torch.allclose(hidden[own], plain.hidden_states[-1][0, len(PROMPTS[i]) - 1 : -1], atol=1e-5)
        whole = plain.logits[0, len(PROMPTS[i]) - 1 : -1] / SAMPLING[i].temperature
        logits = forward.keep_top(whole, SAMPLING[i].top_k, SAMPLING[i].top_p, keep=batch.targets[own])
        expected = torch.distributions.Categorical(logits=logits)
        assert torch.allclose(out.logprobs[own], expected.log_prob(batch.targets[own]), atol=1e-5)
        p = logits.softmax(-1)
        assert torch.allclose(out.entropy[own], -torch.xlogy(p, p).sum(-1), atol=1e-5)
        assert out.logits is not None
        assert torch.allclose(out.logits[own].softmax(-1), whole.softmax(-1), atol=1e-6)


@torch.no_grad()
def test_a_head_that_is_not_the_last_word_is_not_split_off():
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=47,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            final_logit_softcapping=30.0,
        )
    ).eval()
    assert split_head(model) is None
    assert split_head(build_model()) is not None
    (batch,) = build_microbatches(PROMPTS, RESPONSES, max_tokens=10**6, layout="bucketed", pad_token_id=0)
    out = forward_tokens(model, batch, [SamplingParams() for _ in batch.indices])
    first = batch.indices[0]
    logits = model(torch.tensor([[*PROMPTS[first], *RESPONSES[first]]])).logits[
        0, len(PROMPTS[first]) - 1 : -1
    ]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(RESPONSES[first])[:, None])[:, 0]
    assert torch.allclose(out.logprobs[batch.sequence == 0], expected, atol=1e-5)


@pytest.mark.parametrize("sliced", [True, False])
def test_without_a_gradient_of_the_entropy_the_gradient_is_that_of_log_softmax(sliced, monkeypatch):
    model = build_model()
    found = run(model, "bucketed", sliced=sliced, monkeypatch=monkeypatch, entropy_gradient=False)[2]
    model.zero_grad()
    weights, loss = torch.linspace(-1, 2, TOKENS), torch.zeros(())
    (batch,) = build_microbatches(PROMPTS, RESPONSES, max_tokens=10**6, layout="bucketed", pad_token_id=0)
    for place, i in enumerate(batch.indices):
        logits = model(torch.tensor([[*PROMPTS[i], *RESPONSES[i]]])).logits[0, len(PROMPTS[i]) - 1 : -1]
        own = batch.sequence == place
        logits = logits / SAMPLING[i].temperature
        logits = forward.keep_top(logits, SAMPLING[i].top_k, SAMPLING[i].top_p, keep=batch.targets[own])
        logprobs = torch.distributions.Categorical(logits=logits).log_prob(batch.targets[own])
        loss = loss + logprobs @ weights[own]
    loss.backward()
    scale = max(float(p.grad.abs().max()) for p in model.parameters())
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert float((gradient - parameter.grad).abs().max()) <= 1e-5 * scale
