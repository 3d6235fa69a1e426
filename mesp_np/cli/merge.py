"""Fold an adapter into its model, and write the result as a folder that needs no adapter.

Weights keep the form in which they are stored; those of a quantised MLX model become dense.
What rounding to that form loses of the adapter's change is reported.
"""

from rich.console import Console

from mesp_np.checkpoint import adapter, folder
from mesp_np.cli import flags
from mesp_np.engine import Engine, plan_setup
from mesp_np.json_file import dumps
from mesp_np.ledger import show_bytes
from mesp_np.merge import merged_weights

DENSE = {"quantization": None, "quantization_config": None}     # what the config of a merged model no longer says


def add_flags(parser):
    flags.add_model_flag(parser)
    parser.add_argument("--adapter", metavar="DIR", required=True, help="a LoRA adapter of PEFT or mlx-lm")
    parser.add_argument("--out", metavar="DIR", required=True, help="a new folder for the result")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args):
    flags.expect_unused(args.out, "--out")
    checkpoint = flags.checkpoint(args)
    settings = flags.run_config(args, optimizer="sgd", batch_size=1, seq=1, dropout=0.0)
    setup = plan_setup(checkpoint.config, settings, checkpoint.weights)
    with Engine(checkpoint.config, checkpoint.weights, settings, setup) as engine:
        adapter.load(args.adapter, engine.parameters, settings)
        weights, rounding = merged_weights(engine, checkpoint.weights)
        folder.derive(args.out, checkpoint.folder, weights, DENSE)
    result = {"model": str(checkpoint.folder), "adapter": args.adapter, "out": args.out, "merged": rounding.tensors,
              "bytes": sum(weight.nbytes for weight in weights.values()),
              "mean_change": rounding.mean_change, "mean_part_lost": rounding.mean_part_lost,
              "largest_change": rounding.largest_change, "largest_part_lost": rounding.largest_part_lost}
    if args.json:
        print(dumps(result))
    else:
        _report(Console(), checkpoint, result)


def _report(console, checkpoint, result):
    lines = [*(f"{checkpoint.folder}: {note}" for note in checkpoint.notes),
             f"{result['merged']} weights with the adapter folded in; {show_bytes(result['bytes'])} in {result['out']}",
             f"change of a weight: mean {result['mean_change']:.3g}, largest {result['largest_change']:.3g}; error of "
             f"rounding: mean {result['mean_part_lost']:.1%}, largest {result['largest_part_lost']:.1%} of these"]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
