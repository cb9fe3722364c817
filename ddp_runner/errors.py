"""The one exception for what a user can cause; every module may raise it."""


class UserError(ValueError):
    """A fault of the input, not of the program: printed as one plain line, without a traceback.

    The message is one line: the rule, the values, the fix, as in
    ``batch.global_size (100) is not divisible by world_size (3); use 99 or 102``.
    """
