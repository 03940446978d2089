"""Tiny attention modules of transformers, run one request at a time, for tests of equality.

family = FAMILIES["deepseek_v3"]
module, hf_config = family.module(seed=0)
output_TD, cache = family.run(module, hidden_TD, past=None, positions=torch.arange(9))
latent_SL, k_rope_SR = family.cached_rows(cache)
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, DynamicCache, PreTrainedConfig

__all__ = ["FAMILIES", "Family", "hidden_states", "plain_rope", "randomise", "state_dict", "yarn_rope"]

_DIMS = {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_hidden_layers": 1,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-5,
}


def yarn_rope(factor: float, original: int, **more: Any) -> dict[str, Any]:
    """A config's rope block with YaRN."""
    block = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": factor, "beta_fast": 32, "beta_slow": 1}
    return {"rope_parameters": block | {"original_max_position_embeddings": original} | more}


def plain_rope(theta: float) -> dict[str, Any]:
    """A config's rope block without scaling."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


_V3_ROPE = yarn_rope(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.1, 3.1, 4.9, 7.5],
    "long_factor": [1.2, 1.6, 2.3, 3.5, 5.1, 8.1, 12.9, 16.5],
    "original_max_position_embeddings": 16384,
}


@dataclass(frozen=True)
class Family:
    """One attention class of transformers with a tiny config that exercises what is special about it."""

    name: str
    model_type: str
    # Class names in the family's modeling file; no rotary class: the attention takes no position embeddings.
    attention: str
    rotary: str | None
    fields: Mapping[str, Any] = field(default_factory=dict)
    # The class keeps the first elements of all pairs before the second ones, whatever order it was given.
    splits_pairs: bool = True
    takes_position_ids: bool = False
    # It caches an indexer's keys too.
    indexed: bool = False

    def config(self, **changes: Any) -> PreTrainedConfig:
        """The transformers config, read-only by convention; changes replace fields."""
        config = AutoConfig.for_model(self.model_type, **(_DIMS | dict(self.fields) | changes))
        config._attn_implementation = "eager"
        return config

    def module(
        self, seed: int, dtype: torch.dtype = torch.float32, **changes: Any
    ) -> tuple[nn.Module, PreTrainedConfig]:
        """The attention module with random weights of a size that keeps outputs near 1, and its config."""
        config = self.config(**changes)
        attention = getattr(self._modeling(), self.attention)(config, layer_idx=0)
        randomise(attention, seed)
        return attention.to(dtype).eval(), config

    @torch.no_grad()
    def run(
        self,
        module: nn.Module,
        hidden_TD: Tensor,
        past: DynamicCache | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, DynamicCache]:
        """Output for the new tokens of one request, and the cache, extended in place.

        past None: a fresh cache. positions None: they continue the cache from position 0.
        """
        cache = past
        if cache is None:
            cache = DynamicCache(config=module.config) if self.indexed else DynamicCache()
        seen, new = cache.get_seq_length(), hidden_TD.shape[0]
        positions_1T = (torch.arange(seen, seen + new) if positions is None else positions)[None]
        arguments: dict[str, Any] = {"attention_mask": _causal(new, seen, hidden_TD.dtype), "cache": cache}
        if self.rotary is not None:
            rotary = getattr(self._modeling(), self.rotary)(module.config)
            arguments["position_embeddings"] = rotary(hidden_TD[None], positions_1T)
        if self.takes_position_ids:
            arguments["position_ids"] = positions_1T
        # An attention with an indexer also returns its selection.
        output = module(hidden_TD[None], **arguments)[0]
        return output[0], cache

    def cached_rows(self, cache: DynamicCache, config: PreTrainedConfig) -> tuple[Tensor, Tensor]:
        """latent [S, L] and rope key [S, R] of the cache, the key in the order that its rope style keeps."""
        latent_SL, k_rope_SR = cache.layers[0].keys[0, 0], cache.layers[0].values[0, 0]
        if self.splits_pairs and getattr(config, "rope_interleave", True):
            k_rope_SR = torch.stack(k_rope_SR.chunk(2, dim=-1), dim=-1).flatten(-2)
        return latent_SL, k_rope_SR

    def _modeling(self) -> Any:
        return importlib.import_module(f"transformers.models.{self.model_type}.modeling_{self.model_type}")


def state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The module's weights under their checkpoint names, without prefix."""
    return {name: weight.detach().clone() for name, weight in module.state_dict().items()}


