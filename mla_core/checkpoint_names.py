"""How different kinds of checkpoints name an attention and its tensors, and their Hugging Face names.

A layer speaks Hugging Face names only; everything else is translated here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["AttentionPlace", "Naming", "find_place"]


@dataclass(frozen=True)
class Naming:
    """One kind of names.

    around: the module that holds an attention. mark: its module that every MLA attention has. modules and
    tensors: first and last part of a name to the Hugging Face one; the rest stay. norm, embedding: modules
    outside the attention.
    """

    id: str
    around: str
    mark: str
    norm: str
    embedding: str
    modules: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)

    def to_hf(self, name: str) -> str:
        """The Hugging Face name of a tensor; both names without the attention's prefix."""
        return _renamed(name, self.modules, self.tensors)

    def from_hf(self, name: str) -> str:
        """This kind's name of a tensor that has a Hugging Face name."""
        return _renamed(name, _inverse(self.modules), _inverse(self.tensors))

    @property
    def pattern(self) -> str:
        """Matches the name of the mark's weight: stem, stack, layer, module around, part."""
        return (
            rf"(?P<stem>(?:.*\.)?)(?P<stack>layers|blocks)\.(?P<layer>\d+)\.(?P<module>{self.around})\."
            rf"(?:(?P<part>\d+)\.)?{self.mark}\.weight(?:_packed)?"
        )


def _renamed(name: str, modules: Mapping[str, str], tensors: Mapping[str, str]) -> str:
    parts = name.split(".")
    parts[0] = modules.get(parts[0], parts[0])
    if len(parts) > 1:
        parts[-1] = tensors.get(parts[-1], parts[-1])
    return ".".join(parts)


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {value: key for key, value in names.items()}


_BOTH_NATIVE = {
    "wq": "q_proj",
    "wq_a": "q_a_proj",
    "wq_b": "q_b_proj",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}
# The static scale of a module's input, as transformers calls it.
_HF_TENSORS = {"activation_scale": "input_scale"}

HUGGING_FACE = Naming(
    "hugging face", r"\w+", "kv_a_proj_with_mqa", "input_layernorm", "embed_tokens", tensors=_HF_TENSORS
)
_LING = Naming(
    "ling",
    "attention",
    "kv_a_proj_with_mqa",
    "input_layernorm",
    "word_embeddings",
    modules={"dense": "o_proj"},
    tensors=_HF_TENSORS,
)
_DEEPSEEK = Naming(
    "deepseek",
    "attn",
    "wkv_a",
    "attn_norm",
    "embed",
    modules={
        **_BOTH_NATIVE,
        "q_norm": "q_a_layernorm",
        "wkv_a": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
    },
    tensors={"scale": "weight_scale_inv"},
)
_MISTRAL = Naming(
    "mistral",
    "attention",
    "wkv_a_with_mqa",
    "attention_norm",
    "tok_embeddings",
    modules={
        **_BOTH_NATIVE,
        "q_a_norm": "q_a_layernorm",
        "wkv_a_with_mqa": "kv_a_proj_with_mqa",
        "kv_a_norm": "kv_a_layernorm",
    },
    tensors={"qscale_weight": "weight_scale", "qscale_act": "input_scale"},
)
# The last one fits any module around the attention.
_NAMINGS = (_DEEPSEEK, _MISTRAL, _LING, HUGGING_FACE)
_MARKS = [(naming, re.compile(naming.pattern)) for naming in _NAMINGS]


@dataclass(frozen=True)
class AttentionPlace:
    """Where one attention lies in a checkpoint; `part` tells the attentions of one decoder layer apart."""

    stem: str
    layer: int
    module: str
    part: int | None = None
    naming: Naming = HUGGING_FACE
    # What the list of decoder layers is called.
    stack: str = "layers"

    @property
    def prefix(self) -> str:
        """What its tensors' names start with, "model.layers.0.self_attn." for example."""
        return f"{self.stem}{self.stack}.{self.layer}.{self.module}.{self._part}"

    @property
    def input_norm(self) -> str:
        """Name of the norm in front of it."""
        return f"{self.stem}{self.stack}.{self.layer}.{self.naming.norm}.{self._part}weight"

    @property
    def embedding(self) -> str:
        """Name of the model's token embedding."""
        return f"{self.stem}{self.naming.embedding}.weight"

    @property
    def _part(self) -> str:
        return "" if self.part is None else f"{self.part}."


def find_place(name: str) -> AttentionPlace | None:
    """The attention that a tensor gives away, when it is the one that every MLA attention has."""
    for naming, mark in _MARKS:
        found = mark.fullmatch(name)
        if found is not None:
            part = None if found["part"] is None else int(found["part"])
            layer = int(found["layer"])
            return AttentionPlace(found["stem"], layer, found["module"], part, naming, found["stack"])
    return None
