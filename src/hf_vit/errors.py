"""The one error a user is meant to read."""


class UserError(ValueError):
    """Bad input. The message says what was given, what is needed and the remedy; the command line prints it as one line."""
