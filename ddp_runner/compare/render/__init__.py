"""A comparison as a table, as plots, in TensorBoard."""
