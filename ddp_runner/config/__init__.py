"""The config: its schema, how it is resolved and validated, and the objects it names."""
