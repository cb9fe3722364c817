"""A parameter server: one rank holds the parameters, the others compute gradients."""
