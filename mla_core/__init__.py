"""Multi-head Latent Attention as one layer with pluggable backends; importing this loads nothing else."""
