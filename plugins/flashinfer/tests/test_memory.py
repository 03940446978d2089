"""Which tensors FlashInfer's kernels take as they are."""

from __future__ import annotations

import pytest
import torch

from mla_core.errors import CacheError
from mla_flashinfer import memory

PLAIN = torch.zeros(4, 3, 64, dtype=torch.bfloat16)
VIEWS = {
    "whole": (PLAIN, True),
    "rows apart": (PLAIN[::2], True),
    "heads apart": (PLAIN[:, ::2], True),
    "half a row": (PLAIN[..., 32:], True),
    "elements apart": (PLAIN[..., ::2], False),
    "start not aligned": (PLAIN[..., 3:], False),
    "stride not aligned": (torch.zeros(4, 3, 61, dtype=torch.bfloat16), False),
    "fp8 row of 576": (torch.zeros(4, 3, 576).to(torch.float8_e4m3fn), True),
}


@pytest.mark.parametrize(("x", "taken"), VIEWS.values(), ids=VIEWS)
def test_only_rows_at_multiples_of_16_bytes_are_read_in_place(x, taken):
    found = memory.readable(x)
    assert (found is x) is taken
    assert torch.equal(found.float(), x.float())


def test_a_contiguous_tensor_at_an_odd_address_is_copied():
    x = torch.arange(64 + 3).bfloat16()[3:].view(1, 1, 64)
    found = memory.readable(x)
    assert found.data_ptr() % 16 == 0
    assert torch.equal(found, x)


def test_an_output_that_cannot_be_written_gets_a_buffer():
    assert memory.writable(PLAIN) is PLAIN
    assert memory.writable(PLAIN[..., 3:]).shape == (4, 3, 61)


def test_an_lse_with_gaps_gets_a_buffer():
    lse = torch.zeros(4, 6)
    assert memory.writable_lse(lse) is lse
    assert memory.writable_lse(lse[:, ::2]).is_contiguous()
    assert memory.writable_lse(None) is None


def test_pages_too_far_apart_for_32_bit_strides_are_refused():
    far = torch.as_strided(torch.zeros(64, dtype=torch.bfloat16), (1, 1, 64), (1 << 32, 64, 1))
    with pytest.raises(CacheError, match=r"2\^32"):
        memory.readable_cache(far)
