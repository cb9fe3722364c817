"""The one exception for what a user can cause; every module may raise it."""


class UserError(ValueError):
    """A fault of the input, not of the program: printed as one plain line, without a traceback.

    The message is one line: the rule, the values, the fix, as in
    ``batch.global_size (100) is not divisible by world_size (3); use 99 or 102``.

    A value within it may come from anybody's file: what cannot be printed, a line's end or what
    steers a terminal, is written as its escape.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(one if one.isprintable() else ascii(one)[1:-1] for one in message))
