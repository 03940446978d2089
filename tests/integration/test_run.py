"""mla run on the trained checkpoint computes what transformers' own model computes from the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from mla_core import MLA
from mla_core.checkpoint import open_checkpoint
from mla_core.cli.app import app
from mla_core.cli.engine import Engine
from mla_core.cli.inputs import text_inputs
from mla_core.cli.scenario import Scenario, default_scenario, parse_requests
from mla_core.cli.verify import relative_error

TINY = Path(__file__).resolve().parents[1] / "data/tiny_mla_kjv"
TOKENS = 96


@pytest.fixture(scope="module")
def attention() -> tuple[Tensor, Tensor]:
    """What goes into and comes out of the first attention of transformers' model on the text."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="eager")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TINY / "tokenizer.json"))
    text = (TINY / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]
    seen: list[tuple[Tensor, Tensor]] = []

    def record(_: object, arguments: tuple, options: dict, result: tuple) -> None:
        hidden = options["hidden_states"] if "hidden_states" in options else arguments[0]
        seen.append((hidden[0], result[0][0]))

    model.model.layers[0].self_attn.register_forward_hook(record, with_kwargs=True)
    with torch.no_grad():
        model(ids)
    return seen[0]


def first_output(scenario: Scenario, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs and outputs of the first request's first step, as `mla run` makes them."""
    checkpoint = open_checkpoint(TINY)
    layer = MLA(checkpoint.config, dtype=dtype, backend="vanilla", workspace_tokens=64)
    layer.load_hf(checkpoint.attention(0))
    inputs = text_inputs(scenario, [0], checkpoint, TINY / "heldout.txt").to(layer.device, dtype)
    hidden = inputs.rows[0]["main" if "main" in inputs.rows[0] else "request0"][:TOKENS]
    outcome = Engine([layer], scenario, 64, 0).run(scenario.steps[0], {0: hidden})
    return hidden, outcome.outputs[0]


def test_the_text_goes_in_as_transformers_has_it(attention):
    hidden, _ = first_output(default_scenario())
    assert relative_error(hidden, attention[0].double()) < 1e-5


def test_the_layer_gives_what_transformers_gives(attention):
    _, output = first_output(parse_requests(f"prefill:{TOKENS}"))
    assert relative_error(output, attention[1].double()) < 1e-5


def test_the_comparison_notices_the_next_layers_weights(attention):
    checkpoint = open_checkpoint(TINY)
    scenario = parse_requests(f"prefill:{TOKENS}")
    layer = MLA(checkpoint.config, dtype=torch.float32, backend="vanilla")
    layer.load_hf(checkpoint.attention(1))
    output = Engine([layer], scenario, 64, 0).run(scenario.steps[0], {0: attention[0]}).outputs[0]
    assert relative_error(output, attention[1].double()) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_of_the_trained_checkpoint_runs_verified_on_its_text(dtype):
    arguments = ["run", str(TINY), "--layers", "0-2", "--dtype", dtype, "--json"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["verified"] is True
    assert found["inputs"] == "embeddings of 217 tokens of heldout.txt"
