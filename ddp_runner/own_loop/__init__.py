"""A user's own training loop: a function that gets a ``Run``."""
