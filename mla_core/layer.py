"""One Multi-head Latent Attention layer over a paged latent cache, served by pluggable backends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mla_core import admission, planner, weights
from mla_core import registry as registries
from mla_core.backend import LayerContext
from mla_core.batch import Batch
from mla_core.bind import bind
from mla_core.cache import CachePool, LatentCache, Scales, layout_for
from mla_core.config import MLAConfig
from mla_core.device import device_info, usable_device
from mla_core.errors import BrokenPlugin, ConfigError, ContractError, UnsupportedError
from mla_core.layer_request import heads_per_rank, layer_request
from mla_core.projections import Direct, Linear, Projections, QuantisedLinear
from mla_core.quant.fp4_hidden import Fp4Hidden
from mla_core.request import LayerRequest, Reason
from mla_core.resolve import resolve
from mla_core.spec import parse
from mla_core.stages.output import AttentionOutput
from mla_core.stages.project import with_latent
from mla_core.stages.rope import scale_queries
from mla_core.step import Step

__all__ = ["MLA"]


class MLA(Direct):
    """An MLA layer for inference: hidden states [T, D] in, hidden states [T, D] out.

    backend: config string, such as "vanilla", "prefill=a;decode=b" or "a|b"; None follows MLA_BACKEND, then
    the config, then "auto". cache: layout name, "auto" stores the layer's dtype. workspace_tokens: how many
    cached tokens a context chunk may expand at once. max_decode_query_len: 1 + draft tokens; longer queries
    are prefill. prefill_form: "expand", "absorb", or "auto" for the first that the backend offers.
    cuda_graph: "decode" when decode steps will be captured, "full" when prefill as well.
    fuse_qkv_a: one matmul for both down projections; quantised ones stay apart. keep_quantised: hold
    quantised weights as the checkpoint does, else dequantise them at load. fp4_inputs: round the inputs of
    NVFP4 weights that come with a static input scale, as 4-bit hardware does. tp_size, tp_rank, reduce: this
    rank's share of the heads, and how partial outputs are summed.

    Weights are uninitialised until `load_hf`. Raises ConfigError, SpecError, RegistryError or NoBackendFits
    when it cannot be built as asked.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        backend: str | None = None,
        cache: str = "auto",
        layer_idx: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        workspace_tokens: int = 8192,
        max_decode_query_len: int = 1,
        prefill_form: str = "auto",
        cuda_graph: str | None = None,
        fuse_qkv_a: bool = True,
        keep_quantised: bool = True,
        fp4_inputs: bool = False,
        tp_size: int = 1,
        tp_rank: int = 0,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.layer_idx, self.dtype, self.device = config, layer_idx, dtype, usable_device(device)
        self.tp_size, self.tp_rank, self.reduce = tp_size, tp_rank, reduce
        self.keep_quantised, self.fp4_inputs = keep_quantised, fp4_inputs
        self.num_heads = _heads_per_rank(config, tp_size, tp_rank, reduce)
        self.workspace_tokens = _at_least_one("workspace_tokens", workspace_tokens)
        self.max_decode_query_len = _at_least_one("max_decode_query_len", max_decode_query_len)
        self.layout = layout_for(cache, dtype, config.kv_lora_rank, config.qk_rope_head_dim)
        self.softmax_scale = config.softmax_scale
        self.request = self._request(prefill_form, cuda_graph)
        self.page_sizes: set[int] = set()
        self._select(backend)
        self._create_weights(fuse_qkv_a)

    def forward(
        self, hidden_TD: Tensor | Fp4Hidden, step: Step, *, latent_TX: Tensor | None = None
    ) -> Tensor:
        """New hidden states [T, D] of the step's tokens; padded rows are 0. `step` comes from `prepare`.

        latent_TX: rows [T, L + R] for the new tokens, computed elsewhere, instead of kv_a_proj's: the normed
        latent, then the rope key before rotation.
        """
        output = self._attention(hidden_TD, step, latent_TX, want_lse=False)
        gated_THV = self.program.gate(self, output.values_THV, hidden_TD)
        hidden_TD = self.program.project_out(self, gated_THV, step.batch)
        return step.zero_padding(hidden_TD)

    def attention(
        self, hidden_TD: Tensor | Fp4Hidden, step: Step, return_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Everything before gate and o_proj: (out [T, H, V], lse [T, H] float32 or None)."""
        if return_lse:
            admission.check_lse(self)
        output = self._attention(hidden_TD, step, None, want_lse=return_lse)
        step.zero_padding(output.values_THV)
        if output.lse_TH is not None:
            step.zero_padding(output.lse_TH, -torch.inf)
        return output.values_THV, output.lse_TH

    def _attention(
        self, hidden_TD: Tensor | Fp4Hidden, step: Step, latent_TX: Tensor | None, *, want_lse: bool
    ) -> AttentionOutput:
        admission.check_call(self, hidden_TD, step, latent_TX)
        run = self.program
        values_TX = run.create_output(self, hidden_TD, step.batch)
        values_THV = values_TX.view(len(values_TX), self.num_heads, self.config.v_head_dim)
        lse_TH = values_THV.new_empty(values_THV.shape[:2], dtype=torch.float32) if want_lse else None
        output = AttentionOutput(values_THV, lse_TH)
        projected = with_latent(run.project(self, hidden_TD, step.batch), latent_TX)
        scale_queries(projected, step)
        run.rope(self, projected, step)
        run.append(self, projected, step)
        run.attend(self, projected, step, output)
        return output

    def prepare(self, batch: Batch, cache: LatentCache | CachePool, *, graph: bool = False) -> Step:
        """Host work of one engine step, shared by all layers that were built alike and read the same pages.

        graph: a decode step of fixed shape, to be captured in a CUDA graph and refreshed before each replay;
        the batch is padded to capacity by max_tokens and max_requests. Needs MLA(..., cuda_graph="decode").
        Raises CacheError or UnsupportedError when the cache does not fit this layer or its backends.
        """
        admission.check_cache(self, cache)
        if graph:
            admission.check_graph(self)
        step = planner.prepare(self, batch, cache, graph=graph)
        admission.warn_if_stale(self, step)
        return step

    def refresh(self, step: Step, batch: Batch) -> None:
        """Let a graph step describe another batch of the same capacity; its tensors stay where they are."""
        planner.refresh(self, step, batch)

    def new_cache(
        self,
        num_pages: int,
        page_size: int,
        *,
        k_scale: float | None = 1.0,
        v_scale: float | None = None,
        global_scale: float | None = 1.0,
        power_of_two: bool = False,
    ) -> LatentCache:
        """A zeroed cache for this layer.

        Scales matter to the quantised layouts that use them; None means 1. k_scale: per-tensor descale,
        stored = value / k_scale; a v_scale that differs is refused. global_scale: nvfp4's factor on all
        group scales. power_of_two: round scales that the writer chooses up to powers of two.
        """
        admission.check_page_size(self, page_size)
        scales = Scales.of(k_scale, v_scale, global_scale, power_of_two=power_of_two)
        return LatentCache.allocate(
            self.layout, num_pages, page_size, self.device, scales=scales, layer_idx=self.layer_idx
        )

    def new_pool(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        *,
        k_scale: float | None = 1.0,
        v_scale: float | None = None,
        global_scale: float | None = 1.0,
        power_of_two: bool = False,
    ) -> CachePool:
        """Zeroed caches of layers 0 to num_layers - 1 that share one page table; scales as in `new_cache`."""
        admission.check_page_size(self, page_size)
        made = {
            "num_pages": num_pages,
            "page_size": page_size,
            "device": self.device,
            "scales": Scales.of(k_scale, v_scale, global_scale, power_of_two=power_of_two),
        }
        return CachePool(self.layout, layers=num_layers, **made)

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint names, without prefix, of the tensors this layer needs, with their full shapes."""
        return weights.expected_shapes(self)

    def load_hf(
        self, state_dict: Mapping[str, Tensor], prefix: str = "", *, partial: bool = False
    ) -> weights.LoadReport:
        """Load a Hugging Face attention module's tensors; names without `prefix` are those of its
        `self_attn`.

        partial: some may be missing (a reload of a few). Derived weights are refreshed in place; tokens
        that a cache holds from before are then stale. Raises CheckpointError listing every missing,
        unexpected or misshapen tensor.
        """
        report = weights.load_hf(self, state_dict, prefix, partial=partial)
        self._after_load(report.complete)
        return report

    def prepare_weights(self) -> None:
        """Refresh everything derived from weights, in place. Call it after changing parameters by hand;
        idempotent.
        """
        weights.refresh_derived(self)
        self.program.prepare_weights(self)
        self.ready = True

    @property
    def quantised_modules(self) -> dict[str, QuantisedLinear]:
        """Modules whose weight is kept quantised, by checkpoint name. A prepare_weights hook may replace
        their `multiply`.
        """
        return weights.quantised_modules(self)

    @property
    def w_uk_HNL(self) -> Tensor:
        """W_uk [H, N, L]: nope queries to latent queries."""
        return self.w_uk_HLN.transpose(1, 2)

    @property
    def w_uv_HLV(self) -> Tensor:
        """W_uv [H, L, V]: latent outputs to values."""
        return self.w_uv_HVL.transpose(1, 2)

    def __getstate__(self) -> dict[str, Any]:
        """A copy binds kernels and hooks anew, by the same plan, in whatever process it is made."""
        bound = ("kernels", "program", "signature")
        return {name: value for name, value in self.__dict__.items() if name not in bound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()

    def _select(self, backend: str | None) -> None:
        """Resolve and bind; who refuses when it is built drops out, and the next one that fits is tried."""
        refused: dict[str, tuple[Reason, ...]] = {}
        while True:
            self.plan = resolve(self.request, backend, config_spec=self.config.backend, refused=refused)
            try:
                return self._bind()
            except UnsupportedError as error:
                if error.backend in refused or error.backend not in self.plan.choices.values():
                    raise
                refused[error.backend] = error.reasons
            except BrokenPlugin as error:
                # Who asked for it by name wants to know; who left the choice open wants a layer.
                if error.name in refused or error.name in parse(self.plan.spec).names():
                    raise
                broken = Reason(field="load", wanted="kernels that import", offered=error.cause)
                refused[error.name] = (broken,)

    def _bind(self) -> None:
        """Load what the plan names. Raises RegistryError, UnsupportedError, HookError or ContractError."""
        self.kernels, self.program = bind(self.plan, registries.default(), self._context)
        # Interned, so that layers built alike compare by identity.
        planned = self.plan.model_dump_json()
        self.signature = sys.intern(f"{planned} {self.config!r} {self.layout!r} {self.device}")

    def _context(self, name: str) -> LayerContext:
        options, kernels = self.plan.options.get(name, {}), self.plan.kernels_of(name)
        return LayerContext(self.request, kernels, options, self.softmax_scale, self.device, self.dtype)

    def _request(self, prefill_form: str, cuda_graph: str | None) -> LayerRequest:
        return layer_request(
            self.config,
            device=device_info(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            layout=self.layout.id,
            max_decode_query_len=self.max_decode_query_len,
            tp_size=self.tp_size,
            prefill_form=prefill_form,
            cuda_graph=cuda_graph,
            workspace_tokens=self.workspace_tokens,
        )

    def _create_weights(self, fuse_qkv_a: bool) -> None:
        config, heads = self.config, self.num_heads
        made = {"dtype": self.dtype, "device": self.device}
        self.projections = Projections(config, heads, fuse_qkv_a, **made)
        self.o_proj = Linear(heads * config.v_head_dim, config.hidden_size, config.has_output_bias, **made)
        self.gate_proj = None
        if config.gate is not None:
            gates = heads if config.gate.kind == "per_head" else heads * config.v_head_dim
            self.gate_proj = Linear(config.hidden_size, gates, False, **made)
        latent, nope, value = config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim
        self.register_buffer("w_uk_HLN", torch.empty(heads, latent, nope, **made), persistent=False)
        self.register_buffer("w_uv_HVL", torch.empty(heads, value, latent, **made), persistent=False)
        self.loaded: set[str] = set()
        self.ready, self.weights_version = False, 0
        self.program.create_weights(self)
        self.register_load_state_dict_pre_hook(_before_load_state_dict)
        self.register_load_state_dict_post_hook(_after_load_state_dict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MLA:
        """Refuse to move: the backend was chosen for one device and dtype."""
        moved = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if (moved.device, moved.dtype) != (self.device, self.dtype):
            raise ContractError(
                f"layer {self.layer_idx} was planned for {self.dtype} on {self.device} and cannot become "
                f"{moved.dtype} on {moved.device}; build it with MLA(..., dtype=, device=)"
            )
        return super()._apply(fn, recurse)

    def _after_load(self, names: Iterable[str]) -> None:
        self.loaded.update(names)
        self.weights_version += 1
        if self.loaded.issuperset(weights.expected_shapes(self)):
            self.prepare_weights()


def _before_load_state_dict(layer: MLA, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """nn.Module.load_state_dict counts as a full load when it leaves nothing of this layer out."""
    if all(prefix + name in state_dict for name in layer.state_dict()):
        layer.loaded.update(weights.expected_shapes(layer))


def _after_load_state_dict(layer: MLA, keys: Any) -> None:
    layer._after_load([])


def _heads_per_rank(
    config: MLAConfig, tp_size: int, tp_rank: int, reduce: Callable[[Tensor], Tensor] | None
) -> int:
    heads = heads_per_rank(config, tp_size)
    if not 0 <= tp_rank < tp_size:
        raise ConfigError(f"tp_rank must be 0 to {tp_size - 1} for tp_size={tp_size}, got {tp_rank}")
    if tp_size > 1 and reduce is None:
        raise ConfigError("tp_size > 1 needs reduce, the function that sums partial outputs over the ranks")
    return heads


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")
    return value
