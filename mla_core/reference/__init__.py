"""The oracle: textbook Multi-head Latent Attention in float64, written apart from everything it judges.

It imports no other room of this package, reads a config's fields only as data, and works out rotary tables,
scales and gates by itself. It knows no pages, batches or kernels: one request, whole, at a time.

Legend: S tokens of the request, T new tokens, P parts, H heads, D model, Q q-lora, L latent (kv-lora),
N nope, R rope, V value.
"""

from mla_core.reference.layer import Output, attention_layer, cached_layer
from mla_core.reference.merge import merge

__all__ = ["Output", "attention_layer", "cached_layer", "merge"]
