"""The one exception a user's mistake raises."""


class InputError(ValueError):
    """Something the user gave cannot be used: one line that says what we got, what is allowed, what to do.

    The command prints the line without a traceback and exits with 2. `gone`: a source no longer answers; it may be
    back later, so what was trained until then is saved.
    """

    gone = False
