"""The one exception a user's mistake raises."""


class InputError(ValueError):
    """Something the user gave cannot be used: one line that says what we got, what is allowed, what to do.

    The command prints the line without a traceback and exits with 2.
    """
