"""Backends that lie, each in one way, and some that do not; the conformance kit is tested with them."""
