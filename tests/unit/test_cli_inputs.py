"""Inputs of mla run: embedded text through the layer's norm, or independent random numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mla_core.checkpoint import open_checkpoint, write_checkpoint
from mla_core.cli.inputs import random_inputs, text_inputs
from mla_core.cli.scenario import parse_requests
from mla_core.errors import CheckpointError

TINY = Path(__file__).resolve().parents[2] / "tests/data/tiny_mla_kjv"
SCENARIO = parse_requests("prefill:5,decode:1+9")


def text(layers: tuple[int, ...] = (0,), file: Path = TINY / "heldout.txt"):
    return text_inputs(SCENARIO, layers, open_checkpoint(TINY), file)


def test_text_rows_are_normed_embeddings_of_its_tokens():
    from tokenizers import Tokenizer

    checkpoint = open_checkpoint(TINY)
    ids = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode((TINY / "heldout.txt").read_text()).ids[:6]
    names = ("model.embed_tokens.weight", "model.layers.1.input_layernorm.weight")
    embedding, norm = (value.float() for value in checkpoint.read(names).values())
    rows = embedding[ids]
    expected = rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm
    found = text((1,)).rows[1]
    assert torch.allclose(torch.cat([found["request0"], found["request1"]]), expected, rtol=1e-5)


def test_each_layer_has_its_own_norm():
    rows = text((0, 1)).rows
    assert not torch.equal(rows[0]["request0"], rows[1]["request0"])


def test_a_short_text_starts_over(tmp_path):
    (tmp_path / "short.txt").write_text("a")
    rows = text(file=tmp_path / "short.txt").rows[0]["request0"]
    assert torch.equal(rows, rows[:1].expand(5, -1))


@pytest.mark.parametrize(
    ("content", "problem"), [(b"", "holds no text"), (b"\xff\xfe\xff", "cannot be read as text")]
)
def test_a_file_that_is_no_text_is_refused(tmp_path, content, problem):
    (tmp_path / "odd.txt").write_bytes(content)
    with pytest.raises(CheckpointError, match=problem):
        text(file=tmp_path / "odd.txt")


def test_without_tokenizers_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(CheckpointError, match="pip install tokenizers"):
        text()


def test_a_checkpoint_without_embedding_says_so(tmp_path):
    weight = torch.zeros(2, 2)
    write_checkpoint(tmp_path / "x", {}, {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight": weight})
    (tmp_path / "x/tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"has no tensor model\.embed_tokens\.weight"):
        text_inputs(SCENARIO, [0], open_checkpoint(tmp_path / "x"), TINY / "heldout.txt")


def test_random_rows_say_why_they_are_random():
    made = random_inputs(SCENARIO, [0, 1], 8, 3, "no text given")
    assert made.source == "random hidden states, seed 3 (no text given)"
    assert made.rows[0]["request0"].shape == (5, 8)


def test_random_rows_repeat_with_their_seed():
    first, second, other = (
        random_inputs(SCENARIO, [0], 8, seed, "").rows[0]["request0"] for seed in (3, 3, 4)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
