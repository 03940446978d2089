"""Multi-head Latent Attention in pure torch: every device, every float type, readable before fast."""
