"""Use a run's model: evaluate, predict, export, sample, or load it in a notebook."""
