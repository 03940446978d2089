"""What an MLA layer is: dims, rotary embedding, scales and gates, as one frozen record.

Every number a stage needs is a field here or a property derived from fields; no stage knows a model's name.
Formulas and their sources: docs/models.md.
Legend: Q q-lora, L latent (kv-lora), N nope, R rope, V value, H heads.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mla_core.config_values import from_validation

__all__ = ["GateConfig", "IndexerConfig", "Llama4Scaling", "LongRope", "MLAConfig", "RopeConfig", "Yarn"]

Positive = Annotated[int, Field(gt=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **fields: Any) -> None:
        """Raises ConfigError, naming every field that does not fit."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise from_validation(error, type(self).model_fields, type(self).__name__) from error


class Yarn(_Record):
    """YaRN context extension (arXiv 2309.00071), with DeepSeek's two mscale switches."""

    kind: Literal["yarn"] = "yarn"
    factor: float
    original_max_position: Positive
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


class LongRope(_Record):
    """LongRoPE (arXiv 2402.13753): one stretch factor per frequency, two tables by total length."""

    kind: Literal["longrope"] = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position: Positive
    attention_factor: float | None = None


class RopeConfig(_Record):
    """How the R rope dims rotate. `style` none: the dims exist, are shared by the heads, and never rotate."""

    style: Literal["interleaved", "half_split", "none"] = "interleaved"
    theta: float = 10000.0
    scaling: Annotated[Yarn | LongRope, Field(discriminator="kind")] | None = None


class Llama4Scaling(_Record):
    """Query scale by position: 1 + beta * ln(1 + floor(position / floor_scale))."""

    beta: float = 0.1
    floor_scale: Positive = 8192
    # 1 in TensorRT-LLM, which floors (position + 1) / floor_scale; 0 in transformers.
    offset: int = 0


class GateConfig(_Record):
    """Sigmoid gate on the attention output before o_proj, from the layer's own input.

    per_head: weight [H, D]; elementwise: weight [H*V, D]. The sigmoid is computed in float32.
    """

    kind: Literal["per_head", "elementwise"]
    weight_name: str = "g_proj"


class IndexerConfig(_Record):
    """DeepSeek Sparse Attention's indexer: what the sparse plugin needs to know about the model."""

    num_heads: Positive
    head_dim: Positive
    topk: Positive
    rope_style: Literal["interleaved", "half_split"] = "half_split"
    rope_first: bool = True
    norm_eps: float = 1e-6
    # Layers that run their own indexer; None: all. The others reuse the previous full layer's selection.
    full_layers: tuple[int, ...] | None = None


class MLAConfig(_Record):
    """One MLA layer's mathematics. Frozen, torch-free, JSON round trip through `model_dump`."""

    model_type: str = "custom"
    hidden_size: Positive
    num_heads: Positive
    q_lora_rank: Positive | None = None
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Annotated[int, Field(ge=0)]
    v_head_dim: Positive
    num_layers: Positive = 1
    # Layers that are MLA, in a model that mixes attentions; None: all of them.
    mla_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    max_position_embeddings: Positive = 163840
    rope: RopeConfig = RopeConfig()
    # Epsilon of the q_a and kv_a norms; it is not the model's rms_norm_eps, docs/models.md says why.
    latent_norm_eps: float = 1e-6
    # Bias of q_a_proj and kv_a_proj_with_mqa.
    attention_bias: bool = False
    # Bias of o_proj; None follows attention_bias.
    output_bias: bool | None = None
    # Constant factors on the query and on the normed latent (LongCat: sqrt(D/Q), sqrt(D/L)).
    query_scale: float = 1.0
    latent_scale: float = 1.0
    query_scaling: Llama4Scaling | None = None
    gate: GateConfig | None = None
    indexer: IndexerConfig | None = None
    # Replaces the computed softmax scale (Mistral-Large-3's two readings of apply_scale, for example).
    softmax_scale_override: Annotated[float, Field(gt=0)] | None = None
    # Rows and columns of a block, for quantised weights with one scale a block.
    weight_block: tuple[Positive, Positive] = (128, 128)
    # Config string used when neither the argument nor MLA_BACKEND names one.
    backend: str | None = None

    @model_validator(mode="after")
    def _check(self) -> MLAConfig:
        if self.qk_rope_head_dim % 2 and self.rope.style != "none":
            raise ValueError(f"qk_rope_head_dim must be even to rotate in pairs, got {self.qk_rope_head_dim}")
        beyond = [layer for layer in self.mla_layers or () if layer >= self.num_layers]
        if beyond:
            raise ValueError(f"mla_layers names layer {beyond[0]}, but num_layers is {self.num_layers}")
        if isinstance(self.rope.scaling, LongRope):
            pairs = self.qk_rope_head_dim // 2
            for name in ("short_factor", "long_factor"):
                if len(getattr(self.rope.scaling, name)) != pairs:
                    raise ValueError(
                        f"rope.scaling.{name} must hold {pairs} numbers, one for each rotated pair"
                    )
        return self

    @property
    def qk_head_dim(self) -> int:
        """N + R: width of a query and key head in the expanded form."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """L + R: values cached per token, and width of an absorbed query."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that are MLA."""
        return tuple(range(self.num_layers)) if self.mla_layers is None else self.mla_layers

    @property
    def has_output_bias(self) -> bool:
        return self.attention_bias if self.output_bias is None else self.output_bias

    @property
    def softmax_scale(self) -> float:
        """(N+R)^-0.5, times m^2 with m = 0.1 * mscale_all_dim * ln(factor) + 1 when YaRN sets mscale_all_dim.

        Source: DeepSeek-V2 (arXiv 2405.04434) inference code; one value for every path, absorbed too.
        """
        if self.softmax_scale_override is not None:
            return self.softmax_scale_override
        scale: float = self.qk_head_dim**-0.5
        scaling = self.rope.scaling
        if self.rope.style != "none" and isinstance(scaling, Yarn) and scaling.mscale_all_dim:
            scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
        return scale

    @classmethod
    def preset(cls, name: str) -> MLAConfig:
        """The config of a public checkpoint, by name; `presets()` lists them. Raises ConfigError."""
        from mla_core.config_hf import preset

        return preset(name)

    @classmethod
    def presets(cls) -> list[str]:
        """Names that `preset` accepts."""
        from mla_core.config_hf import preset_names

        return preset_names()

    @classmethod
    def from_hf(cls, source: Any) -> MLAConfig:
        """Read a Hugging Face config: a directory, a config.json path, a dict, or an object with to_dict().

        Raises ConfigError, naming the field, when the model is not MLA or uses something unsupported.
        """
        from mla_core.config_hf import from_hf

        return from_hf(source)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, and 1 for factor <= 1 (YaRN, arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
