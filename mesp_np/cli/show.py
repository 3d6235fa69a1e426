"""The derivation of an op, or the account of a method, for a terminal.

Without a name it lists what there is, in an order to read it in.
"""

import importlib
import re

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from mesp_np.errors import UsageError

OPS = ("rmsnorm", "linear", "lora", "swiglu", "rope", "attention", "dropout", "residual", "embedding", "select",
       "cross_entropy", "matmul", "bf16", "quant", "rounding", "optim_steps", "noise", "fill", "rowmath")
KERNELS = ("tiles", "packing", "micro", "amx", "vectors", "compiling")
PARTS = ("block", "block_backward", "saved", "arena", "placement", "ledger", "team", "model", "planner", "prices",
         "process")
METHODS = ("store", "store_lean", "mebp", "mesp", "mesp_store_h", "mesp_lean", "mezo")
HEADING = re.compile(r"^[A-Z][A-Za-z]+(?: [a-z]+)?(?=\s{2,}|$)|^(Recomputed|Tiles)(?=\s)", re.MULTILINE)


def add_flags(parser):
    parser.add_argument("name", nargs="?", metavar="OP", help="an op, a part of the engine, or a method")


def run(args):
    console = Console()
    if args.name is None:
        for title, names in (("ops", OPS), ("kernels", KERNELS), ("engine", PARTS), ("methods", METHODS)):
            console.print(f"[bold]{title:8}[/] {'  '.join(name.replace('_', '-') for name in names)}", highlight=False)
        return
    module = find(args.name)
    text = Text(module.__doc__.rstrip())
    text.highlight_regex(HEADING, "bold cyan")
    file = module.__name__.replace(".", "/") + ".py"
    console.print(Panel(text, title=args.name, subtitle=file, border_style="dim", width=min(console.width, 112)))


def find(name):
    """The module of this name.  Raises UsageError when there is none."""
    plain = name.replace("-", "_")
    for names, package in ((OPS + KERNELS, "mesp_np.ops."), (PARTS, "mesp_np."), (METHODS, "mesp_np.methods.")):
        if plain in names:
            return importlib.import_module(package + plain)
    raise UsageError(f"there is nothing to show for {name!r}", "`mesp-np show` lists what there is")
