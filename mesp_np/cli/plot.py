"""A run's loss and memory as pictures, while it runs or afterwards.

RUN_DIR gets plot.svg and plot.png.  Matplotlib draws them: pip install 'mesp-np[plot]'.
"""

from pathlib import Path

from rich.console import Console

from mesp_np.plot import draw, read

FORMS = (".svg", ".png")


def add_flags(parser):
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="what `mesp-np train` wrote")
    parser.add_argument("--out", metavar="NAME", type=Path, help="write NAME.svg and NAME.png (default: RUN_DIR/plot)")


def run(args):
    records, name = read(args.run_dir), args.out or args.run_dir / "plot"
    console = Console()
    for form in FORMS:
        path = name.with_name(name.name + form)
        draw(records, path, args.run_dir.resolve().name)
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
