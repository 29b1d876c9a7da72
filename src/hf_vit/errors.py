"""The one error a user is meant to read."""


class UserError(ValueError):
    """Bad input: the message says what was given, what is needed and the remedy.

    The command line prints it as one line.
    """
