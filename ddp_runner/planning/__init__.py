"""``task=plan``: what a config needs and costs at a world size that is not here."""
