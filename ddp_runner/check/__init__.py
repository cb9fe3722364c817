"""``task=check``: verify the guarantees of data parallelism on the user's model and data."""
