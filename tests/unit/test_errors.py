"""The error tree: what is what, and that errors survive pickling between worker processes."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from mla_core import errors
from mla_core.plan import Rejection
from mla_core.request import Reason

REASON = Reason(field="dtype", wanted="float16", offered="float32")
TABLE = (Rejection(backend="fast", kernel="mqa_decode", reasons=(REASON,)),)
EXAMPLES = [
    errors.SpecError("expected a name", "a||b", 2, source="MLA_BACKEND"),
    errors.UnknownBackend("fsat", ["fast"], kind="backend", hints=["did you mean 'fast'?"]),
    errors.DuplicateBackend("fast", ["mla-one", "mla-two"]),
    errors.BrokenPlugin("fast", "mla-fast", "ImportError: no cuda"),
    errors.IncompatiblePlugin("fast", "mla-fast", 7, (1, 2)),
    errors.UnsupportedError("fast", [REASON], kernel="mqa_decode"),
    errors.NoBackendFits("backend='fast'", "cpu", TABLE, works="backend='slow'"),
]


def error_classes() -> dict[str, type[BaseException]]:
    found = inspect.getmembers(errors, inspect.isclass)
    return {name: cls for name, cls in found if cls.__module__ == errors.__name__}


def documented_tree() -> dict[str, tuple[str, ...]]:
    """Class name to its bases, as the module's docstring draws them."""
    tree: dict[str, tuple[str, ...]] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ([│ ├└─]*)([A-Z]\w+)(?: \((\w+)\))?(?:\s{2,}|$)", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        parents[depth:] = [match[2]]
        above = [parents[depth - 1]] if depth else []
        extra = [match[3]] if match[3] else []
        tree[match[2]] = (*above, *extra) or ("Exception",)
    return tree


def test_the_docstring_draws_the_tree_as_it_is():
    bases = {name: tuple(base.__name__ for base in cls.__bases__) for name, cls in error_classes().items()}
    assert documented_tree() == bases


def test_all_lists_every_error():
    assert sorted(errors.__all__) == sorted(error_classes())


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_with_data_survives_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_a_spec_error_points_at_the_mistake():
    error = errors.SpecError("expected a backend name", "a||b", 2, source="MLA_BACKEND")
    assert str(error) == "MLA_BACKEND: expected a backend name\n  a||b\n    ^"


def test_the_caret_stays_below_its_character_when_the_text_has_tabs_and_newlines():
    assert str(errors.SpecError("no", "a|\t\n|b", 4)) == "backend: no\n  a|  |b\n      ^"


def test_unknown_backend_lists_what_is_installed_and_its_hints():
    error = errors.UnknownBackend("fsat", ["fast", "slow"], hints=["did you mean 'fast'?"])
    assert str(error) == "unknown backend 'fsat'; installed: fast, slow\n  did you mean 'fast'?"


def test_unknown_backend_says_so_when_nothing_is_installed():
    assert str(errors.UnknownBackend("fast", [])) == "unknown backend 'fast'; installed: none"


def test_duplicate_backend_names_both_claims_and_the_way_out():
    assert str(errors.DuplicateBackend("fast", ["mla-one", "mla-two"])) == (
        "backend 'fast' is claimed by mla-one and mla-two\n"
        "  uninstall all but one, or name the distributions to trust in MLA_PLUGINS"
    )


def test_broken_plugin_keeps_its_name_although_import_error_has_one_too():
    error = errors.BrokenPlugin("fast", "mla-fast", "ImportError: no cuda")
    assert (error.name, error.distribution, error.cause) == ("fast", "mla-fast", "ImportError: no cuda")


def test_broken_plugin_tells_the_cause_and_the_way_out():
    assert str(errors.BrokenPlugin("fast", "mla-fast", "ImportError: no cuda")) == (
        "backend 'fast' of mla-fast is broken: ImportError: no cuda\n"
        "  repair or uninstall mla-fast, or set MLA_DISABLE=fast"
    )


def test_incompatible_plugin_tells_both_versions():
    assert str(errors.IncompatiblePlugin("fast", "mla-fast", 7, (1, 2))) == (
        "backend 'fast' of mla-fast speaks API 7; this mla_core accepts API 1 or 2\n"
        "  install a release of mla-fast for API 2, or another mla-core"
    )


def test_unsupported_error_tells_every_reason():
    error = errors.UnsupportedError("fast", [REASON], kernel="mqa_decode")
    assert str(error) == ("'fast' does not support this mqa_decode\n  dtype: wanted float16, offered float32")


def test_no_backend_fits_shows_the_table_and_what_would_work():
    error = errors.NoBackendFits("backend='fast'", "cpu", TABLE, works="backend='slow'")
    assert str(error) == (
        "nothing in backend='fast' fits this layer on cpu\n"
        "  fast  mqa_decode  dtype: wanted float16, offered float32\n"
        "what would work: backend='slow'"
    )


def test_no_backend_fits_gathers_the_reasons_of_all_candidates():
    table = (*TABLE, Rejection(backend="slow", kernel="mqa_decode", reasons=(REASON, REASON)))
    assert errors.NoBackendFits("auto", "cpu", table).reasons == (REASON,) * 3


def test_no_backend_fits_says_so_when_nothing_is_installed():
    assert str(errors.NoBackendFits("backend='auto'", "cpu", ())) == (
        "nothing in backend='auto' fits this layer on cpu\n"
        "  no backend is installed\n"
        "nothing that is installed would work"
    )
