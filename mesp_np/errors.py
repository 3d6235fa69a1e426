"""The one kind of error a user is meant to see."""

LISTED = 12


class UserError(Exception):
    """Something the user can mend: one line that names the file, tensor or flag, and what to try.

    `code` is the exit code of the command line: 1 for a failure, 2 for bad usage.  `message` is without the hint.
    """

    def __init__(self, message, hint="", code=1):
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message, self.code = message, code


class UsageError(UserError):
    """A flag that is wrong or does not go with another."""

    def __init__(self, message, hint=""):
        super().__init__(message, hint, code=2)


def refuse(where, problems, hint=""):
    """Raise one UserError that lists the problems of `where`, so that all can be mended at once; none, no error."""
    if len(problems) == 1:
        raise UserError(f"{where}: {problems[0]}", hint)
    if problems:
        more = len(problems) - LISTED
        lines = problems[:LISTED] + ([f"and {more} more"] if more > 0 else [])
        raise UserError("\n  ".join([f"{where}: {len(problems)} problems; {hint}", *lines]))
