"""Uses the model of a run: to evaluate it, to predict, to export it, or in a notebook."""
