"""Examples of a user's own packages, each with its config folder."""
