"""What a form of parallelism needs, as its YAML says. Torch-free."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ddp_runner.config.schema import ModeNeeds
from ddp_runner.errors import UserError, nearest


def mode_needs(mode: Mapping[str, Any]) -> ModeNeeds:
    """Return the block `needs` of the group `parallelism`.

    Raises:
        UserError: a key of the block does not exist, or its value is of another kind.
    """
    needs = mode.get("needs", {})
    if not isinstance(needs, Mapping):
        raise UserError(
            f"parallelism.needs ({needs}) is a group of keys; write parallelism.needs.KEY=VALUE"
        )
    defaults = {field.name: field.default for field in fields(ModeNeeds)}
    for key, value in needs.items():
        if key not in defaults:
            meant = nearest(str(key), defaults, cutoff=0.0)
            raise UserError(f"parallelism.needs.{key} does not exist; did you mean {meant}?")
        if isinstance(defaults[key], bool):
            rule, fits = "true or false", isinstance(value, bool)
        else:
            least = 0 if key == "num_servers" else 1
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= least
            rule, fits = f"a whole number from {least} up", is_number
        if not fits and not (key == "max_ranks" and value is None):
            shown = "null" if value is None else value
            raise UserError(f"parallelism.needs.{key} ({shown}) must be {rule}")
    return ModeNeeds(**needs)
