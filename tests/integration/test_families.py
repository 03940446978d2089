"""Checkpoints that transformers writes of tiny models of every family: read, inspected, run, and equal.

Legend: T tokens, D model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from typer.testing import CliRunner, Result

from mla_core import MLA
from mla_core.checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from mla_core.cli.app import app
from tests.integration.hf import FAMILIES, Family, hidden_states, plain_rope, randomise, yarn_rope
from tests.integration.test_layer_matches_transformers import TOKENS, Pair, new_cache, run
from tests.integration.test_reference_matches_transformers import distance

TOLERANCE = 1e-4
# What is not attention is as small as it gets.
SMALL = {
    "vocab_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8, "linear_num_heads": 2}
# More than all tests' tokens, so that selection selects everything.
INDEXER = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 64}
V3_ROPE = yarn_rope(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)


@dataclass(frozen=True)
class Case:
    """A family as a whole model. prefix: of its last attention in the checkpoint."""

    family: Family
    model_class: str
    prefix: str = "model.layers.1.self_attn."
    changes: Mapping[str, Any] = field(default_factory=dict)
    # Where the config is another family's than the modules.
    model_type: str | None = None
    # The shell around a text model.
    shell: str | None = None

    @property
    def config_type(self) -> str:
        return self.model_type or self.family.model_type

    def model(self) -> PreTrainedModel:
        config = replace(self.family, model_type=self.config_type).config(**(SMALL | dict(self.changes)))
        if self.shell is not None:
            tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
            tower |= {"num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4}
            config = AutoConfig.for_model(
                self.shell, text_config=config.to_dict(), vision_config=tower, projection_hidden_size=16
            )
        config._attn_implementation = "eager"
        model = getattr(transformers, self.model_class)(config)
        for number, attention in enumerate(self.attentions(model).values()):
            randomise(attention, seed=number)
        return model.float().eval()

    def attentions(self, model: PreTrainedModel) -> dict[int, nn.Module]:
        """The MLA modules by layer index."""
        name = self.family.attention
        found = [module for module in model.modules() if type(module).__name__ == name]
        return {module.layer_idx: module for module in found}


def case(name: str, model_class: str, **more: Any) -> Case:
    return Case(FAMILIES[name], model_class, **more)


def sparse(model_type: str, classes: str, rope: Mapping[str, Any]) -> Case:
    attention, rotary = f"{classes}Attention", f"{classes}RotaryEmbedding"
    family = Family(model_type, model_type, attention, rotary, rope | INDEXER, indexed=True)
    return Case(family, f"{classes}ForCausalLM")


CASES = {
    "deepseek_v2": case("deepseek_v2", "DeepseekV2ForCausalLM"),
    "deepseek_v2_lite": case("deepseek_v2_lite", "DeepseekV2ForCausalLM"),
    "deepseek_v3": case("deepseek_v3", "DeepseekV3ForCausalLM"),
    "deepseek_v32": sparse("deepseek_v32", "DeepseekV32", V3_ROPE),
    "kimi_k25": case(
        "kimi_k2",
        "Kimi_K25ForConditionalGeneration",
        shell="kimi_k25",
        # Released checkpoints say layers; transformers 5.24 renames the tower's, and the text's with them.
        prefix="language_model.model.blocks.1.self_attn.",
    ),
    "glm4_moe_lite": case("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    "glm_moe_dsa": sparse("glm_moe_dsa", "GlmMoeDsa", plain_rope(1e6)),
    "longcat_flash": case(
        "longcat_flash",
        "LongcatFlashForCausalLM",
        prefix="model.layers.1.self_attn.1.",
        changes={
            "num_layers": 2,
            "num_hidden_layers": 4,
            "ffn_hidden_size": 32,
            "expert_ffn_hidden_size": 16,
        },
    ),
    "minicpm3": case("minicpm3", "MiniCPM3ForCausalLM"),
    "mistral4": case("mistral4", "Mistral4ForCausalLM"),
    "youtu": case("youtu", "YoutuForCausalLM"),
    "kimi_linear": case("kimi_linear", "KimiLinearForCausalLM", changes=HYBRID),
    "bailing_hybrid": case(
        "bailing_hybrid", "BailingHybridForCausalLM", prefix="model.layers.1.attention.", changes=HYBRID
    ),
    "axk1": case("axk1", "AXK1ForCausalLM"),
    "sarvam_mla": case("moonlight", "DeepseekV3ForCausalLM", model_type="sarvam_mla"),
}


@dataclass(frozen=True)
class Written:
    """A model of transformers, and the checkpoint that it wrote."""

    case: Case
    model: PreTrainedModel
    checkpoint: Checkpoint

    @property
    def path(self) -> Path:
        return self.checkpoint.directory

    def layer(self, index: int) -> MLA:
        layer = MLA(self.checkpoint.config, backend="vanilla", dtype=torch.float32, layer_idx=index)
        layer.load_hf(self.checkpoint.attention(index))
        return layer

    def error(self, index: int, weights_of: int) -> float:
        """Largest difference between transformers' attention and a layer with the weights of some layer."""
        module, hidden_TD = self.case.attentions(self.model)[index], hidden_states(TOKENS, seed=2)
        layer = self.layer(weights_of)
        outputs_TD = run(layer, new_cache(layer), hidden_TD, [11, 1, 1, 1], 0)
        with first_in_cache(module):
            return distance(outputs_TD, Pair(self.case.family, module, layer).expected(hidden_TD, 0))


