"""What the methods cost, as a page with tables and figures that anyone can make again.

OUT gets report.html, report.md, and every number as JSON and CSV in data/.  A section that was measured already is
taken as it is, so an interrupted study goes on where it was.  Matplotlib draws: pip install 'mesp-np[plot]'.
"""

from pathlib import Path

from rich.console import Console

from mesp_np.checkpoint.atomic import new_file
from mesp_np.cli import flags
from mesp_np.json_file import object_bytes, read_object
from mesp_np.study import ablation, gradients, memory, picture, report, timing

SECTIONS = {part.SECTION.name: part.SECTION for part in (memory, ablation, picture, timing, gradients)}


def add_flags(parser):
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder, new or of a study that was interrupted")
    flags.add_model_flag(parser)
    parser.add_argument("--only", choices=SECTIONS, help="measure this section alone")


def run(args):
    console, settings = Console(stderr=True), {"folder": args.model and flags.checkpoint(args).folder}
    for name in [args.only] if args.only else SECTIONS:
        path = args.out / "data" / f"{name}.json"
        if not path.exists():
            with console.status(name) as status, new_file(path) as file:
                file.write(object_bytes(SECTIONS[name].measure(settings, status.update)))
        console.print(f"{name}: {path}", markup=False, highlight=False, soft_wrap=True)
    measured = {section: read_object(path, "remove it, and it is measured again") for name, section in SECTIONS.items()
                if (path := args.out / "data" / f"{name}.json").exists()}
    report.write(args.out, measured)
    Console().print(str(args.out / "report.html"), markup=False, highlight=False, soft_wrap=True)
