"""The backend string: what it means, that it round-trips, and where its errors point."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_core.errors import SpecError
from mla_core.spec import Option, Part, Spec, Stack, parse


def stack(name: str, *options: Option, sparse: Part | None = None) -> Stack:
    return Stack(Part(name, options), sparse)


MEANINGS = {
    "fast": Spec((stack("fast"),)),
    "auto": Spec((stack("auto"),)),
    "fast|slow|auto": Spec((stack("fast"), stack("slow"), stack("auto"))),
    "fast[page=64,mode=a b]": Spec((stack("fast", Option("page", "64"), Option("mode", "a b")),)),
    "fast[x=1]+dsa[topk=2048]": Spec(
        (stack("fast", Option("x", "1"), sparse=Part("dsa", (Option("topk", "2048"),))),)
    ),
    "fast+dsa|slow": Spec((stack("fast", sparse=Part("dsa")), stack("slow"))),
    "prefill=fast;decode=slow|auto": Spec((stack("fast"),), (stack("slow"), stack("auto"))),
    "prefill=fast;decode=fast": Spec((stack("fast"),), (stack("fast"),)),
    "my-lib.v2_x": Spec((stack("my-lib.v2_x"),)),
    # Not followed by "=", so a name like any other here.
    "prefill": Spec((stack("prefill"),)),
}


@pytest.mark.parametrize(("text", "meaning"), MEANINGS.items(), ids=MEANINGS)
def test_a_string_means_its_spec(text, meaning):
    assert parse(text) == meaning


@pytest.mark.parametrize("text", MEANINGS)
def test_a_spec_is_written_as_it_was_read(text):
    assert str(parse(text)) == text


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True).filter(lambda name: name != "auto")
values = st.text(
    st.characters(codec="ascii", exclude_characters=",[]", categories=("L", "N", "P", "S")), min_size=1
)
options = st.lists(st.builds(Option, names, values), max_size=3, unique_by=lambda o: o.key).map(tuple)
parts = st.builds(Part, names, options)
chains = st.lists(st.builds(Stack, parts, st.none() | parts), min_size=1, max_size=3).map(tuple)
specs = st.builds(Spec, chains, st.none() | chains)


@given(specs)
def test_every_spec_round_trips(spec):
    assert parse(str(spec)) == spec


@given(st.text("ab|+[]=,; ", max_size=12))
def test_any_text_is_a_spec_or_a_spec_error_that_points_into_it(text):
    position = 0
    try:
        parse(text)
    except SpecError as error:
        position = error.position
    assert 0 <= position <= len(text)


def test_blanks_around_words_do_not_count():
    text = " prefill = fast [ x = 1 , y = 2 ] + dsa ;\tdecode = slow | auto "
    assert str(parse(text)) == "prefill=fast[x=1,y=2]+dsa;decode=slow|auto"


def test_options_and_names_know_where_they_stand():
    (only,) = parse("fast+dsa[topk=1]").prefill
    assert (only.sparse.position, only.sparse.options[0].position) == (5, 9)


NAME = "expected a backend name, or auto"
END = "expected '|', '+', '[' or the end"

# Each text with what is wrong, and where.
ERRORS = [
    ("", NAME, "^"),
    ("fast||slow", NAME, "     ^"),
    ("fast|", NAME, "     ^"),
    ("9fast", NAME, "^"),
    ("fast slow", END, "     ^"),
    ("fast+dsa+x", END, "        ^"),
    ("fast=1", END, "    ^"),
    ("fast+", "expected the name of a sparse hook", "     ^"),
    ("fast[]", "expected an option name", "     ^"),
    ("fast[x]", "expected '=' and a value for 'x'", "      ^"),
    ("fast[x=]", "expected a value for 'x'", "       ^"),
    ("fast[x=1", "expected ',' or ']'", "        ^"),
    ("fast[x=1,x=2]", "option 'x' is given twice", "         ^"),
    ("auto[x=1]", "auto takes no options; name the backend they are for", "     ^"),
    ("prefill=fast", "expected ';decode=' after the prefill backends", "            ^"),
    ("prefill=fast;slow", "expected 'decode='", "             ^"),
    ("prefill=a;decode", "expected 'decode='", "                ^"),
    ("decode=a;prefill=b", "expected 'prefill='", "^"),
    ("prefill=a;decode=b;", END, "                  ^"),
]


@pytest.mark.parametrize(("text", "problem", "caret"), ERRORS, ids=[row[0] for row in ERRORS])
def test_an_error_points_at_the_first_wrong_character(text, problem, caret):
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert str(caught.value) == f"backend: {problem}\n  {text}\n  {caret}"


def test_an_error_names_where_the_string_came_from():
    with pytest.raises(SpecError, match=r"^MLA_BACKEND: expected"):
        parse("", source="MLA_BACKEND")
