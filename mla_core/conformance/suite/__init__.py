"""The conformance suite: `pytest --pyargs mla_core.conformance.suite --mla-backend NAME`.

A plugin's own tests take it in with one line, `from mla_core.conformance.suite import *`, and
`mla_backend = NAME` in the ini file.
"""

from mla_core.conformance.suite.test_cells import (
    test_any_order_of_requests_equals_solo_runs,
    test_cache_writes_touch_their_slots_only,
    test_every_layout_and_dtype_works_together,
    test_every_value_is_as_declared,
    test_graphs_replay,
    test_known_gaps_are_gaps,
    test_limits_hold_on_both_sides,
    test_lse,
    test_mixes_of_values_are_as_declared,
    test_nothing_to_do,
    test_numerics,
    test_pages,
    test_sparse_selection,
    test_stages_happen_exactly_once,
    test_strided_inputs,
    test_verification_sees_no_future,
    test_weights_leave_nothing_stale,
)
from mla_core.conformance.suite.test_manifest import (
    info,
    test_describing_the_backend_loads_no_torch,
    test_the_backend_declares_something,
    test_the_contract_version_is_accepted,
    test_the_declaration_survives_json,
    test_the_manifest_says_in_one_line_what_the_backend_is,
)

__all__ = [
    "info",
    "test_any_order_of_requests_equals_solo_runs",
    "test_cache_writes_touch_their_slots_only",
    "test_every_layout_and_dtype_works_together",
    "test_every_value_is_as_declared",
    "test_graphs_replay",
    "test_known_gaps_are_gaps",
    "test_limits_hold_on_both_sides",
    "test_lse",
    "test_mixes_of_values_are_as_declared",
    "test_nothing_to_do",
    "test_numerics",
    "test_pages",
    "test_sparse_selection",
    "test_stages_happen_exactly_once",
    "test_strided_inputs",
    "test_verification_sees_no_future",
    "test_weights_leave_nothing_stale",
    "test_describing_the_backend_loads_no_torch",
    "test_the_backend_declares_something",
    "test_the_contract_version_is_accepted",
    "test_the_declaration_survives_json",
    "test_the_manifest_says_in_one_line_what_the_backend_is",
]
