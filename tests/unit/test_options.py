"""Options of a backend string: read by the plugin's model, wrong ones refused where they stand."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, Field, model_validator

from mla_core.errors import SpecError
from mla_core.options import Asked, default_options
from tests.unit import fakes


class Options(BaseModel):
    """pydantic ignores unknown names by default; the backend string must not."""

    page: int = 64
    mode: Literal["exact", "quick"] = "exact"
    warm: bool = False
    splits: int = Field(default=1, alias="num_splits")

    @model_validator(mode="after")
    def _check(self) -> Options:
        if self.mode == "quick" and self.warm:
            raise ValueError("quick cannot be warm")
        return self


class Needy(BaseModel):
    topk: int


def options_of(text: str, model: type[BaseModel] | None = Options) -> dict[str, object]:
    asked = Asked.parse(text, "backend")
    return asked.options(asked.spec.prefill[0].backend, fakes.backend("fast", options=model))


def test_values_are_read_as_the_model_says_and_defaults_are_filled_in():
    found = options_of("fast[page=16,warm=true]")
    assert found == {"page": 16, "mode": "exact", "warm": True, "splits": 1}


def test_an_option_goes_by_its_alias():
    assert options_of("fast[num_splits=4]")["splits"] == 4


def test_a_plugin_without_options_has_none():
    assert options_of("fast", None) == {}


ERRORS = [
    (
        "fast[pag=16]",
        Options,
        "'fast' has no option 'pag'; did you mean 'page'? (it takes page, mode, warm, num_splits)\n"
        "  fast[pag=16]\n"
        "       ^",
    ),
    (
        "fast[page=16,colour=red]",
        Options,
        "'fast' has no option 'colour' (it takes page, mode, warm, num_splits)\n"
        "  fast[page=16,colour=red]\n"
        "               ^",
    ),
    ("fast[page=16]", None, "'fast' has no option 'page' (it takes none)\n  fast[page=16]\n       ^"),
    (
        "fast[warm=no,page=many]",
        Options,
        "options of 'fast': page: Input should be a valid integer, unable to parse string as an integer\n"
        "  fast[warm=no,page=many]\n"
        "               ^",
    ),
    (
        "fast[mode=quick,warm=yes]",
        Options,
        "options of 'fast': value: Value error, quick cannot be warm\n  fast[mode=quick,warm=yes]\n  ^",
    ),
    ("fast", Needy, "options of 'fast': topk: Field required\n  fast\n  ^"),
]


@pytest.mark.parametrize(("text", "model", "message"), ERRORS, ids=[row[0] for row in ERRORS])
def test_a_wrong_option_is_refused_where_it_stands(text, model, message):
    with pytest.raises(SpecError) as caught:
        options_of(text, model)
    assert str(caught.value) == f"backend: {message}"


@pytest.mark.parametrize(
    ("model", "expected"),
    [(None, {}), (Options, {"page": 64, "mode": "exact", "warm": False, "splits": 1})],
)
def test_default_options_are_those_of_a_bare_name(model, expected):
    assert default_options(fakes.backend("fast", options=model)) == expected


def test_what_was_asked_is_quoted_with_its_origin():
    assert str(Asked.parse(" fast | slow", "MLA_BACKEND")) == "MLA_BACKEND='fast|slow'"
