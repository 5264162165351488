"""What the user did wrong, as opposed to what we did."""


class UserError(Exception):
    """A mistake in the input, in one line that says what is wrong and what to do. The command line prints the
    line and exits with 2."""
