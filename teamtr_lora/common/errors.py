"""The one exception that means "the user can fix this"."""


class UserError(Exception):
    """A mistake the user can fix; printed as one line, exit 2."""
