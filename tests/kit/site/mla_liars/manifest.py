"""What the liars declare. Small declarations, so that a run takes seconds."""

from __future__ import annotations

from typing import Any

from mla_core import BackendInfo, Capabilities, Declined, IntSet, Limit

__all__ = ["info"]

SMALL: dict[str, Any] = {
    "devices": {"cpu"},
    "kernels": {"mqa_decode"},
    "dtypes": {"float32"},
    "layouts": {"fp32": [4, 16]},
    "query_len": {"single"},
    "max_query_len": 1,
    "heads": {"low": 1, "high": 8},
    "latent": [16, 32],
    "nope": {"low": 1},
    "rope": [8],
    "value": {"low": 1},
    "returns": {"lse"},
}


def info(name: str, target: str = "Honest", **changes: Any) -> BackendInfo:
    return BackendInfo(
        name=name,
        target=f"mla_liars.{'owners' if 'owns' in changes else 'backends'}:{target}",
        summary=f"tests the kit: {name}",
        capabilities=Capabilities.model_validate({**SMALL, **changes}),
    )


HONEST = info("honest")
OVER_CLAIMER = info("over_claimer", "OverClaimer")
UNDER_CLAIMER = info("under_claimer", "UnderClaimer")
SILENT_ACCEPTOR = info("silent_acceptor", "SilentAcceptor")
CRASHER = info("crasher", "Crasher")
HANGER = info("hanger", "Hanger")
OUTSIDE_WRITER = info("outside_writer", "OutsideWriter")
MUTATOR = info("mutator", "Mutator")
VAGUE_REFUSER = info("vague_refuser", "VagueRefuser")
LATE_REFUSER = info("late_refuser", "LateRefuser")
RAISER = info("raiser", "Raiser")
WRONG_BASE = info("wrong_base", "WrongBase")
PAGE_TRUSTER = info("page_truster", "PageTruster")
NEIGHBOUR_READER = info("neighbour_reader", "NeighbourReader")
FUTURE_SEER = info("future_seer", "FutureSeer", query_len={"single", "uniform", "varlen"}, max_query_len=4)
DICE_ROLLER = info("dice_roller", "DiceRoller", deterministic=True)
DECLINER = info(
    "decliner",
    "Decliner",
    dtypes={"float32", "bfloat16"},
    declined=(Declined(field="dtype", value="bfloat16", because="nobody has asked for it"),),
)
LIMITED = info(
    "limited",
    "Limited",
    dtypes={"float32", "bfloat16"},
    layouts={"fp32": [4, 16], "bf16": [4, 16]},
    limits=(
        Limit(
            name="one type",
            when={"dtype": ["bfloat16"]},
            then={"layout": ["bf16"], "heads": IntSet.range(1, 4)},
            because="bfloat16 is read as it lies",
        ),
    ),
)
LIMIT_BREAKER = LIMITED.model_copy(
    update={"name": "limit_breaker", "target": "mla_liars.backends:LimitBreaker"}
)
NEEDY = info("needy", "Needy", requires=("a-package-that-nobody-has>=9",))

_OWNS = {
    "kernels": {"mha_prefill", "mqa_decode", "mqa_prefill", "mqa_sparse"},
    "sparse": {"token_topk"},
    "query_len": {"single", "uniform", "varlen"},
    "max_query_len": 4,
    "owns": {"rope", "append", "v_up", "gate"},
    "rope_styles": {"interleaved", "half_split"},
    "deterministic": True,
}
OWNER = info("owner", "Owner", **_OWNS)
DOUBLE_ROTATOR = info("double_rotator", "DoubleRotator", **_OWNS)
SLOPPY_WRITER = info("sloppy_writer", "SloppyWriter", **_OWNS)
STALE_OWNER = info("stale_owner", "StaleOwner", **_OWNS)
GATE_FORGETTER = info("gate_forgetter", "GateForgetter", **_OWNS)
DUPLICATE_COUNTER = info("duplicate_counter", "DuplicateCounter", **_OWNS)
