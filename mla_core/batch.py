"""One engine step's requests: which tokens are new, which are cached, where the new ones go.

Legend: T token rows, B request rows, P pages per request. Rows beyond the live ones are padding: query
length 0, slot -1, output 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mla_core.errors import BatchError

__all__ = ["Batch"]


@dataclass(frozen=True, init=False, eq=False)
class Batch:
    """A batch of requests in any order and of any mix of prefill, chunk, decode and verification.

    query_start_loc [B+1]: first new-token row of each request. seq_lens [B]: cached plus new tokens.
    block_table [B, P]: page ids; entries a request does not need may hold anything. slot_mapping [T]: where
    each new token is stored (page * page_size + offset), -1 to store nowhere. positions [T]: rotary
    positions. `query_lens`, `context_lens` and `pages` are host mirrors, read once here; nothing later
    copies from the device.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    positions: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_tokens: int

    def __init__(
        self,
        *,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        positions: Tensor | None = None,
    ) -> None:
        starts = _integers("query_start_loc", query_start_loc, 1).tolist()
        lengths = _integers("seq_lens", seq_lens, 1).tolist()
        _integers("block_table", block_table, 2)
        _integers("slot_mapping", slot_mapping, 1)
        query_lens = _query_lens(starts, lengths, block_table.shape[0], slot_mapping.shape[0])
        contexts = tuple(length - query for length, query in zip(lengths, query_lens, strict=True))
        if positions is None:
            positions = _positions(query_lens, contexts, slot_mapping.shape[0]).to(slot_mapping.device)
        _integers("positions", positions, 1)
        if positions.shape != slot_mapping.shape:
            raise BatchError(
                f"positions has {positions.shape[0]} rows but slot_mapping has {slot_mapping.shape[0]}; "
                "both need one entry per token row"
            )
        for name, value in {
            "query_start_loc": query_start_loc,
            "seq_lens": seq_lens,
            "block_table": block_table,
            "slot_mapping": slot_mapping,
            "positions": positions,
            "query_lens": query_lens,
            "context_lens": contexts,
            "num_tokens": starts[-1],
        }.items():
            object.__setattr__(self, name, value)

    @property
    def num_rows(self) -> int:
        """T: token rows of hidden states, padding included."""
        return int(self.slot_mapping.shape[0])

    @property
    def num_requests(self) -> int:
        """B: request rows, padding included."""
        return len(self.query_lens)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Host mirror of seq_lens."""
        return tuple(c + q for c, q in zip(self.context_lens, self.query_lens, strict=True))

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_table: Tensor | Sequence[Sequence[int]],
        page_size: int,
        *,
        max_tokens: int | None = None,
        max_requests: int | None = None,
        device: torch.device | str | None = None,
    ) -> Batch:
        """A batch from lengths and page tables; slots and positions follow from them.

        query_lens and context_lens: new and already cached tokens of each request. block_table: one row of
        page ids a request, in order of position. max_tokens, max_requests: pad to this many rows, for graph
        replay. Raises BatchError when lengths are negative, pages are missing, or the batch exceeds its
        capacity.
        """
        queries, contexts = _lengths("query_lens", query_lens), _lengths("context_lens", context_lens)
        if len(queries) != len(contexts):
            raise BatchError(f"query_lens has {len(queries)} requests but context_lens has {len(contexts)}")
        if page_size < 1:
            raise BatchError(f"page_size must be at least 1, got {page_size}")
        table = _table(block_table, len(queries))
        target = torch.device(device) if device is not None else table.device
        tokens, requests = sum(queries), len(queries)
        rows = _capacity("max_tokens", max_tokens, tokens)
        slots_of = _capacity("max_requests", max_requests, requests)
        table = table.cpu()
        positions = _positions(queries, contexts, rows)
        slots = _slots(queries, contexts, table, page_size, positions)
        starts = torch.tensor([0, *queries] + [0] * (slots_of - requests), dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        )
        totals = [q + c for q, c in zip(queries, contexts, strict=True)] + [0] * (slots_of - requests)
        padding = table.new_zeros(slots_of - requests, table.shape[1])
        return cls(
            query_start_loc=starts.to(target),
            seq_lens=torch.tensor(totals, dtype=torch.int32).to(target),
            block_table=torch.cat([table, padding]).to(target),
            slot_mapping=slots.to(target),
            positions=positions.to(target),
        )


def _integers(name: str, value: Tensor, dims: int) -> Tensor:
    if not isinstance(value, Tensor):
        raise BatchError(f"{name} must be an integer tensor with {dims} dims, got {type(value).__name__}")
    if value.dim() != dims or value.dtype not in (torch.int32, torch.int64):
        raise BatchError(
            f"{name} must be an int32 or int64 tensor with {dims} dims, "
            f"got {value.dtype} of shape {tuple(value.shape)}"
        )
    return value


def _lengths(name: str, values: Sequence[int]) -> list[int]:
    lengths = [int(value) for value in values]
    for index, length in enumerate(lengths):
        if length < 0:
            raise BatchError(
                f"{name}[{index}] is {length}; lengths are counts of tokens and cannot be negative"
            )
    return lengths


def _table(block_table: Tensor | Sequence[Sequence[int]], requests: int) -> Tensor:
    if isinstance(block_table, Tensor):
        table = _integers("block_table", block_table, 2)
    else:
        width = max((len(row) for row in block_table), default=0)
        filled = [[*row, *[-1] * (width - len(row))] for row in block_table]
        table = torch.tensor(filled, dtype=torch.int32).reshape(len(filled), width)
    if table.shape[0] < requests:
        raise BatchError(f"block_table has {table.shape[0]} rows for {requests} requests")
    return table[:requests]


def _capacity(name: str, capacity: int | None, live: int) -> int:
    if capacity is None:
        return live
    if capacity < live:
        what = "new tokens" if name == "max_tokens" else "requests"
        raise BatchError(f"{name}={capacity} cannot hold the batch's {live} {what}")
    return capacity


def _query_lens(starts: list[int], lengths: list[int], table_rows: int, rows: int) -> tuple[int, ...]:
    if len(starts) != len(lengths) + 1:
        raise BatchError(
            f"query_start_loc needs {len(lengths) + 1} entries for {len(lengths)} seq_lens, got {len(starts)}"
        )
    if table_rows != len(lengths):
        raise BatchError(f"block_table has {table_rows} rows for {len(lengths)} requests")
    if starts[0] != 0:
        raise BatchError(f"query_start_loc must start at 0, got {starts[0]}")
    if starts[-1] > rows:
        raise BatchError(f"query_start_loc ends at {starts[-1]} but slot_mapping has only {rows} rows")
    query_lens = tuple(end - start for start, end in pairwise(starts))
    for index, (query, length) in enumerate(zip(query_lens, lengths, strict=True)):
        if query < 0:
            raise BatchError(
                f"query_start_loc decreases at request {index}: {starts[index]} then {starts[index + 1]}"
            )
        if length < query:
            raise BatchError(f"seq_lens[{index}] is {length}, less than the request's {query} new tokens")
    return query_lens


def _positions(queries: Sequence[int], contexts: Sequence[int], rows: int) -> Tensor:
    positions = torch.zeros(rows, dtype=torch.int64)
    live = [torch.arange(c, c + q) for q, c in zip(queries, contexts, strict=True)]
    if live:
        positions[: sum(queries)] = torch.cat(live)
    return positions


def _slots(
    queries: list[int], contexts: list[int], table: Tensor, page_size: int, positions: Tensor
) -> Tensor:
    for index, (query, context) in enumerate(zip(queries, contexts, strict=True)):
        needed = -(-(query + context) // page_size)
        if needed > table.shape[1]:
            raise BatchError(
                f"request {index} has {query + context} tokens and needs {needed} pages of {page_size}, "
                f"but its block_table row has {table.shape[1]}"
            )
        if needed and int(table[index, :needed].min()) < 0:
            raise BatchError(
                f"request {index} needs {needed} pages but block_table[{index}] is {table[index].tolist()}"
            )
    slots = torch.full((positions.shape[0],), -1, dtype=torch.int64)
    tokens = sum(queries)
    request = torch.repeat_interleave(torch.arange(len(queries)), torch.tensor(queries, dtype=torch.int64))
    where = positions[:tokens]
    slots[:tokens] = table.long()[request, where // page_size] * page_size + where % page_size
    return slots
