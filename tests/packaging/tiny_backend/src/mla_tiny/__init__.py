"""A third party's backend, as small as it can be."""
