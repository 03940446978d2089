"""Discovery reads metadata only, lists duplicates, and survives metadata that cannot be read."""

from __future__ import annotations

import zipfile

import pytest

from mla_core.discovery import Claim, canonical, discover
from tests.unit import fakes

GROUP = "mla_core.backends"


@pytest.fixture
def site(tmp_path) -> fakes.Site:
    return fakes.Site(tmp_path)


def found(*folders: object) -> list[Claim]:
    return discover(GROUP, [str(folder) for folder in folders])


def test_a_claim_knows_its_distribution_and_where_its_manifest_is(site):
    site.metadata("mla_fast", f"[{GROUP}]\nfast = mla_fast.manifest:INFO\n", "2.1")
    assert found(site.folder) == [Claim("fast", "mla-fast", "2.1", "mla_fast.manifest:INFO")]


def test_other_groups_and_distributions_without_entry_points_do_not_count(site):
    site.metadata("tool", "[console_scripts]\nfast = tool:main\n")
    (site.folder / "plain-1.0.dist-info").mkdir()
    assert found(site.folder) == []


def test_two_distributions_with_the_same_name_are_both_listed(site):
    site.metadata("mla_one", f"[{GROUP}]\nfast = one:INFO\n")
    site.metadata("mla_two", f"[{GROUP}]\nfast = two:INFO\n")
    assert [(c.name, c.distribution) for c in found(site.folder)] == [
        ("fast", "mla-one"),
        ("fast", "mla-two"),
    ]


def test_a_distribution_that_is_found_again_later_on_the_path_is_shadowed(tmp_path):
    first, second = fakes.Site(tmp_path / "first"), fakes.Site(tmp_path / "second")
    first.metadata("mla_fast", f"[{GROUP}]\nfast = new:INFO\n", "2.0")
    second.metadata("MLA.Fast", f"[{GROUP}]\nfast = old:INFO\n", "1.0")
    assert found(first.folder, second.folder) == [Claim("fast", "mla-fast", "2.0", "new:INFO")]


def test_a_distribution_that_dropped_its_entry_points_shadows_an_old_copy_too(tmp_path):
    old = fakes.Site(tmp_path / "old")
    old.metadata("mla_fast", f"[{GROUP}]\nfast = old:INFO\n", "1.0")
    (tmp_path / "new" / "mla_fast-2.0.dist-info").mkdir(parents=True)
    assert found(tmp_path / "new", tmp_path / "old") == []


UNREADABLE = {
    "no section": b"fast = a:INFO\n",
    "no closing bracket": b"[mla_core.backends\nfast = a:INFO\n",
    "a name twice": b"[mla_core.backends]\nfast = a:INFO\nfast = b:INFO\n",
    "not utf-8": b"[mla_core.backends]\nfast = \xff\xfe:INFO\n",
}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_metadata_that_cannot_be_read_costs_only_its_own_distribution(site, text):
    site.metadata("mla_bad", text)
    site.metadata("mla_good", f"[{GROUP}]\ngood = good:INFO\n")
    bad, good = found(site.folder)
    assert (bad.name, bad.distribution, bad.target, bad.whole_file) == ("mla-bad", "mla-bad", None, True)
    assert good == Claim("good", "mla-good", "1.0", "good:INFO")


def test_metadata_that_cannot_be_read_tells_why(site):
    site.metadata("mla_bad", UNREADABLE["a name twice"])
    (bad,) = found(site.folder)
    assert bad.problem == (
        "its entry points cannot be read: While reading from 'entry_points.txt of mla-bad' [line  3]: "
        "option 'fast' in section 'mla_core.backends' already exists"
    )


@pytest.mark.parametrize("text", ["not a target", "a.b:INFO extra", "%(home)s:INFO", ""])
def test_an_entry_point_that_does_not_parse_costs_only_itself(site, text):
    site.metadata("mla_mixed", f"[{GROUP}]\nbad = {text}\ngood = good:INFO\n")
    assert found(site.folder) == [
        Claim(
            "bad",
            "mla-mixed",
            "1.0",
            problem=f"its entry point {text!r} does not parse; write module:ATTRIBUTE",
        ),
        Claim("good", "mla-mixed", "1.0", "good:INFO"),
    ]


def test_a_folder_that_does_not_exist_holds_nothing(tmp_path):
    assert found(tmp_path / "nowhere") == []


def test_an_empty_path_entry_means_the_current_folder(site, monkeypatch):
    site.metadata("mla_fast", f"[{GROUP}]\nfast = fast:INFO\n")
    monkeypatch.chdir(site.folder)
    assert [claim.name for claim in found("")] == ["fast"]


@pytest.mark.parametrize(
    ("archive", "member", "distribution"),
    [
        ("bundle.zip", "mla_fast-2.1.dist-info/entry_points.txt", "mla-fast"),
        ("mla_fast-2.1.egg", "EGG-INFO/entry_points.txt", "mla-fast"),
    ],
)
def test_zipped_distributions_are_found(tmp_path, archive, member, distribution):
    with zipfile.ZipFile(tmp_path / archive, "w") as file:
        file.writestr(member, f"[{GROUP}]\nfast = fast:INFO\n")
    assert found(tmp_path / archive) == [Claim("fast", distribution, "2.1", "fast:INFO")]


def test_the_egg_info_of_a_source_checkout_is_found(tmp_path):
    info = tmp_path / "mla_fast.egg-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nfast = fast:INFO\n")
    assert found(tmp_path) == [Claim("fast", "mla-fast", None, "fast:INFO")]


@pytest.mark.parametrize("spelling", ["mla-fast", "MLA_Fast", "mla.fast", "mla--_fast"])
def test_all_spellings_of_a_distribution_are_one(spelling):
    assert canonical(spelling) == "mla-fast"
