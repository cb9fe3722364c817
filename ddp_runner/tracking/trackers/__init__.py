"""Trackers, which show runs elsewhere: their interface, their processes, MLflow and W&B."""
