"""The checks, one module a suite; each is a function of a Bench that raises Wrong on a wrong answer."""
