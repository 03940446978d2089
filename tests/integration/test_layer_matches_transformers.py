"""The layer equals transformers' attention modules in float32: every phase, any batch, far positions too.

Legend: T tokens, S cached tokens, L latent, R rope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from mla_core import MLA, Batch, LatentCache, MLAConfig
from mla_core.errors import CheckpointError
from tests.integration.hf import FAMILIES, Family, hidden_states, state_dict
from tests.integration.test_reference_matches_transformers import CONFIG_MISTAKES, distance

TOLERANCE = 1e-4
PAGE_SIZE = 4
PREFILL, TOKENS = 11, 14
# Where YaRN's stretch and the float32 rounding of angles are both visible.
FAR = 20_500

# New tokens of every step, and the layer's options.
PHASES = {
    "prefill-then-decode": ([11, 1, 1, 1], {}),
    "chunked-prefill": ([5, 6, 1, 1, 1], {"workspace_tokens": 4}),
    "absorbed-prefill": ([5, 6, 1, 1, 1], {"prefill_form": "absorb"}),
    "separate-down-projections": ([11, 1, 1, 1], {"fuse_qkv_a": False}),
    "verification": ([7, 3, 4], {"max_decode_query_len": 4}),
}
# LongRoPE picks its table by a request's length, so it is taken far by a real context, further down.
PLACES = [(family, start) for family in FAMILIES.values() for start in (0, FAR) if family.name != "minicpm3"]
PLACES.append((FAMILIES["minicpm3"], 0))
EVERY_PLACE = pytest.mark.parametrize(
    ("family", "start"), PLACES, ids=[f"{family.name}-{start}" for family, start in PLACES]
)
EVERY_PHASE = pytest.mark.parametrize(("steps", "options"), PHASES.values(), ids=PHASES)


@dataclass(frozen=True)
class Pair:
    """One attention module of transformers, and the layer that holds its weights."""

    family: Family
    module: torch.nn.Module
    layer: MLA

    def expected(self, hidden_TD: Tensor, start: int) -> Tensor:
        """Transformers' outputs: a prefill, then token by token."""
        where = torch.arange(start, start + len(hidden_TD))
        pieces = [slice(0, PREFILL), *(slice(t, t + 1) for t in range(PREFILL, len(hidden_TD)))]
        cache, outputs = None, []
        for piece in pieces:
            output, cache = self.family.run(self.module, hidden_TD[piece], cache, where[piece])
            outputs.append(output)
        return torch.cat(outputs)


def pair(family: Family, mistake=lambda config: config, **options) -> Pair:
    module, hf_config = family.module(seed=1)
    layer = MLA(mistake(MLAConfig.from_hf(hf_config)), backend="vanilla", dtype=torch.float32, **options)
    layer.load_hf(state_dict(module))
    return Pair(family, module, layer)


def pages_of(request: int) -> list[int]:
    """Pages of one of four requests, interleaved and in falling order."""
    return list(range(19 - request, -1, -4))


def step(layer: MLA, cache: LatentCache, rows: Sequence[tuple[int, Tensor, int]], start: int) -> list[Tensor]:
    """One engine step over (request, its new hidden states, its tokens so far); position 0 is at `start`."""
    queries = [len(new) for _, new, _ in rows]
    table = [pages_of(request) for request, _, _ in rows]
    batch = Batch.build(queries, [done for _, _, done in rows], table, PAGE_SIZE)
    shifted = Batch(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        slot_mapping=batch.slot_mapping,
        positions=batch.positions + start,
    )
    hidden_TD = torch.cat([new for _, new, _ in rows])
    return list(layer(hidden_TD, layer.prepare(shifted, cache)).split(queries))


def run(layer: MLA, cache: LatentCache, hidden_TD: Tensor, steps: Sequence[int], start: int) -> Tensor:
    """One request through the layer in the given steps."""
    outputs, done = [], 0
    for new in hidden_TD.split(list(steps)):
        outputs += step(layer, cache, [(1, new, done)], start)
        done += len(new)
    return torch.cat(outputs)


