"""Checkpoints written by transformers, compressed-tensors and modelopt themselves, bit for bit.

Every writer quantises the attention of one small DeepSeek-V3 model and dequantises it again with its own
code; the layer must hold exactly those values, and compute what transformers computes with them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedConfig

from mla_core import MLA, Batch, MLAConfig
from mla_core.projections import QuantisedLinear
from mla_core.weight_places import places

PREFIX = "model.layers.0.self_attn."
LINEARS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}

Tensors = Mapping[str, Tensor]


def hf_config(**changes: Any) -> PreTrainedConfig:
    dims: dict[str, Any] = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 96,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 256,
        "vocab_size": 128,
        "intermediate_size": 128,
    }
    config = AutoConfig.for_model("deepseek_v3", **(dims | changes))
    config.architectures = ["DeepseekV3ForCausalLM"]
    return config


def new_model(**changes: Any) -> nn.Module:
    """A random model in bfloat16, its blocks of 128 of very different sizes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(**changes), dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name in LINEARS:
            weight = getattr(model.model.layers[0].self_attn, name).weight
            rows = torch.logspace(-0.5, 0.5, weight.shape[0])[:, None]
            weight.copy_(torch.randn(weight.shape) * rows / weight.shape[1] ** 0.5)
    return model


def layer_of(directory: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> MLA:
    """Our layer, from a checkpoint's own config and tensors."""
    layer = MLA(MLAConfig.from_hf(directory), backend="vanilla", dtype=dtype, **options)
    layer.load_hf(load_file(directory / "model.safetensors"), PREFIX)
    return layer


def held(layer: MLA, name: str) -> Tensor:
    """What the layer holds of one linear, dequantised to its dtype."""
    if name == "kv_b_proj":
        return torch.cat([layer.w_uk_HNL, layer.w_uv_HVL], dim=1).flatten(0, 1)
    module = layer.o_proj if name == "o_proj" else getattr(layer.projections, name)
    return module.stored.dequantise(layer.dtype) if isinstance(module, QuantisedLinear) else module.weight


def assert_holds(layer: MLA, expected: Callable[[str], Tensor]) -> None:
    for name in LINEARS:
        assert torch.equal(held(layer, name), expected(name)), name


def outputs(layer: MLA, hidden_TD: Tensor) -> Tensor:
    """A prefill and two decode steps."""
    cache, done, found = layer.new_cache(4, 16), 0, []
    for new in hidden_TD.split([len(hidden_TD) - 2, 1, 1]):
        batch = Batch.build([len(new)], [done], [[3, 1, 0, 2]], 16)
        found.append(layer(new, layer.prepare(batch, cache)))
        done += len(new)
    return torch.cat(found)


@torch.no_grad()
def transformers_outputs(layer: MLA, hidden_TD: Tensor) -> Tensor:
    """The attention of transformers in float32 with the dense weights that the layer stands for."""
    model = new_model().float()
    attention = model.model.layers[0].self_attn
    for name in LINEARS:
        getattr(attention, name).weight = nn.Parameter(held(layer, name))
    tokens = len(hidden_TD)
    positions = model.model.rotary_emb(hidden_TD[None], torch.arange(tokens)[None])
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    return attention(hidden_TD[None], position_embeddings=positions, attention_mask=mask)[0][0]


def assert_computes(directory: Path) -> None:
    """The layer's quantised products equal those of transformers with the dequantised weights."""
    hidden_TD = torch.randn(20, 256, generator=torch.Generator().manual_seed(3))
    layer = layer_of(directory, torch.float32)
    expected = transformers_outputs(layer, hidden_TD)
    torch.testing.assert_close(outputs(layer, hidden_TD), expected, rtol=1e-4, atol=1e-4)


def weights_of(model: nn.Module) -> Callable[[str], Tensor]:
    attention = model.model.layers[0].self_attn
    return lambda name: getattr(attention, name).weight.detach()


# transformers: FP8 in blocks of 128 x 128.


def write_by_transformers(directory: Path, scale_fmt: str) -> None:
    """The model's attention through transformers' own quantiser, which leaves kv_a_proj_with_mqa as it is
    because its last block would be ragged.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    class Quantizer:
        quantization_config = FineGrainedFP8Config(scale_fmt=scale_fmt)

    model, tensors = new_model(), {}
    for name, value in model.state_dict().items():
        is_ours = name.startswith(PREFIX) and value.dim() == 2
        tensors |= Fp8Quantize(Quantizer()).convert({name: value}) if is_ours else {name: value}
    save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
    others = ["lm_head", "mlp", "kv_a_proj_with_mqa"]
    stated = BLOCKS | {"scale_fmt": scale_fmt, "modules_to_not_convert": others}
    config = model.config.to_dict() | {"quantization_config": stated, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def read_by_transformers(directory: Path, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """Weights as transformers dequantises them."""
    stated = FineGrainedFP8Config(dequantize=True)
    return weights_of(
        AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, quantization_config=stated)
    )


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_blocks_written_by_transformers_are_read_bit_for_bit(tmp_path, scale_fmt):
    pytest.importorskip("accelerate", reason="transformers loads FP8 checkpoints through accelerate")
    write_by_transformers(tmp_path, scale_fmt)
    layer = layer_of(tmp_path)
    assert isinstance(layer.o_proj, QuantisedLinear)
    assert_holds(layer, read_by_transformers(tmp_path, torch.bfloat16))
    assert_holds(layer_of(tmp_path, torch.float32), read_by_transformers(tmp_path, torch.float32))
    assert_computes(tmp_path)


def test_a_scale_changed_in_one_block_is_seen(tmp_path):
    pytest.importorskip("accelerate", reason="transformers loads FP8 checkpoints through accelerate")
    write_by_transformers(tmp_path, "float")
    expected = read_by_transformers(tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{PREFIX}o_proj.weight_scale_inv"][1, 2] *= 1.01
    save_file(tensors, tmp_path / "model.safetensors")
    assert not torch.equal(held(layer_of(tmp_path), "o_proj"), expected("o_proj"))


# compressed-tensors: FP8 and FP4 floats, packed int4.


def write_by_compressed_tensors(directory: Path, scheme: Mapping[str, Any]) -> nn.Module:
    """The attention through compressed-tensors; returns the model that it decompressed again."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = new_model()
    group = {"targets": [f"re:.*self_attn.{name}" for name in LINEARS]} | scheme
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": group}))
    with torch.no_grad():
        for name in LINEARS:
            calibrate(getattr(model.model.layers[0].self_attn, name))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")
    model.config.to_json_file(directory / "config.json", use_diff=False)
    compressor.update_config(str(directory))
    compressor.decompress_model(model)
    return model


def calibrate(module: nn.Module) -> None:
    """Fill in the scales that compressed-tensors only makes room for, from the largest values."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments, weight = module.quantization_scheme.weights, module.weight
    step = (1, weight.shape[1])
    if arguments.strategy == "block":
        step = tuple(arguments.block_structure)
    elif arguments.group_size:
        step = (1, arguments.group_size)
    rows = [band.split(step[1], 1) for band in weight.split(step[0], 0)]
    low = torch.stack([torch.stack([part.min() for part in band]) for band in rows])
    high = torch.stack([torch.stack([part.max() for part in band]) for band in rows])
    whole = None
    if arguments.strategy == "tensor_group":
        whole = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.copy_(whole)
    scale, _ = calculate_qparams(low, high, arguments, global_scale=whole)
    module.weight_scale.copy_(scale.reshape(module.weight_scale.shape))


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
DYNAMIC8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
COMPRESSED = {
    "float-block": (
        {
            "weights": FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
            "input_activations": DYNAMIC8,
        },
        "fp8",
    ),
    "float-channel": ({"weights": FLOAT8 | {"strategy": "channel"}, "input_activations": DYNAMIC8}, "fp8"),
    "nvfp4": (
        {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}},
        "nvfp4_packed",
    ),
    "int4-group": (
        {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}},
        "int4_packed",
    ),
    "int4-channel": ({"weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}, "int4_packed"),
}


@pytest.mark.parametrize(("scheme", "format_id"), COMPRESSED.values(), ids=COMPRESSED)
def test_what_compressed_tensors_writes_is_read_bit_for_bit(tmp_path, scheme, format_id):
    pytest.importorskip("compressed_tensors", reason="writes the checkpoint")
    model = write_by_compressed_tensors(tmp_path, scheme)
    layer = layer_of(tmp_path)
    assert layer.o_proj.stored.format.id == format_id
    assert_holds(layer, lambda name: weights_of(model)(name).bfloat16())
    assert_computes(tmp_path)


# modelopt: NVFP4, and FP8 per tensor, per channel and in blocks.


def write_by_modelopt(directory: Path, name: str) -> None:
    """The model through modelopt's quantiser and exporter."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    tokens = torch.arange(24).reshape(2, 12)
    quantised = mtq.quantize(new_model(), copy.deepcopy(getattr(mtq, name)), lambda model: model(tokens))
    export_hf_checkpoint(quantised, export_dir=directory)


def read_by_modelopt(directory: Path, layer: MLA) -> Callable[[str], Tensor]:
    """Exported tensors through modelopt's tensor classes, in float32."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    tensors = load_file(directory / "model.safetensors")

    def values(name: str) -> Tensor:
        codes, scale = (tensors[f"{PREFIX}{name}.{part}"] for part in ("weight", "weight_scale"))
        whole = tensors.get(f"{PREFIX}{name}.weight_scale_2")
        shape = torch.Size(places(layer)[f"{name}.weight"].shape)
        if whole is not None:
            packed = NVFP4QTensor(shape, torch.float32, codes)
            return packed.dequantize(scale=scale, double_scale=whole, block_sizes={-1: 16})
        plain = FP8QTensor(shape, torch.float32, codes)
        if scale.dim() == 4:
            return plain.dequantize(scale=scale[:, 0, :, 0], block_sizes={-1: 128, -2: 128})
        return plain.dequantize(scale=scale[:, None] if scale.dim() == 1 else scale)

    return values


MODELOPT = {
    "NVFP4_DEFAULT_CFG": "nvfp4",
    "FP8_DEFAULT_CFG": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": "fp8",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": "fp8",
}


@pytest.mark.parametrize(("name", "format_id"), MODELOPT.items(), ids=MODELOPT)
# modelopt warns of what it finds missing on this machine and of what it will drop.
@pytest.mark.filterwarnings("ignore")
def test_what_modelopt_writes_is_read_bit_for_bit(tmp_path, name, format_id):
    pytest.importorskip("modelopt", reason="writes the checkpoint")
    write_by_modelopt(tmp_path, name)
    layer = layer_of(tmp_path, torch.float32)
    assert layer.o_proj.stored.format.id == format_id
    assert_holds(layer, read_by_modelopt(tmp_path, layer))
    assert_computes(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_inputs_are_rounded_by_the_static_scales_that_modelopt_found(tmp_path):
    pytest.importorskip("modelopt", reason="writes the checkpoint")
    write_by_modelopt(tmp_path, "NVFP4_DEFAULT_CFG")
    hidden_TD = torch.randn(20, 256, generator=torch.Generator().manual_seed(3))
    plain, rounded = (layer_of(tmp_path, torch.float32, fp4_inputs=on) for on in (False, True))
    expected = outputs(plain, hidden_TD)
    error = (outputs(rounded, hidden_TD) - expected).norm() / expected.norm()
    assert 0.01 < error < 0.4
