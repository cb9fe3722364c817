"""task=check: verifies the guarantees of data parallelism on the user's model and data."""