def new_cache(layer: MLA) -> LatentCache:
    cache = layer.new_cache(num_pages=20, page_size=PAGE_SIZE)
    cache.data.fill_(torch.nan)
    return cache


def error(family: Family, start: int, steps=(11, 1, 1, 1), mistake=lambda config: config, **options) -> float:
    """Largest difference between the layer and transformers over one request."""
    both, hidden_TD = pair(family, mistake, **options), hidden_states(TOKENS, seed=2)
    outputs = run(both.layer, new_cache(both.layer), hidden_TD, steps, start)
    return distance(outputs, both.expected(hidden_TD, start))


@EVERY_PHASE
@EVERY_PLACE
def test_every_phase_equals_transformers(family, start, steps, options):
    assert error(family, start, steps, **options) <= TOLERANCE


@EVERY_PLACE
def test_requests_of_a_mixed_batch_equal_their_solo_runs_in_transformers(family, start):
    both = pair(family, workspace_tokens=5)
    cache = new_cache(both.layer)
    hidden = [hidden_states(TOKENS, seed=seed) for seed in (3, 4, 5, 6)]
    # Decode, a whole prefill, a chunk with a cached prefix, and a second decode of another length.
    done = [13, 0, 6, 9]
    step(both.layer, cache, [(r, hidden[r][: done[r]], 0) for r in (3, 0, 2)], start)
    news = [hidden[0][13:], hidden[1], hidden[2][6:], hidden[3][9:10]]
    outputs = step(both.layer, cache, [(r, news[r], done[r]) for r in range(4)], start)
    for r, output in enumerate(outputs):
        expected = both.expected(hidden[r], start)[done[r] : done[r] + len(news[r])]
        assert distance(output, expected) <= TOLERANCE, f"request {r}"


@EVERY_PLACE
def test_cached_rows_equal_those_of_transformers(family, start):
    both, hidden_TD = pair(family), hidden_states(TOKENS, seed=2)
    cache = new_cache(both.layer)
    run(both.layer, cache, hidden_TD, [11, 1, 1, 1], start)
    _, theirs = family.run(both.module, hidden_TD, None, torch.arange(start, start + TOKENS))
    mine = cache.read(torch.tensor(pages_of(1)), TOKENS)
    for ours, expected in zip(mine, family.cached_rows(theirs, both.module.config), strict=True):
        assert distance(ours, expected) <= TOLERANCE


# A context of this many random rows, long enough to change LongRoPE's table and YaRN's frequencies.
CONTEXT = 20_500


def random_context(config: MLAConfig) -> tuple[Tensor, Tensor]:
    """Latent [S, L] and rope key [S, R] that queries barely match, so that new tokens keep their weight."""
    generator = torch.Generator().manual_seed(7)
    rows_SX = 1e-3 * torch.randn(CONTEXT, config.latent_width, generator=generator)
    return rows_SX[:, : config.kv_lora_rank], rows_SX[:, config.kv_lora_rank :]


def transformers_after(
    both: Pair, latent_SL: Tensor, k_rope_SR: Tensor, hidden_TD: Tensor, steps: Sequence[int]
) -> Tensor:
    """Transformers' outputs of new tokens over a cache that is given."""
    if both.family.splits_pairs and getattr(both.module.config, "rope_interleave", True):
        k_rope_SR = torch.cat([k_rope_SR[:, 0::2], k_rope_SR[:, 1::2]], dim=-1)
    cache = DynamicCache()
    cache.update(latent_SL[None, None], k_rope_SR[None, None], 0)
    return torch.cat([both.family.run(both.module, new, cache)[0] for new in hidden_TD.split(list(steps))])


