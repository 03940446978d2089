"""The default stages of a layer, one a file, in the order `MLA.forward` runs them."""