@contextmanager
def first_in_cache(module: nn.Module) -> Iterator[None]:
    """transformers keeps rows by layer index; alone, a module writes those of layer 0."""
    indices = {part: part.layer_idx for part in module.modules() if "layer_idx" in vars(part)}
    for part in indices:
        part.layer_idx = 0
    yield
    for part, index in indices.items():
        part.layer_idx = index


@pytest.fixture(scope="module", params=CASES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    model = case.model()
    model.save_pretrained(folder)
    return Written(case, model, open_checkpoint(folder))


def mla(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_the_checkpoint_has_the_models_mla_layers(found):
    assert list(found.checkpoint.layers) == sorted(found.case.attentions(found.model))
    assert found.checkpoint.config.attention_layers == tuple(found.checkpoint.layers)


def test_the_last_attention_lies_where_the_family_puts_it(found):
    assert list(found.checkpoint.layers.values())[-1].prefix == found.case.prefix


def test_every_layer_gives_what_transformers_gives(found):
    assert max(found.error(index, index) for index in found.checkpoint.layers) <= TOLERANCE


def test_inspect_knows_the_family_and_finds_nothing_wrong(found):
    shown = mla("inspect", str(found.path), "--json")
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert (report["family"], report["problems"]) == (found.case.config_type, [])


def test_run_verifies_every_layer(found):
    layers = ",".join(map(str, found.checkpoint.layers))
    shown = mla("run", "--checkpoint", str(found.path), "--layers", layers, "--dtype", "float32", "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["verified"] is True


# Their own names for the same tensors, their own config files, and how those say what `Case` says.
NATIVE_DIMS = {
    "dim": 48,
    "n_heads": 3,
    "n_layers": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
NATIVE_NAMES = {
    "deepseek_v3": {
        "model.layers": "layers",
        "self_attn.q_a_proj": "attn.wq_a",
        "self_attn.q_a_layernorm": "attn.q_norm",
        "self_attn.q_b_proj": "attn.wq_b",
        "self_attn.kv_a_proj_with_mqa": "attn.wkv_a",
        "self_attn.kv_a_layernorm": "attn.kv_norm",
        "self_attn.kv_b_proj": "attn.wkv_b",
        "self_attn.o_proj": "attn.wo",
    },
    "mistral4": {
        "model.layers": "layers",
        "self_attn.q_a_proj": "attention.wq_a",
        "self_attn.q_a_layernorm": "attention.q_a_norm",
        "self_attn.q_b_proj": "attention.wq_b",
        "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
        "self_attn.kv_a_layernorm": "attention.kv_a_norm",
        "self_attn.kv_b_proj": "attention.wkv_b",
        "self_attn.o_proj": "attention.wo",
    },
}
NATIVE_CONFIGS = {
    "deepseek_v3": ("config.json", {"inter_dim": 32, "rope_factor": 40}),
    "mistral4": (
        "params.json",
        {
            "norm_eps": 1e-5,
            "n_kv_heads": 3,
            "max_position_embeddings": 163840,
            "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
            "yarn": {"original_max_position_embeddings": 8192, "factor": 128, "beta": 32, "alpha": 1},
        },
    ),
}


def told_natively(found: Written, name: str, folder: Path) -> Written:
    """The same model as its makers' own code would have written it."""
    tensors = {}
    for own, value in found.checkpoint.read(found.checkpoint.names()).items():
        for theirs, native in NATIVE_NAMES[name].items():
            own = own.replace(theirs, native)
        tensors[own] = value
    file, more = NATIVE_CONFIGS[name]
    (folder / file).write_text(json.dumps(NATIVE_DIMS | more))
    save_file(tensors, folder / "consolidated.safetensors")
    return replace(found, checkpoint=open_checkpoint(folder))


@pytest.mark.parametrize(
    ("found", "naming"), [("deepseek_v3", "deepseek"), ("mistral4", "mistral")], indirect=["found"]
)
def test_native_files_give_what_transformers_gives(found, naming, tmp_path):
    native = told_natively(found, found.case.family.name, tmp_path)
    assert [place.naming.id for place in native.checkpoint.layers.values()] == [naming, naming]
    assert native.error(1, 1) <= TOLERANCE


@pytest.mark.parametrize("found", ["deepseek_v3"], indirect=True)
def test_a_layer_beyond_the_models_own_runs_when_asked_for(found, tmp_path):
    tensors = found.checkpoint.read(found.checkpoint.names())
    second = {name: value.clone() for name, value in tensors.items() if "layers.1." in name}
    extra = {name.replace("layers.1.", "layers.2."): value for name, value in second.items()}
    write_checkpoint(tmp_path / "checkpoint", found.checkpoint.hf_config, tensors | extra)
    command = ("run", str(tmp_path / "checkpoint"), "--dtype", "float32", "--json")
    asked, default = mla(*command, "--layers", "2"), mla(*command)
    assert json.loads(asked.stdout)["verified"] is True
    assert [json.loads(shown.stdout)["layers"] for shown in (asked, default)] == [[2], [0]]


@pytest.mark.parametrize("found", ["deepseek_v3", "kimi_k25", "longcat_flash"], indirect=True)
def test_the_comparison_notices_the_weights_of_another_layer(found):
    first, second, *_ = found.checkpoint.layers
    assert found.error(first, second) > 100 * TOLERANCE
