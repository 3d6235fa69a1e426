"""Loss, perplexity and token accuracy on a file; with --adapter those of the base model beside them."""

from pathlib import Path

from rich.console import Console
from rich.progress import track

from mesp_np.checkpoint import adapter
from mesp_np.cli import data, flags
from mesp_np.config import RunConfig
from mesp_np.data import files, report, rows
from mesp_np.data.batches import InOrder
from mesp_np.engine import Engine
from mesp_np.errors import UserError
from mesp_np.evaluate import evaluate, memory_needed
from mesp_np.json_file import dumps
from mesp_np.readout import make

SHOWN = {"loss": "{:.4f}", "perplexity": "{:.2f}", "token_accuracy": "{:.2%}", "trained_tokens": "{:,}"}
RUN_FLAGS = ("batch_size", "seq", "loss", "threads", "dtype", "residency")


def add_flags(parser):
    flags.add_model_flag(parser)
    parser.add_argument("--data", metavar="PATH", required=True, help="a .txt or .jsonl file, or a folder, whose test "
                        "file is taken, or else its valid file")
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter of PEFT or mlx-lm")
    data.add_flags(parser)
    flags.add_config_flags(parser, RunConfig, {name: flags.RUN_HELP[name] for name in RUN_FLAGS})
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args):
    settings = flags.run_config(args, optimizer="sgd", dropout=0.0, trainable="lora" if args.adapter else "none")
    checkpoint = flags.checkpoint(args)
    file = _file(args.data)
    found = rows.load_file(file, data.encoder(args, checkpoint), settings.seq, args.max_bad_rows)
    console = Console(stderr=True, quiet=args.json)
    notes = [f"{checkpoint.folder}: {note}" for note in checkpoint.notes]
    for line in [*notes, *report.about(found.source, settings.seq)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    result = _evaluations(args, checkpoint, settings, found, console)
    if args.json:
        print(dumps(result))
    else:
        _report(result, Console())


def _file(path):
    """The file to evaluate on: of a folder its test file, or else its valid file."""
    if not Path(path).is_dir():
        return path
    found = files.find(path, "test") or files.find(path, "valid")
    if found is None:
        raise UserError(f"{path}: holds neither test.jsonl nor valid.jsonl", "name the file that is meant")
    return found


def _evaluations(args, checkpoint, settings, found, console):
    """The figures as plain values, under the names of --json.  A fresh adapter adds nothing: that is the base model."""
    batches = InOrder(found, settings.batch_size, settings.seq, args.packing)
    extent = memory_needed(checkpoint.config, settings, batches, checkpoint.weights)
    with (Engine(checkpoint.config, checkpoint.weights, settings, extent) as engine,
          make(console, live=False).compiling()):
        def figures(name):
            shown = track(batches, name, console=console, transient=True, disable=not console.is_terminal)
            return evaluate(engine, shown).to_json()

        base = figures("model" if not args.adapter else "base")
        if not args.adapter:
            return base
        adapter.load(args.adapter, engine.parameters, settings)
        return figures("adapter") | {"base": base}


def _report(result, console):
    """A line for each figure, which a narrow terminal folds and does not cut."""
    base = result.pop("base", None)
    columns = {"base": base, "adapter": result} if base else {"model": result}
    lines = [("", *columns)]
    for name, form in SHOWN.items():
        lines.append((name.replace("_", " "), *(form.format(figures[name]) for figures in columns.values())))
    for title, *cells in lines:
        console.print(f"{title:<14}" + "".join(f"{cell:>14}" for cell in cells), soft_wrap=True, highlight=False)
