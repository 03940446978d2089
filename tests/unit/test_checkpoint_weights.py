"""Weights are judged from headers: every format is recognised, and all that is wrong is said at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_core.checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from mla_core.checkpoint_weights import LayerWeights, check, survey
from mla_core.config import MLAConfig
from mla_core.errors import CheckpointError
from mla_core.weight_places import places_of

CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_hidden_layers": 2,
}
PREFIX = "model.layers.{}.self_attn."
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def dense(prefix: str = PREFIX) -> dict[str, Tensor]:
    """Both layers' tensors in bfloat16."""
    shapes = {name: place.shape for name, place in places_of(MLAConfig.from_hf(CONFIG)).items()}
    return {
        prefix.format(layer) + name: torch.zeros(shape, dtype=BF16)
        for layer in range(2)
        for name, shape in shapes.items()
    }


def written(folder: Path, tensors: dict[str, Tensor], config: dict = CONFIG) -> Checkpoint:
    write_checkpoint(folder / "checkpoint", config, tensors)
    return open_checkpoint(folder / "checkpoint")


def second(checkpoint: Checkpoint) -> LayerWeights:
    return survey(checkpoint, checkpoint.layers)[1]


def with_o_proj(folder: Path, **parts: Tensor) -> Checkpoint:
    """A checkpoint whose second layer stores o_proj [64, 32] as these tensors."""
    tensors = dense()
    module = PREFIX.format(1) + "o_proj"
    del tensors[f"{module}.weight"]
    return written(folder, tensors | {f"{module}.{name}": value for name, value in parts.items()})


FORMATS = {
    "fp8, one scale": {"weight": torch.zeros(64, 32, dtype=E4M3), "weight_scale": torch.zeros(())},
    "fp8, a scale per row": {"weight": torch.zeros(64, 32, dtype=E4M3), "weight_scale": torch.zeros(64, 1)},
    "fp8, blocks of 128 x 128": {
        "weight": torch.zeros(300, 200, dtype=E4M3),
        "weight_scale_inv": torch.zeros(3, 2),
    },
    "nvfp4": {
        "weight": torch.zeros(64, 16, dtype=torch.uint8),
        "weight_scale": torch.zeros(64, 2, dtype=E4M3),
        "weight_scale_2": torch.zeros(()),
        "input_scale": torch.zeros(()),
    },
    "nvfp4_packed": {
        "weight_packed": torch.zeros(64, 16, dtype=torch.uint8),
        "weight_scale": torch.zeros(64, 2, dtype=E4M3),
        "weight_global_scale": torch.zeros(1),
    },
    "int4_packed, groups of 16": {
        "weight_packed": torch.zeros(64, 4, dtype=torch.int32),
        "weight_scale": torch.zeros(64, 2, dtype=BF16),
        "weight_shape": torch.tensor([64, 32]),
    },
    "float16": {"weight": torch.zeros(64, 32, dtype=torch.float16)},
}
SMALL = {name: parts for name, parts in FORMATS.items() if "blocks" not in name}


@pytest.mark.parametrize(("name", "parts"), SMALL.items(), ids=SMALL)
def test_a_format_is_told_by_the_tensors_that_are_there(tmp_path, name, parts):
    found = second(with_o_proj(tmp_path, **parts))
    assert (found.formats["o_proj"], found.problems) == (name, ())


def test_the_other_matrices_keep_theirs(tmp_path):
    formats = second(with_o_proj(tmp_path, **FORMATS["nvfp4"])).formats
    assert formats == {
        "q_a_proj": "bfloat16",
        "q_b_proj": "bfloat16",
        "kv_a_proj_with_mqa": "bfloat16",
        "kv_b_proj": "bfloat16",
        "o_proj": "nvfp4",
    }


def test_blocks_are_told_by_their_size(tmp_path):
    config = CONFIG | {"hidden_size": 300, "v_head_dim": 100}
    shapes = {name: place.shape for name, place in places_of(MLAConfig.from_hf(config)).items()}
    prefix = PREFIX.format(0)
    tensors = {prefix + name: torch.zeros(shape, dtype=BF16) for name, shape in shapes.items()}
    parts = FORMATS["fp8, blocks of 128 x 128"]
    tensors |= {f"{prefix}o_proj.{name}": value for name, value in parts.items()}
    (found,) = survey(written(tmp_path, tensors, config), [0])
    assert (found.formats["o_proj"], found.problems) == ("fp8, blocks of 128 x 128", ())


def test_bytes_are_those_of_the_layers_own_tensors(tmp_path):
    tensors = dense()
    own = sum(value.nbytes for name, value in tensors.items() if name.startswith(PREFIX.format(1)))
    assert second(written(tmp_path, tensors | {"model.embed_tokens.weight": torch.zeros(99)})).nbytes == own


def test_an_indexers_tensors_are_left_alone(tmp_path):
    name = PREFIX.format(1) + "indexer.wk.weight"
    found = second(written(tmp_path, dense() | {name: torch.zeros(4, 4)}))
    assert (found.ignored, found.problems) == ((name,), ())


def broken(prefix: str = PREFIX, o_proj: str = "o_proj") -> dict[str, Tensor]:
    """One tensor missing, one of a wrong shape, one too many, in two layers."""
    tensors = {name.replace("o_proj", o_proj): value for name, value in dense(prefix).items()}
    del tensors[f"{prefix.format(0)}{o_proj}.weight"]
    tensors[prefix.format(1) + "kv_b_proj.weight"] = torch.zeros(3, 4)
    tensors[prefix.format(1) + "k_proj.weight"] = torch.zeros(5)
    return tensors


def test_all_that_is_wrong_with_all_layers_is_said_at_once(tmp_path):
    checkpoint = written(tmp_path, broken())
    with pytest.raises(CheckpointError) as caught:
        check(checkpoint, checkpoint.layers)
    assert str(caught.value).splitlines() == [
        f"the attention weights of {checkpoint.directory} do not fit its config:",
        "  model.layers.0.self_attn.o_proj.weight is missing, expected [64, 32]",
        "  model.layers.1.self_attn.k_proj.weight [5] is unexpected",
        "  model.layers.1.self_attn.kv_b_proj.weight has shape [3, 4], expected [64, 32]",
    ]


def test_a_missing_tensor_has_the_checkpoints_own_name(tmp_path):
    checkpoint = written(tmp_path, broken("model.layers.{}.attention.", "dense"))
    first, _ = survey(checkpoint, checkpoint.layers)
    assert first.problems == ("model.layers.0.attention.dense.weight is missing, expected [64, 32]",)


def test_a_quantised_weight_that_lacks_its_scale_is_a_problem(tmp_path):
    found = second(with_o_proj(tmp_path, weight=torch.zeros(64, 32, dtype=E4M3)))
    assert found.problems == (
        "model.layers.1.self_attn: o_proj lacks weight_scale_inv [1, 1], which the format fp8 needs",
    )


def test_nothing_is_said_of_weights_that_fit(tmp_path):
    checkpoint = written(tmp_path, dense())
    check(checkpoint, checkpoint.layers)
