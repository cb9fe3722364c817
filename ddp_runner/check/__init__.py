"""task=check: what data parallelism guarantees, asserted on the user's model and data."""