def layer_after(
    layer: MLA, latent_SL: Tensor, k_rope_SR: Tensor, hidden_TD: Tensor, steps: Sequence[int]
) -> Tensor:
    """The layer's outputs of new tokens over the same rows, written through the cache's own writer."""
    page_size, done = 64, len(latent_SL)
    pages = torch.arange(-(-(done + len(hidden_TD)) // page_size)).flip(0)
    cache = layer.new_cache(len(pages), page_size)
    where = torch.arange(done)
    cache.write(pages[where // page_size] * page_size + where % page_size, latent_SL, k_rope_SR)
    outputs = []
    for new in hidden_TD.split(list(steps)):
        batch = Batch.build([len(new)], [done], pages[None].int(), page_size)
        outputs.append(layer(new, layer.prepare(batch, cache)))
        done += len(new)
    return torch.cat(outputs)


def error_after_a_context(name: str, mistake=lambda config: config, **options) -> float:
    both = pair(FAMILIES[name], mistake, **options)
    given = (*random_context(both.layer.config), 30 * hidden_states(6, seed=8), [4, 1, 1])
    return distance(layer_after(both.layer, *given), transformers_after(both, *given))


@pytest.mark.parametrize("options", [{"workspace_tokens": 8192}, {"prefill_form": "absorb"}], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3", "mistral4"])
def test_new_tokens_after_a_long_context_equal_transformers(name, options):
    assert error_after_a_context(name, **options) <= TOLERANCE


# Negative controls: a mistake in the config, or in how the layer is driven, must be seen.


# A gate left out is no wrong number here: its weight is left over.
MISTAKES = {name: mistake for name, mistake in CONFIG_MISTAKES.items() if name != "gate-dropped"}


@pytest.mark.parametrize(("name", "start", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_the_config_is_seen(name, start, mistake):
    if (FAMILIES[name], start) not in PLACES:
        assert error_after_a_context(name, mistake) > 2 * TOLERANCE
    else:
        assert error(FAMILIES[name], start, mistake=mistake) > 2 * TOLERANCE


def test_a_gate_that_the_config_leaves_out_is_refused():
    with pytest.raises(CheckpointError, match=r"unexpected g_proj\.weight \[3, 48\]"):
        pair(FAMILIES["bailing_hybrid"], CONFIG_MISTAKES["gate-dropped"][2])


@pytest.mark.parametrize("steps", [[11, 1, 1, 1], [5, 6, 1, 1, 1]], ids=str)
def test_a_softmax_scale_one_percent_off_is_seen(steps):
    def off(config: MLAConfig) -> MLAConfig:
        return config.model_copy(update={"softmax_scale_override": 1.01 * config.softmax_scale})

    assert error(FAMILIES["deepseek_v3"], 0, steps, off) > 2 * TOLERANCE


def test_reading_the_neighbouring_pages_is_seen(monkeypatch):
    both, hidden_TD = pair(FAMILIES["deepseek_v3"]), hidden_states(TOKENS, seed=2)
    honest = both.layer.prepare
    # Stored at the right slots, read through a table that is one page off.
    monkeypatch.setattr(both.layer, "prepare", lambda batch, cache: honest(one_page_off(batch), cache))
    cache = both.layer.new_cache(num_pages=20, page_size=PAGE_SIZE)
    outputs = run(both.layer, cache, hidden_TD, [11, 1, 1, 1], 0)
    assert distance(outputs[PREFILL:], both.expected(hidden_TD, 0)[PREFILL:]) > 2 * TOLERANCE


def one_page_off(batch: Batch) -> Batch:
    fields = ("query_start_loc", "seq_lens", "slot_mapping", "positions")
    return Batch(block_table=batch.block_table + 1, **{name: getattr(batch, name) for name in fields})


def test_a_rotation_done_twice_is_seen():
    both, hidden_TD = pair(FAMILIES["deepseek_v3"]), hidden_states(TOKENS, seed=2)
    once = both.layer.program.rope

    def twice(*arguments):
        once(*arguments)
        once(*arguments)

    both.layer.program = replace(both.layer.program, rope=twice)
    outputs = run(both.layer, new_cache(both.layer), hidden_TD, [11, 1, 1, 1], 0)
    assert distance(outputs, both.expected(hidden_TD, 0)) > 2 * TOLERANCE
