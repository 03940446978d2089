"""The layer inside a trained model: real hidden states of real text, and the text it then writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from mla_core import MLA, Batch, CachePool, MLAConfig

DIRECTORY = Path(__file__).parents[1] / "data" / "tiny_mla_kjv"
TOLERANCE = 1e-4
PAGE_SIZE = 16
# Tokens of the held-out text, and how they arrive.
TOKENS = 260
STEPS = {"prefill-then-decode": [256, 1, 1, 1, 1], "chunks": [100, 37, 119, 1, 3], "one-prefill": [260]}
PROMPT, CONTINUATION = "And the angel of the LORD said unto", " him, Bring out thine hand, and go, and go."


def load_model() -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(
        DIRECTORY, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """The trained model as transformers runs it, its bf16 weights in float32."""
    return load_model()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


@pytest.fixture(scope="module")
def text(tokenizer: Tokenizer) -> Tensor:
    """Token ids [1, TOKENS] of text that the model was not trained on."""
    heldout = (DIRECTORY / "heldout.txt").read_text(encoding="utf-8")
    return torch.tensor([tokenizer.encode(heldout).ids[:TOKENS]])


@pytest.fixture(scope="module")
def attention_io(model: nn.Module, text: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What goes into and comes out of each attention module on the text, as transformers computes it."""
    seen: list[tuple[Tensor, Tensor]] = []

    def record(module: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
        seen.append((kwargs["hidden_states"][0], output[0][0]))

    hooks = [layer.self_attn.register_forward_hook(record, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        model(text, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def build(module: nn.Module, layer_idx: int, mistake=lambda config: config, **options) -> MLA:
    """Our layer with a module's weights."""
    config = mistake(MLAConfig.from_hf(DIRECTORY))
    layer = MLA(config, backend="vanilla", dtype=torch.float32, layer_idx=layer_idx, **options)
    layer.load_hf(module.state_dict())
    return layer


def run(layer: MLA, hidden_TD: Tensor, steps: Sequence[int]) -> Tensor:
    """All tokens of one request, in steps."""
    pages = -(-len(hidden_TD) // PAGE_SIZE)
    cache, done, outputs = layer.new_cache(pages, PAGE_SIZE), 0, []
    table = torch.arange(pages, dtype=torch.int32).flip(0)[None]
    for new in hidden_TD.split(list(steps)):
        batch = Batch.build([len(new)], [done], table, PAGE_SIZE)
        outputs.append(layer(new, layer.prepare(batch, cache)))
        done += len(new)
    return torch.cat(outputs)


def distance(left: Tensor, right: Tensor) -> float:
    return (left - right).abs().max().item()


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("layer_idx", range(3))
def test_each_attention_layer_equals_transformers_on_real_hidden_states(
    model, attention_io, layer_idx, steps
):
    hidden_TD, expected_TD = attention_io[layer_idx]
    layer = build(model.model.layers[layer_idx].self_attn, layer_idx, workspace_tokens=64)
    assert distance(run(layer, hidden_TD, steps), expected_TD) <= TOLERANCE


@pytest.mark.parametrize("layer_idx", range(3))
def test_the_absorbed_form_equals_transformers_on_real_hidden_states(model, attention_io, layer_idx):
    hidden_TD, expected_TD = attention_io[layer_idx]
    layer = build(model.model.layers[layer_idx].self_attn, layer_idx, prefill_form="absorb")
    assert distance(run(layer, hidden_TD, STEPS["chunks"]), expected_TD) <= TOLERANCE


def without_mscale(config: MLAConfig) -> MLAConfig:
    return config.model_copy(update={"softmax_scale_override": config.qk_head_dim**-0.5})


def half_split(config: MLAConfig) -> MLAConfig:
    return config.model_copy(update={"rope": config.rope.model_copy(update={"style": "half_split"})})


@pytest.mark.parametrize("mistake", [without_mscale, half_split])
def test_a_mistake_in_the_config_is_seen_on_real_hidden_states(model, attention_io, mistake):
    hidden_TD, expected_TD = attention_io[1]
    layer = build(model.model.layers[1].self_attn, 1, mistake)
    assert distance(run(layer, hidden_TD, STEPS["prefill-then-decode"]), expected_TD) > 100 * TOLERANCE


def test_another_layers_weights_are_seen_on_real_hidden_states(model, attention_io):
    hidden_TD, expected_TD = attention_io[1]
    layer = build(model.model.layers[2].self_attn, 1)
    assert distance(run(layer, hidden_TD, [TOKENS]), expected_TD) > 100 * TOLERANCE


class Swapped:
    """The model with our layers in place of its attention: one pool of caches, one prepared step a call."""

    def __init__(self, mistake=lambda config: config) -> None:
        self.model = load_model()
        blocks = self.model.model.layers
        self.layers = [build(block.self_attn, index, mistake) for index, block in enumerate(blocks)]
        for block, layer in zip(blocks, self.layers, strict=True):
            block.self_attn = _Adapter(self, layer)
        pages = -(-(TOKENS + 40) // PAGE_SIZE)
        self.pool = self._pool(pages)
        self.table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int()[None]
        self.done = 0

    def _pool(self, pages: int) -> CachePool:
        return self.layers[0].new_pool(len(self.layers), pages, PAGE_SIZE)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Logits [T, vocabulary] of the next tokens of the one request."""
        batch = Batch.build([ids.shape[1]], [self.done], self.table, PAGE_SIZE)
        self.step = self.layers[0].prepare(batch, self.pool)
        self.done += ids.shape[1]
        return self.model(ids, use_cache=False).logits[0]


class _Adapter(nn.Module):
    """Looks like transformers' attention; positions, mask and cache come from the prepared step."""

    def __init__(self, swapped: Swapped, layer: MLA) -> None:
        super().__init__()
        self.layer = layer
        self.step = lambda: swapped.step

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return self.layer(hidden_states[0], self.step())[None], None


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_logits_of_the_model_with_our_layers_equal_those_of_transformers(model, text, steps):
    swapped = Swapped()
    ours = torch.cat([swapped.logits(ids) for ids in text.split(list(steps), dim=1)])
    with torch.no_grad():
        theirs = model(text, use_cache=False).logits[0]
    assert distance(ours, theirs) <= 10 * TOLERANCE


def test_a_missing_mscale_is_seen_in_the_logits(model, text):
    with torch.no_grad():
        theirs = model(text, use_cache=False).logits[0]
    assert distance(Swapped(without_mscale).logits(text), theirs) > 1000 * TOLERANCE


def greedy(swapped: Swapped, ids: Tensor, tokens: int) -> list[int]:
    """The most likely continuation, one token a step."""
    chosen = []
    for _ in range(tokens):
        ids = swapped.logits(ids)[-1:].argmax(dim=-1, keepdim=True)
        chosen.append(int(ids))
    return chosen


@torch.no_grad()
def transformers_greedy(model: nn.Module, ids: Tensor, tokens: int) -> list[int]:
    """The same, by transformers with its own cache."""
    cache, chosen = DynamicCache(config=model.config), []
    for _ in range(tokens):
        ids = model(ids, cache=cache, use_cache=True).logits[0, -1:].argmax(dim=-1, keepdim=True)
        chosen.append(int(ids))
    return chosen


def test_the_model_with_our_layers_writes_the_text_that_transformers_writes(model, tokenizer):
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    ours = greedy(Swapped(), ids, 40)
    assert ours == transformers_greedy(model, ids, 40)
    assert tokenizer.decode(ours).startswith(CONTINUATION)


def test_layers_that_rotate_the_wrong_pairs_write_another_text(model, tokenizer):
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    assert greedy(Swapped(half_split), ids, 12) != transformers_greedy(model, ids, 12)
