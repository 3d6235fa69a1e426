"""The command line: `mesp-np COMMAND ...`, one file a command.

Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted.
"""

import argparse
import os
import sys
import warnings

from mesp_np import __version__
from mesp_np.arena import ArenaFull
from mesp_np.cli import compare, eval, generate, gradcheck, merge, plan, quantize, show, train
from mesp_np.errors import UserError

COMMANDS = (train, plan, compare, gradcheck, show, eval, generate, merge, quantize)


def main(argv=None):
    """Run a command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="mesp-np", description="Memory-efficient fine-tuning, counted to the byte.")
    parser.add_argument("--version", action="version", version=f"mesp-np {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2]
        about = command.__doc__.splitlines()[0]
        own = commands.add_parser(name, help=about, description=command.__doc__, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
        command.add_flags(own)
        own.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):       # a console that cannot show a glyph shows a ? in its place
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="mesp_np")   # overflows are told as a bad loss
    try:
        return args.run(args) or 0
    except UserError as error:
        print(f"mesp-np {args.command}: {error}", file=sys.stderr)
        return error.code
    except (ArenaFull, MemoryError) as error:
        print(f"mesp-np {args.command}: not enough memory: {error}; see what `mesp-np plan` says", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"mesp-np {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:                       # the reader of our output has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
