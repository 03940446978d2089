"""Our own Triton kernels for MLA: split-KV decode over every cache layout, prefill, fused rope and append."""