def hidden_states(tokens: int, seed: int, width: int = _DIMS["hidden_size"]) -> Tensor:
    """Random inputs [T, D] whose magnitudes run from 1 down to 1e-3, where a wrong norm epsilon shows."""
    generator = torch.Generator().manual_seed(seed)
    magnitude_T1 = torch.logspace(0, -3, 4).repeat(tokens)[:tokens, None]
    return torch.randn(tokens, width, generator=generator) * magnitude_T1


def _causal(new: int, seen: int, dtype: torch.dtype) -> Tensor:
    hidden = torch.ones(new, seen + new, dtype=torch.bool).triu(seen + 1)
    return torch.zeros(1, 1, new, seen + new, dtype=dtype).masked_fill(hidden, -math.inf)


def randomise(module: nn.Module, seed: int) -> None:
    """Weights of a size that keeps outputs near 1, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight.copy_(1.0 + 0.2 * noise)
            else:
                weight.copy_(1.5 * noise / math.sqrt(weight.shape[-1]))


def _deepseek_v3(name: str, **fields: Any) -> Family:
    return Family(name, "deepseek_v3", "DeepseekV3Attention", "DeepseekV3RotaryEmbedding", _V3_ROPE | fields)


_ALL = [
    Family(
        "deepseek_v2",
        "deepseek_v2",
        "DeepseekV2Attention",
        "DeepseekV2RotaryEmbedding",
        yarn_rope(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
        splits_pairs=False,
    ),
    Family(
        "deepseek_v2_lite",
        "deepseek_v2",
        "DeepseekV2Attention",
        "DeepseekV2RotaryEmbedding",
        yarn_rope(40.0, 4096, mscale=0.707, mscale_all_dim=0.707) | {"q_lora_rank": None},
        splits_pairs=False,
    ),
    _deepseek_v3("deepseek_v3"),
    _deepseek_v3("deepseek_v3_half_split", rope_interleave=False),
    _deepseek_v3("deepseek_v3_bias", attention_bias=True),
    _deepseek_v3("deepseek_v3_mixed_mscale", **yarn_rope(40.0, 4096, mscale=0.5, mscale_all_dim=1.0)),
    _deepseek_v3("deepseek_v3_mscale_all_dim_only", **yarn_rope(40.0, 4096, mscale_all_dim=1.0)),
    _deepseek_v3(
        "deepseek_v3_attention_factor", **yarn_rope(40.0, 4096, attention_factor=1.2, truncate=False)
    ),
    _deepseek_v3(
        "kimi_k2", **yarn_rope(32.0, 4096, mscale=1.0, mscale_all_dim=1.0, rope_theta=5e4, beta_fast=1)
    ),
    _deepseek_v3("moonlight", q_lora_rank=None, **plain_rope(5e4)),
    Family(
        "glm4_moe_lite",
        "glm4_moe_lite",
        "Glm4MoeLiteAttention",
        "Glm4MoeLiteRotaryEmbedding",
        plain_rope(1e6) | {"v_head_dim": 40},
    ),
    Family(
        "longcat_flash",
        "longcat_flash",
        "LongcatFlashMLA",
        "LongcatFlashRotaryEmbedding",
        plain_rope(1e7) | {"num_hidden_layers": 2, "head_dim": 16},
    ),
    Family(
        "minicpm3",
        "minicpm3",
        "MiniCPM3Attention",
        "MiniCPM3RotaryEmbedding",
        {"rope_parameters": _LONGROPE, "max_position_embeddings": 65536},
        splits_pairs=False,
    ),
    Family(
        "mistral4",
        "mistral4",
        "Mistral4Attention",
        "Mistral4RotaryEmbedding",
        yarn_rope(128.0, 8192, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
        takes_position_ids=True,
    ),
    Family("youtu", "youtu", "YoutuAttention", "YoutuRotaryEmbedding", plain_rope(1.6e6)),
    Family(
        "kimi_linear", "kimi_linear", "KimiLinearAttention", None, {"q_lora_rank": None}, splits_pairs=False
    ),
    Family(
        "bailing_hybrid",
        "bailing_hybrid",
        "BailingHybridAttention",
        "BailingHybridRotaryEmbedding",
        plain_rope(6e6) | {"q_lora_rank": None},
    ),
    Family("axk1", "axk1", "AXK1Attention", "AXK1RotaryEmbedding", plain_rope(1e4)),
]
FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
