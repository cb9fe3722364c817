"""A training loop of the user's own: a function that gets a ``Run``."""
