"""What `mla inspect` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mla_core.cli.console import columns
from mla_core.cli.inspect_checkpoint import CacheFit, Inspection
from mla_core.config import IndexerConfig, MLAConfig
from mla_core.plan import rejection_lines

__all__ = ["inspection_json", "inspection_lines", "ranges"]


def inspection_json(found: Inspection) -> dict[str, Any]:
    """Everything, with the layer's config as MLAConfig dumps it."""
    checkpoint, config = found.checkpoint, found.config
    first = next(iter(checkpoint.layers.values()), None)
    return {
        "checkpoint": str(checkpoint.directory),
        "family": config.model_type,
        "names": None if first is None else first.naming.id,
        "config": config.model_dump(mode="json"),
        "softmax_scale": config.softmax_scale,
        "layers": list(checkpoint.layers),
        "extra_layers": list(checkpoint.extra_layers),
        "weights": [
            {"layer": own.layer, "prefix": own.prefix, "bytes": own.nbytes, "formats": dict(own.formats)}
            for own in found.weights
        ],
        "caches": [
            {
                "layout": own.layout,
                "bytes": own.nbytes,
                "refusal": own.refusal,
                "backends": list(own.backends),
            }
            for own in found.caches
        ],
        "index_bytes": found.index_bytes,
        "device": str(found.request.device),
        "dtype": found.request.dtype,
        "cache": found.request.layout,
        "backends": [
            {
                "backend": own.backend,
                "kernel": own.kernel,
                "serves": own.rejection is None,
                "reasons": [] if own.rejection is None else [str(why) for why in own.rejection.reasons],
            }
            for own in found.kernels
        ],
        "problems": list(found.problems),
    }


def inspection_lines(found: Inspection) -> list[str]:
    """The same to read."""
    checkpoint, config = found.checkpoint, found.config
    facts = [
        ("model", config.model_type),
        ("layers", _layers(found)),
        ("dims", _dims(config)),
        ("rope", _rope(config)),
        ("softmax", f"scale {config.softmax_scale:.9f}"),
        *(("also", extra) for extra in _extras(config, found.index_bytes)),
        *_weights(found),
    ]
    return [
        str(checkpoint.directory),
        *columns(facts),
        "cache, bytes a token",
        *columns(_caches(found), right=(1, 2)),
        f"backends on {found.request.device}, {found.request.dtype} over {found.request.layout}",
        *_backends(found),
        *_problems(found.problems),
    ]


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _layers(found: Inspection) -> str:
    own, extra = found.checkpoint.layers, found.checkpoint.extra_layers
    if not own:
        return "none with MLA"
    first = next(iter(own.values()))
    text = f"{len(own)} with MLA: {ranges(own)}, names of {first.naming.id} under {first.prefix}*"
    return f"{text}; beyond the model's own: {ranges(extra)}" if extra else text


def _dims(config: MLAConfig) -> str:
    query = "no query rank" if config.q_lora_rank is None else f"query rank {config.q_lora_rank}"
    return (
        f"{config.hidden_size} hidden, {config.num_heads} heads, {query}, latent {config.kv_lora_rank}, "
        f"nope {config.qk_nope_head_dim}, rope {config.qk_rope_head_dim}, value {config.v_head_dim}"
    )


def _rope(config: MLAConfig) -> str:
    rope = config.rope
    if rope.style == "none":
        return "none"
    text = f"{rope.style}, theta {rope.theta:g}"
    if rope.scaling is None:
        return text
    settings = rope.scaling.model_dump(exclude_none=True, exclude_defaults=True)
    shown = ", ".join(f"{key} {_setting(value)}" for key, value in settings.items())
    return f"{text}, {rope.scaling.kind} {shown}"


def _setting(value: object) -> str:
    return f"of {len(value)}" if isinstance(value, tuple) else f"{value}"


def _extras(config: MLAConfig, index_bytes: int | None) -> list[str]:
    """What is not in every family."""
    factors = {"query": config.query_scale, "latent": config.latent_scale}
    found = [f"{name} times {factor:g}" for name, factor in factors.items() if factor != 1.0]
    if config.gate is not None:
        found.append(f"{config.gate.kind} gate from {config.gate.weight_name}")
    if config.query_scaling is not None:
        scaling = config.query_scaling
        found.append(f"queries scaled by position, beta {scaling.beta:g} every {scaling.floor_scale}")
    if config.attention_bias:
        found.append("biases")
    if config.indexer is not None:
        found.append(_indexer(config.indexer, index_bytes))
    return found


def _indexer(indexer: IndexerConfig, nbytes: int | None) -> str:
    where = "all layers" if indexer.full_layers is None else f"layers {ranges(indexer.full_layers)}"
    size = "" if nbytes is None else f"; a key takes {nbytes} bytes a token in idx_fp8"
    return f"indexer of {indexer.num_heads} x {indexer.head_dim}, top {indexer.topk}, in {where}{size}"


def _weights(found: Inspection) -> list[tuple[str, str]]:
    """Which layers store which matrices how; layers alike share a line."""
    alike: dict[str, list[int]] = {}
    for own in found.weights:
        alike.setdefault(_formats(own.formats), []).append(own.layer)
    nbytes = sum(own.nbytes for own in found.weights)
    lines = [("weights", f"{nbytes / 1e9:.3g} GB of attention")] if found.weights else []
    return [*lines, *((f"  {ranges(layers)}", text) for text, layers in alike.items())]


def _formats(formats: Mapping[str, str]) -> str:
    """ "fp8: q_a_proj, kv_b_proj; bfloat16: o_proj"."""
    modules: dict[str, list[str]] = {}
    for module, stored in formats.items():
        modules.setdefault(stored, []).append(module)
    return "; ".join(f"{stored}: {', '.join(own)}" for stored, own in modules.items()) or "nothing"


def _caches(found: Inspection) -> list[Sequence[object]]:
    count = len(found.checkpoint.layers)
    rows: list[Sequence[object]] = [("LAYOUT", "A LAYER", "ALL LAYERS", "SERVED BY")]
    return rows + [_cache(fit, count) for fit in found.caches]


def _cache(fit: CacheFit, count: int) -> Sequence[object]:
    if fit.nbytes is None:
        return (fit.layout, "-", "-", fit.refusal or "")
    return (fit.layout, fit.nbytes, fit.nbytes * count, ", ".join(fit.backends) or "nobody here")


def _backends(found: Inspection) -> list[str]:
    """One line for what each backend would serve, and one for every reason of what it would not."""
    if not found.kernels:
        return ["  none is installed"]
    serving: dict[str, list[str]] = {fit.backend: [] for fit in found.kernels}
    for fit in found.kernels:
        if fit.rejection is None:
            serving[fit.backend].append(fit.kernel)
    rows = [(name, f"serves {', '.join(kernels) or 'nothing'}") for name, kernels in serving.items()]
    rejected = rejection_lines(fit.rejection for fit in found.kernels if fit.rejection is not None)
    why = ["why not", *(f"  {line}" for line in rejected)] if rejected else []
    return [*columns(rows), *why]


def _problems(problems: Sequence[str]) -> list[str]:
    return [f"{len(problems)} problems", *(f"  {problem}" for problem in problems)] if problems else []
