"""The page allocator: no page has two writers, and nothing is lost or handed out twice."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_core import BlockAllocator
from mla_core.errors import CacheError


def test_a_request_gets_as_many_pages_as_its_tokens_need():
    allocator = BlockAllocator(8, 4)
    assert [len(allocator.allocate(name, tokens)) for name, tokens in (("a", 1), ("b", 4), ("c", 5))] == [
        1,
        1,
        2,
    ]
    assert allocator.free_pages == 4


def test_extending_keeps_the_first_pages_and_adds_behind_them():
    allocator = BlockAllocator(8, 4)
    first = allocator.allocate("a", 3)
    assert allocator.extend("a", 1) == first
    assert allocator.extend("a", 6)[:1] == first
    assert len(allocator.pages("a")) == 3


def test_freeing_returns_the_pages_for_others():
    allocator = BlockAllocator(2, 4)
    pages = allocator.allocate("a", 8)
    assert sorted(allocator.free("a")) == sorted(pages)
    assert sorted(allocator.allocate("b", 8)) == sorted(pages)


def test_a_fork_shares_full_pages_and_copies_a_partial_one():
    allocator = BlockAllocator(8, 4)
    parent = allocator.allocate("parent", 10)
    child, copy = allocator.fork("parent", "child")
    assert child[:2] == parent[:2]
    assert copy == (parent[2], child[2])
    assert child[2] not in parent


def test_a_fork_of_full_pages_copies_nothing():
    allocator = BlockAllocator(8, 4)
    parent = allocator.allocate("parent", 8)
    assert allocator.fork("parent", "child") == (parent, None)


def test_shared_pages_are_released_by_their_last_user():
    allocator = BlockAllocator(8, 4)
    parent = allocator.allocate("parent", 8)
    allocator.fork("parent", "child")
    assert allocator.free("parent") == []
    assert sorted(allocator.free("child")) == sorted(parent)
    assert allocator.free_pages == 8


def test_the_table_has_the_pages_in_order_and_minus_one_beyond():
    allocator = BlockAllocator(8, 4)
    a, b = allocator.allocate("a", 9), allocator.allocate("b", 2)
    table = allocator.table(["b", "a"])
    assert table.tolist() == [[*b, -1, -1], a]
    assert table.dtype == torch.int32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda allocator: allocator.allocate("a", 1), "request 'a' already has pages"),
        (
            lambda allocator: allocator.allocate("b", 99),
            "request 'b' needs 25 more pages but only 2 are free",
        ),
        (lambda allocator: allocator.allocate("b", -1), "a request cannot have -1 tokens"),
        (lambda allocator: allocator.extend("a", -1), "a request cannot have -1 tokens"),
        (lambda allocator: allocator.extend("a", 99), "request 'a' needs 25 more pages but only 2 are free"),
        (lambda allocator: allocator.free("b"), r"request 'b' has no pages; allocated requests: \['a'\]"),
        (lambda allocator: allocator.fork("b", "c"), "request 'b' has no pages"),
        (lambda allocator: allocator.fork("a", "a"), "request 'a' already has pages"),
        (lambda allocator: allocator.table(["a", "b"]), "request 'b' has no pages"),
    ],
)
def test_a_call_that_cannot_be_served_is_refused_and_changes_nothing(call, message):
    allocator = BlockAllocator(4, 4)
    pages = allocator.allocate("a", 6)
    with pytest.raises(CacheError, match=message):
        call(allocator)
    assert (allocator.pages("a"), allocator.free_pages) == (pages, 2)


@pytest.mark.parametrize(("pages", "size"), [(-1, 4), (4, 0)])
def test_an_allocator_of_nothing_is_refused(pages, size):
    with pytest.raises(CacheError, match=f"got {pages} and {size}"):
        BlockAllocator(pages, size)


actions = st.lists(
    st.tuples(st.sampled_from(["allocate", "extend", "fork", "free"]), st.integers(0, 3), st.integers(0, 9)),
    max_size=30,
)


@given(actions=actions)
def test_no_sequence_of_calls_loses_a_page_or_lets_two_requests_write_one(actions):
    allocator, tokens, names = BlockAllocator(12, 2), {}, iter(range(100))
    for action, which, count in actions:
        known = sorted(tokens)
        name = known[which % len(known)] if known else None
        try:
            if action == "allocate":
                new = next(names)
                allocator.allocate(new, count)
                tokens[new] = count
            elif name is None:
                continue
            elif action == "extend":
                allocator.extend(name, count)
                tokens[name] += count
            elif action == "fork":
                new = next(names)
                allocator.fork(name, new)
                tokens[new] = tokens[name]
            else:
                allocator.free(name)
                del tokens[name]
        except CacheError:
            # Too few pages: the checks below hold all the same.
            pass
        users = Counter(page for request in tokens for page in allocator.pages(request))
        assert len(users) + allocator.free_pages == 12
        # Pages that will be written next: the partial last one of every request.
        writing = Counter(allocator.pages(r)[-1] for r, count in tokens.items() if count % 2)
        assert all(users[page] == 1 for page in writing)
