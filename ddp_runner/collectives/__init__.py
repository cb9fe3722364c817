"""``task=collectives``: verifies and times collective operations."""
