"""The Triton kernels, one stage a file; only `mla_trtllm_like.launch_*` calls them."""
