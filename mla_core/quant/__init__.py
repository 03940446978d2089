"""Element and block codecs of quantised numbers, in torch, with every rounding stated.

The arithmetic is float32 with IEEE rounding, so that a kernel which follows it writes equal bytes.
"""
