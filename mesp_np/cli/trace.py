"""The memory of one training step, event for event, for viewers of traces.

OUT gets ledger.json (every event), trace.json (for ui.perfetto.dev or chrome://tracing) and snapshot.pickle (for
PyTorch's viewer, pytorch.org/memory_viz).  The step is planned, not run: its events are those of a real one.
"""

from pathlib import Path

from rich.console import Console

from mesp_np import trace
from mesp_np.checkpoint import adapter
from mesp_np.checkpoint.atomic import new_folder
from mesp_np.cli import flags
from mesp_np.config import RunConfig
from mesp_np.engine import Engine, plan_step
from mesp_np.ledger import show_bytes


def add_flags(parser):
    parser.add_argument("out", metavar="OUT", help="a new folder")
    flags.add_model_flag(parser, presets=True)
    flags.add_config_flags(parser, RunConfig, flags.RUN_HELP)
    parser.add_argument("--adapter", metavar="DIR", help="take rank, alpha and targets from this adapter")


def run(args):
    flags.expect_unused(args.out, "OUT")
    settings = flags.run_config(args)
    name, config, weights = flags.config_and_weights(args)
    if args.adapter:
        with Engine(config, weights, settings) as phantom:
            adapter.fitting(args.adapter, phantom.parameters, settings)
    plan = plan_step(config, settings, weights=weights)
    with new_folder(args.out) as folder:
        trace.write(folder, plan, f"{name}, a step by {settings.method}")
    console = Console()
    console.print(f"{len(plan.ledger.events):,} events, live peak {show_bytes(plan.live_peak_bytes)}", highlight=False)
    for file in trace.FILES:
        console.print(str(Path(args.out) / file), markup=False, highlight=False, soft_wrap=True)
