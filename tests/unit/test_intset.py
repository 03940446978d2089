"""IntSet: membership, edges, text and JSON of the four ways to write a set of integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from mla_core.intset import IntSet

CASES = {
    "exact": (IntSet.exact(512), [512], [511, 513, 0]),
    "of": (IntSet.of(64, 16), [16, 64], [15, 17, 32, 63, 65]),
    "range": (IntSet.range(1, 128), [1, 2, 128], [0, 129, -1]),
    "open range": (IntSet.range(3), [3, 10**12], [2, -3]),
    "multiples": (IntSet.multiple_of(16), [16, 32, 16 * 10**9], [0, 8, 15, 17]),
    "multiples in a range": (IntSet.multiple_of(16, 32, 64), [32, 48, 64], [16, 40, 80]),
    "multiples from zero": (IntSet.multiple_of(8, 0, 16), [0, 8, 16], [4, 24]),
    "empty": (IntSet(), [], [0, 1, 16]),
}
by_case = pytest.mark.parametrize(("intset", "members", "others"), CASES.values(), ids=CASES)

sets = st.one_of(
    st.lists(st.integers(0, 300), max_size=4).map(lambda values: IntSet.of(*values)),
    st.tuples(st.integers(0, 200), st.integers(0, 200)).map(lambda p: IntSet.range(p[0], p[0] + p[1])),
    st.tuples(st.integers(1, 64), st.integers(1, 5)).map(
        lambda p: IntSet.multiple_of(p[0], high=p[0] * p[1])
    ),
    st.integers(1, 64).map(IntSet.multiple_of),
)


@by_case
def test_members_are_in_and_others_are_out(intset, members, others):
    assert [value in intset for value in (*members, *others)] == [True] * len(members) + [False] * len(others)


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_only_integers_can_be_members(value):
    assert value not in IntSet.range(0, 10)


@by_case
def test_json_round_trips(intset, members, others):
    assert IntSet.model_validate_json(intset.model_dump_json()) == intset


@pytest.mark.parametrize(
    ("intset", "text"),
    [
        (IntSet.exact(512), "512"),
        (IntSet.of(64, 16), "16, 64"),
        (IntSet.range(1, 128), "1..128"),
        (IntSet.range(1), "1.."),
        (IntSet.range(0, 64), "0..64"),
        (IntSet.multiple_of(16), "multiples of 16"),
        (IntSet.multiple_of(16, 32, 64), "multiples of 16 in 32..64"),
        (IntSet.multiple_of(16, high=64), "multiples of 16 in 16..64"),
        (IntSet(), "none"),
    ],
)
def test_text_is_readable(intset, text):
    assert str(intset) == text


@pytest.mark.parametrize(
    ("intset", "inside", "outside"),
    [
        (IntSet.of(16, 64), (16, 64), (15, 17, 63, 65)),
        (IntSet.of(16, 17), (16, 17), (15, 18)),
        (IntSet.range(1, 128), (1, 128), (129,)),
        (IntSet.range(4), (4, 5), (3,)),
        (IntSet.multiple_of(16, 32, 64), (32, 64), (16, 31, 33, 63, 65, 80)),
        (IntSet.multiple_of(16), (16, 32), (15, 17, 31, 33)),
        (IntSet(), (), ()),
    ],
    ids=str,
)
def test_edges_give_both_sides_of_every_border(intset, inside, outside):
    assert intset.edges() == (inside, outside)


@given(sets)
def test_edges_never_put_a_value_on_the_wrong_side(intset):
    inside, outside = intset.edges()
    assert all(value in intset for value in inside)
    assert not any(value in intset for value in outside)


@given(sets)
def test_every_written_form_reads_back_as_the_same_set(intset):
    assert IntSet.model_validate(intset.model_dump()) == intset


@pytest.mark.parametrize(
    ("shorthand", "meant"), [(512, IntSet.exact(512)), ([64, 16, 16], IntSet.of(16, 64))]
)
def test_an_int_and_a_list_stand_for_a_set(shorthand, meant):
    assert TypeAdapter(IntSet).validate_python(shorthand) == meant


@pytest.mark.parametrize(
    "wrong",
    [
        {"values": [1], "low": 1},
        {"high": 5},
        {"step": 2},
        {"low": 5, "high": 4},
        {"low": 17, "high": 31, "step": 16},
        {"low": -1},
        {"low": 1, "step": 0},
        {"values": ["x"]},
        True,
        "1..4",
    ],
    ids=str,
)
def test_a_set_that_means_nothing_is_refused(wrong):
    with pytest.raises(ValidationError):
        IntSet.model_validate(wrong)


@pytest.mark.parametrize(
    ("intset", "truth"), [(IntSet(), False), (IntSet.exact(0), True), (IntSet.range(0), True)]
)
def test_only_the_empty_set_is_false(intset, truth):
    assert bool(intset) is truth
