"""The command line: `mesp-np COMMAND ...`, one file a command.

What a user can mend is told in one line.  So is what the system refuses in a place where no command expects it.

Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted.
"""

import argparse
import ast
import os
import sys
import warnings
from importlib import import_module
from pathlib import Path

from mesp_np import __version__
from mesp_np.cli.texts import check_strings
from mesp_np.errors import UserError

COMMANDS = ("train", "plan", "compare", "gradcheck", "show", "trace", "diff", "plot", "study", "eval", "generate",
            "merge", "quantize")


def main(argv=None):
    """Run a command; returns the exit code."""
    _mend_streams()
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv).parse_args(argv)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="mesp_np")   # overflows are told as a bad loss
    try:
        check_strings(args)
        code = args.run(args) or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        return _end(args, error, error.code)
    except MemoryError as error:                  # ArenaFull is one
        return _end(args, f"not enough memory: {error}; see what `mesp-np plan` says", 1)
    except KeyboardInterrupt:
        return _end(args, "interrupted", 130)
    except BrokenPipeError:                       # the reader of our output has gone, as in `| head`
        _give_up_output()
        return 1
    except OSError as error:
        _give_up_output()
        return _end(args, f"{error.filename or 'standard input or output'}: {error.strerror or error}", 1)


def _end(args, message, code):
    print(f"mesp-np {args.command}: {message}", file=sys.stderr)
    return code


def _mend_streams():
    """A stream that was closed is as good as empty, and a console that cannot show a glyph shows a ? in its place."""
    for name, mode, errors in (("stdin", "r", "surrogateescape"), ("stdout", "w", "replace"),
                               ("stderr", "w", "replace")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
        if hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors=errors)


def _give_up_output():
    """What standard output did not take is not tried again at the end of the process, which would complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(argv):
    """The parser of all commands; the one that `argv` names, and only that, is imported and has its flags and `run`."""
    parser = argparse.ArgumentParser(prog="mesp-np", description="Memory-efficient fine-tuning, counted to the byte.")
    parser.add_argument("--version", action="version", version=f"mesp-np {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    named = next((word for word in argv if not word.startswith("-")), None)
    for name in COMMANDS:
        about = _about(name)
        own = commands.add_parser(name, help=about.splitlines()[0], description=about, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == named:
            command = import_module(f"mesp_np.cli.{name}")
            command.add_flags(own)
            own.set_defaults(run=command.run)
    return parser


def _about(name):
    """The docstring of a command's file, which is not imported for it."""
    return ast.get_docstring(ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")))
