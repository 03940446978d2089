"""The checks of the kit by name: which kernels each is for, and which deliberate faults it must notice.

Torch-free, so that cells can be listed without loading a kernel; `target` is imported by the process that
tries them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BASIC", "CHECKS", "CONTROLS", "LAYER", "Check", "checks_for"]

# Deliberate faults in the expected answer. A check that does not notice one proves nothing.
CONTROLS = {
    "scale": "softmax scale off by 1 %",
    "mask": "every row sees one key less",
    "page": "pages read one further along the block table",
    "rope": "rope part of the query rotated once more",
    "lse_base": "lse in base 2",
    "gate": "gate applied after the output projection",
}

EXPAND = ("mha_prefill",)
ABSORB = ("mqa_decode", "mqa_prefill")
ATTENTION = (*EXPAND, *ABSORB)
# Not a kernel: the whole layer, with the kit's own slow kernels where the backend has none.
LAYER = "layer"


@dataclass(frozen=True)
class Check:
    """One check; `needs` are request fields that must be declared for it, as "field=value"."""

    name: str
    kernels: tuple[str, ...]
    controls: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    quick: bool = True

    @property
    def suite(self) -> str:
        return self.name.partition(".")[0]

    @property
    def target(self) -> str:
        """Import path of the function that runs it."""
        suite, _, function = self.name.partition(".")
        return f"mla_core.conformance.checks.{suite}:{function}"


_NUMERIC = ("scale", "mask", "rope")
_PAGED = (*_NUMERIC, "page")
_LSE = ("lse=True",)

_ALL = (
    Check("numerics.long", ATTENTION, _NUMERIC),
    Check("numerics.large_scores", ATTENTION, ("mask",)),
    Check("numerics.flat_scores", ATTENTION, ("mask",)),
    Check("numerics.uncausal", ("mha_prefill", "mqa_prefill"), _NUMERIC),
    Check("lse.values", ATTENTION, ("lse_base", *_NUMERIC), _LSE),
    Check("lse.empty_rows", ATTENTION, ("lse_base", "scale"), _LSE),
    Check("lse.merge_is_associative", ATTENTION, ("scale",), _LSE),
    Check("lse.split_anywhere", ATTENTION, _NUMERIC, _LSE),
    Check("lse.not_asked", ATTENTION, _NUMERIC),
    Check("pages.shuffled", ABSORB, _PAGED),
    Check("pages.garbage_is_ignored", ABSORB, _PAGED),
    Check("pages.partial_last_page", ABSORB, _PAGED),
    Check("pages.wide_table", ABSORB, _PAGED),
    Check("pages.beyond_32_bits", ABSORB, ("scale", "page"), quick=False),
    Check("verification.no_future", ("mqa_decode",), _NUMERIC, ("max_query_len=2",)),
    Check("verification.token_by_token", ("mqa_decode",), _NUMERIC, ("max_query_len=2",)),
    Check("verification.uncausal", ("mqa_decode",), needs=("max_query_len=2",)),
    Check("batch.order", ATTENTION, _NUMERIC),
    Check("batch.solo", ATTENTION, _NUMERIC),
    Check("batch.neighbour_of_nan", ATTENTION, _NUMERIC),
    Check("empties.no_requests", ATTENTION),
    Check("empties.idle_requests", ATTENTION, _NUMERIC),
    Check("strided.inputs", ATTENTION, _NUMERIC),
    Check("strided.metadata", ABSORB, _PAGED),
    Check("strided.cache", ABSORB, _PAGED),
    Check("graphs.replay", ("mqa_decode",), needs=("cuda_graph=decode",)),
    Check("cache.append", ("append",)),
    Check("cache.round_trip", ("append",)),
    Check("cache.untargeted_slots", (LAYER,)),
    Check("stages.once", (LAYER,), ("scale", "rope")),
    Check("stages.gate", (LAYER,), ("scale", "gate")),
    Check("stages.chunked_prefill", (LAYER,), ("scale", "rope")),
    Check("stages.verification", (LAYER,), ("scale", "rope"), ("max_query_len=2",)),
    Check("stages.mixed_batch", (LAYER,), ("scale", "rope")),
    Check("weights.reload", (LAYER,), ("scale",)),
    Check("weights.partial_reload", (LAYER,), ("scale",)),
    Check("sparse.all_keys_equal_dense", ("mqa_sparse",), ("scale",)),
    Check("sparse.ignored_indices", ("mqa_sparse",), ("scale",)),
    Check("sparse.nothing_selected", ("mqa_sparse",)),
)

CHECKS = {check.name: check for check in _ALL}

# The check behind a single value of a declaration, by kernel.
BASIC = {
    "mha_prefill": "basic.mha",
    "mqa_decode": "basic.mqa",
    "mqa_prefill": "basic.mqa",
    "mqa_sparse": "sparse.all_keys_equal_dense",
    "append": "cache.append",
}


def checks_for(kernel: str, *, quick: bool) -> list[Check]:
    """The checks of one kernel, or of the layer."""
    return [check for check in _ALL if kernel in check.kernels and (check.quick or not quick)]
