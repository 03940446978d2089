"""Element and block codecs of quantised numbers, in torch, with every rounding stated.

The arithmetic is float32 with IEEE rounding, so that a kernel which follows it writes equal bytes. Exported
here: what a kernel package needs to multiply by quantised weights itself.
"""

from mla_core.quant.fp4_hidden import Fp4Hidden, rms_norm_fp4
from mla_core.quant.resmooth import resmooth
from mla_core.quant.weight import Format, Part, QuantisedWeight, multiply

__all__ = ["Format", "Fp4Hidden", "Part", "QuantisedWeight", "multiply", "resmooth", "rms_norm_fp4"]
