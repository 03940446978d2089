"""FlashInfer's attention kernels as a backend of mla_core."""
