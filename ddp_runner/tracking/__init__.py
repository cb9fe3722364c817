"""What a run leaves: its folder, run.json, metrics, TensorBoard."""
