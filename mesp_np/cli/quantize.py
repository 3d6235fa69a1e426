"""Write a model as codes of 4 or 8 bits: a folder that mlx-lm loads, and that is trained on here as it is.

With --data, how well the model predicts a file before and after.
"""

from rich.console import Console

from mesp_np.checkpoint import folder
from mesp_np.cli import data, flags
from mesp_np.config import RunConfig
from mesp_np.data import rows
from mesp_np.data.batches import InOrder
from mesp_np.engine import Engine
from mesp_np.errors import UserError
from mesp_np.evaluate import evaluate, memory_needed
from mesp_np.json_file import dumps
from mesp_np.ledger import show_bytes
from mesp_np.ops.quant import BITS, GROUPS
from mesp_np.quantize import config_changes, quantised_tensors

RUN_FLAGS = ("batch_size", "seq", "loss", "threads", "dtype")


def add_flags(parser):
    parser.add_argument("model", metavar="SRC", help="a folder with bf16, f16 or f32 weights, or OWNER/NAME on the hub")
    parser.add_argument("out", metavar="OUT", help="a new folder for the result")
    parser.add_argument("--bits", type=int, choices=BITS, default=4, help="of a code (default: 4)")
    parser.add_argument("--group-size", type=int, choices=GROUPS, default=64,
                        help="inputs that share a scale and a bias (default: 64)")
    parser.add_argument("--data", metavar="FILE", help="a .txt or .jsonl file to measure the perplexity on")
    data.add_flags(parser)
    flags.add_config_flags(parser, RunConfig, {name: flags.RUN_HELP[name] for name in RUN_FLAGS})
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args):
    settings = flags.run_config(args, optimizer="sgd", trainable="none")
    flags.expect_unused(args.out, "OUT")
    before = flags.checkpoint(args)
    if before.config.quantization:
        raise UserError(f"{args.model}: is quantised already", "name the bf16, f16 or f32 folder of this model")
    tensors = quantised_tensors(before.weights, args.bits, args.group_size)
    batches = _batches(args, settings, before)
    measured = _measure(settings, before, batches)
    folder.derive(args.out, before.folder, tensors, config_changes(args.bits, args.group_size))
    result = {"model": str(args.model), "out": args.out, "bits": args.bits, "group_size": args.group_size,
              "bytes_before": sum(stored.nbytes for stored in before.weights.values()),
              "bytes_after": sum(stored.nbytes for stored in tensors.values()),
              "before": measured, "after": _measure(settings, folder.load(args.out), batches)}
    if args.json:
        print(dumps(result))
    else:
        _report(result, Console())


def _batches(args, settings, checkpoint):
    """--data as batches, the same for both models; None without it."""
    if not args.data:
        return None
    found = rows.load_file(args.data, data.encoder(args, checkpoint), settings.seq, args.max_bad_rows)
    return InOrder(found, settings.batch_size, settings.seq, args.packing)


def _measure(settings, checkpoint, batches):
    """Loss and perplexity on the batches as plain values; None without any."""
    if batches is None:
        return None
    extent = memory_needed(checkpoint.config, settings, batches, checkpoint.weights)
    with Engine(checkpoint.config, checkpoint.weights, settings, extent) as engine:
        return evaluate(engine, batches).to_json()


def _report(result, console):
    before, after = result["bytes_before"], result["bytes_after"]
    lines = [f"{result['out']}: {result['bits']} bits in groups of {result['group_size']}",
             f"{show_bytes(before)} -> {show_bytes(after)}, {after / before:.1%}"]
    if result["before"]:
        lines.append(f"perplexity {result['before']['perplexity']:.3f} -> {result['after']['perplexity']:.3f} on "
                     f"{result['after']['trained_tokens']:,} tokens")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
