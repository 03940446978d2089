"""One decode step and one prefill of a DeepSeek-V3 layer: the problem, this library, and transformers.

Legend: T tokens, B requests, S cached tokens, D model, L latent, R rope.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3Model, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from mla_core import MLA, Batch, MLAConfig

__all__ = ["Paged", "Problem", "Transformers"]

PAGE_SIZE = 64


@dataclass(frozen=True, eq=False)
class Problem:
    """What all contestants compute: the next token of B requests with S cached tokens each, and a prompt."""

    hf_config: DeepseekV3Config
    weights: Mapping[str, Tensor]
    latent_BSL: Tensor
    k_rope_BSR: Tensor
    hidden_BD: Tensor
    prompt_TD: Tensor
    rotary: DeepseekV3RotaryEmbedding

    @classmethod
    def random(
        cls, dtype: torch.dtype, requests: int, cached: int, prompt: int, seed: int = 0, **fields: int
    ) -> Problem:
        """Weights that keep activations near 1; `fields` replace dims of DeepSeek-V3's config."""
        generator = torch.Generator().manual_seed(seed)
        yarn = {"rope_type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1}
        yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
        config = DeepseekV3Config(
            num_hidden_layers=1,
            max_position_embeddings=163840,
            rope_parameters=yarn | {"rope_theta": 10000.0},
            **fields,
        )

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        return cls(
            hf_config=config,
            weights={
                name: normal(*shape) / math.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.1 * normal(*shape)
                for name, shape in _shapes(config).items()
            },
            latent_BSL=normal(requests, cached, config.kv_lora_rank),
            k_rope_BSR=normal(requests, cached, config.qk_rope_head_dim),
            hidden_BD=normal(requests, config.hidden_size),
            prompt_TD=normal(prompt, config.hidden_size),
            rotary=DeepseekV3RotaryEmbedding(config),
        )

    @property
    def requests(self) -> int:
        return self.latent_BSL.shape[0]

    @property
    def cached(self) -> int:
        return self.latent_BSL.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_BD.dtype


class Paged:
    """The library's layer over a paged cache whose pages are shuffled."""

    def __init__(self, problem: Problem, backend: str) -> None:
        self.problem = problem
        self.layer = MLA(MLAConfig.from_hf(problem.hf_config), backend=backend, dtype=problem.dtype)
        self.layer.load_hf(problem.weights)
        pages = -(-(problem.cached + 1) // PAGE_SIZE)
        self.table = torch.randperm(problem.requests * pages, generator=torch.Generator().manual_seed(1))
        self.table = self.table.view(problem.requests, pages)
        self.cache = self.layer.new_cache(self.table.numel(), PAGE_SIZE)
        where = torch.arange(problem.cached)
        slots_BS = self.table[:, where // PAGE_SIZE] * PAGE_SIZE + where % PAGE_SIZE
        self.cache.write(
            slots_BS.flatten(), problem.latent_BSL.flatten(0, 1), problem.k_rope_BSR.flatten(0, 1)
        )
        self.step = self.prepare()
        prompt_pages = -(-problem.prompt_TD.shape[0] // PAGE_SIZE)
        self.prompt_cache = self.layer.new_cache(prompt_pages, PAGE_SIZE)
        self.prompt_table = torch.arange(prompt_pages).flip(0).unsqueeze(0)

    def prepare(self) -> object:
        """The host work of a step: batch and plan."""
        queries = [1] * self.problem.requests
        batch = Batch.build(queries, [self.problem.cached] * self.problem.requests, self.table, PAGE_SIZE)
        return self.layer.prepare(batch, self.cache)

    def decode(self) -> Tensor:
        """A whole step of an engine with one layer."""
        return self.layer(self.problem.hidden_BD, self.prepare())

    def forward(self) -> Tensor:
        """Only what every layer of a step adds."""
        return self.layer(self.problem.hidden_BD, self.step)

    def prefill(self) -> Tensor:
        """A new request's prompt, in a cache of its own."""
        prompt_TD = self.problem.prompt_TD
        batch = Batch.build([prompt_TD.shape[0]], [0], self.prompt_table, PAGE_SIZE)
        return self.layer(prompt_TD, self.layer.prepare(batch, self.prompt_cache))


class Transformers:
    """transformers' DeepseekV3Attention as DeepseekV3Model calls it, with the attention that picks."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        # On the meta device only the attention gets memory; the model decides which attention runs.
        with torch.device("meta"):
            model = DeepseekV3Model(problem.hf_config).to(problem.dtype).eval()
        self.attention = model.layers[0].self_attn.to_empty(device="cpu")
        self.attention.load_state_dict(problem.weights)
        self.rotary = problem.rotary
        self.implementation = model.config._attn_implementation
        self.cache = DynamicCache(config=model.config)
        # Transformers stores the first elements of all rotated pairs before the second ones.
        k_rope_BSR = torch.cat([problem.k_rope_BSR[..., 0::2], problem.k_rope_BSR[..., 1::2]], dim=-1)
        self.cache.update(problem.latent_BSL.unsqueeze(1), k_rope_BSR.unsqueeze(1), 0)

    def decode(self) -> Tensor:
        """One step; the new token is taken out of the cache again, which copies nothing."""
        hidden_B1D = self.problem.hidden_BD.unsqueeze(1)
        output = self._run(hidden_B1D, torch.tensor([[self.problem.cached]]), self.cache)
        self.cache.crop(-1)
        return output.squeeze(1)

    def prefill(self) -> Tensor:
        prompt_1TD = self.problem.prompt_TD.unsqueeze(0)
        positions_1T = torch.arange(prompt_1TD.shape[1]).unsqueeze(0)
        return self._run(prompt_1TD, positions_1T, DynamicCache(config=self.problem.hf_config)).squeeze(0)

    def _run(self, hidden: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """No mask is what the model passes to sdpa when nothing is padded."""
        return self.attention(hidden, self.rotary(hidden, positions), None, cache=cache)[0]


def _shapes(config: DeepseekV3Config) -> dict[str, tuple[int, ...]]:
    """The attention module's tensors."""
    width, heads, lora, latent = (
        config.hidden_size,
        config.num_attention_heads,
        config.q_lora_rank,
        config.kv_lora_rank,
    )
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    return {
        "q_a_proj.weight": (lora, width),
        "q_a_layernorm.weight": (lora,),
        "q_b_proj.weight": (heads * (nope + rope), lora),
        "kv_a_proj_with_mqa.weight": (latent + rope, width),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * (nope + value), latent),
        "o_proj.weight": (width, heads * value),
    }
