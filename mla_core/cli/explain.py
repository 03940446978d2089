"""`mla explain`: the plan for a model on a device that need not exist. Imports neither torch nor a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_core.config import MLAConfig
from mla_core.errors import NoBackendFits
from mla_core.layer_request import layer_request, layout_id
from mla_core.plan import Plan
from mla_core.request import DeviceInfo, LayerRequest
from mla_core.resolve import resolve

__all__ = ["Question", "plan_json", "plan_lines", "refusal_json"]


@dataclass(frozen=True)
class Question:
    """What `mla explain` was asked; exactly one of `model` and `config` is set."""

    model: str | None = None
    config: Path | None = None
    device: str = "cpu"
    cache: str = "auto"
    dtype: str = "bfloat16"
    backend: str | None = None
    page_size: int | None = None
    max_decode_query_len: int = 1
    prefill_form: str = "auto"
    tp: int = 1

    def plan(self) -> Plan:
        """What would run. Raises NoBackendFits with every candidate's reasons, or another MLAError."""
        config = self.read_config()
        return resolve(self.request(config), self.backend, config_spec=config.backend)

    def read_config(self) -> MLAConfig:
        return MLAConfig.preset(self.model) if self.model is not None else MLAConfig.from_hf(self.config)

    def request(self, config: MLAConfig) -> LayerRequest:
        return layer_request(
            config,
            device=DeviceInfo.parse(self.device),
            dtype=self.dtype,
            layout=layout_id(self.cache, self.dtype),
            page_size=self.page_size,
            max_decode_query_len=self.max_decode_query_len,
            tp_size=self.tp,
            prefill_form=self.prefill_form,
        )


def plan_lines(plan: Plan) -> list[str]:
    """What was asked, in the words of declarations, and what would serve it."""
    asked = plan.request.model_dump(mode="json", exclude={"device"}, exclude_none=True, exclude_defaults=True)
    return [f"layer    {', '.join(f'{name} {value}' for name, value in asked.items())}", str(plan)]


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan that fits."""
    return {"fits": True, **plan.model_dump(mode="json")}


def refusal_json(refusal: NoBackendFits) -> dict[str, Any]:
    """Why nothing fits, candidate by candidate."""
    return {
        "fits": False,
        "asked": refusal.asked,
        "device": refusal.device,
        "rejected": [row.model_dump(mode="json") for row in refusal.table],
        "works": refusal.works,
    }
