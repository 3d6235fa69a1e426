"""Text that is given on a command line."""

from mesp_np.errors import UsageError

TEXTS = ("prompt", "system")            # may be empty; all other strings name something


def check_strings(args):
    """Refuse text that is not UTF-8, and empty names: a flag with one would do as if it were not there."""
    for name, value in vars(args).items():
        if value == "" and name not in TEXTS:
            raise UsageError(f"{name.replace('_', '-')} is empty", "name one, or leave it out")
        if name in TEXTS and value:
            setattr(args, name, utf8(name, value))


def utf8(where, text):
    """What a user gave as text: bytes that the locale cannot read, which Python escapes, are taken as UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise UsageError(f"{where} {ascii(text[:40])}: not UTF-8", "give text in UTF-8") from None
