"""task=collectives: how fast and how right each collective is."""
