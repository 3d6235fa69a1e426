"""Fine-tune a model: LoRA adapters, or every weight, by any of the methods.

Without flags it trains the small model that comes along on the verse that comes with it.
RUN_DIR gets config.json, log.jsonl (a line a step), summary.json and adapter/.
"""

import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mesp_np import plan_file
from mesp_np.checkpoint.folder import default_folder
from mesp_np.cli import choice, flags
from mesp_np.cli import data as data_flags
from mesp_np.config import RunConfig
from mesp_np.data import report, rows
from mesp_np.data.batches import Batches, InOrder
from mesp_np.engine import plan_setup
from mesp_np.errors import UsageError, UserError
from mesp_np.json_file import dumps
from mesp_np.planner import free_knobs
from mesp_np.readout import make
from mesp_np.train import Run
from mesp_np.train_config import TrainConfig

EPOCHS = 4                       # when neither --iters nor --epochs is given
PROMPT_WORDS = 8
TRAIN_HELP = {
    "iters": "steps",
    "epochs": f"passes over the data, instead of --iters (default: {EPOCHS})",
    "lr": "peak learning rate",
    "schedule": "constant, linear or cosine, after the warm-up",
    "warmup": "steps in which the rate grows to its peak",
    "eval_every": "steps between validations; 0: only before and after",
    "eval_batches": "batches of a validation at most, evenly spread over the lengths; 0: all",
    "save_every": "steps between saved adapters; 0: only at the end",
    "prompt": "text to continue, or question to answer, before and after (default: how the first held-out row begins; "
              "\"\": none)",
    "sample_tokens": "length of the continuation",
}


def add_flags(parser):
    flags.add_model_flag(parser)
    parser.add_argument("--data", metavar="PATH", help="a .txt or .jsonl file, or a folder with train.jsonl and "
                        "perhaps valid.jsonl (default: the verse that comes along, with the default model)")
    data_flags.add_flags(parser)
    flags.add_config_flags(parser, RunConfig, flags.RUN_HELP)
    flags.add_config_flags(parser, TrainConfig, TRAIN_HELP)
    parser.set_defaults(iters=None, epochs=None, prompt=None)
    parser.add_argument("--adapter", metavar="DIR", help="start from this adapter; rank, alpha and targets are its own")
    parser.add_argument("--run-dir", metavar="DIR", help="a new folder for the results (default: runs/DATE-TIME)")
    flags.add_budget_flag(parser)
    parser.add_argument("--plan", metavar="FILE", help="take the settings that `mesp-np plan --save FILE` wrote")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object, and nothing else")


def run(args):
    saved = plan_file.load(args.plan) if args.plan else None
    settings = _settings(args, saved)
    config = TrainConfig(**({"epochs": EPOCHS} if not args.iters else {}) | flags.given(args, TrainConfig))
    checkpoint = flags.checkpoint(args)
    plan_setup(checkpoint.config, settings, checkpoint.weights)       # refuses what does not fit, before data is read
    if saved:
        saved.check(checkpoint.config, settings, checkpoint.weights)
    encoder, size, seq = data_flags.encoder(args, checkpoint), settings.batch_size, settings.seq
    train, valid = rows.load(_data(args), encoder, seq, settings.seed, args.max_bad_rows)
    batches = Batches(train, size, seq, settings.seed, args.packing)
    held_out = InOrder(valid, size, seq, args.packing, config.eval_batches)
    prompt = _prompt(args, valid, encoder)
    config = replace(config, prompt=checkpoint.tokenizer.decode(prompt))
    run_dir = Path(args.run_dir or time.strftime("runs/%Y%m%d-%H%M%S"))
    console = Console(quiet=args.json)
    with make(console, live=True) as readout:
        _introduce(readout, checkpoint, settings, encoder, train, valid, batches)
        training = Run(checkpoint, settings, config, batches, held_out, run_dir, readout, args.adapter,
                       {"data": str(_data(args)), "plan": args.plan} | data_flags.settings(args), prompt)
        made = _choose(training, args, readout)
        summary = training.start()
    _conclude(console, summary, run_dir)
    if args.json:
        print(_summary_json(summary | made, run_dir))
    return 130 if summary["interrupted"] else 0


def _settings(args, saved):
    """RunConfig from the flags, and from a SavedPlan if there is one."""
    if not saved:
        return flags.run_config(args)
    flags.expect_same(flags.given(args, RunConfig), saved.run, saved.path, "the plan decides")
    try:
        return flags.run_config(args, **saved.run)
    except UsageError as error:
        raise UserError(f"{saved.path}: {error.message.removeprefix('--')}", plan_file.AGAIN) from None


def _choose(training, args, readout):
    """Have the planner set what was not given, and say what it chose; what --json has of it."""
    free = () if args.plan else free_knobs(flags.given(args, RunConfig))
    if not free:
        return {}
    made = training.choose(free)
    choice.report(made, readout.console)
    return {"choice": choice.describe(made)}


def _data(args):
    """--data, or the verse beside the default model."""
    if args.data:
        return Path(args.data)
    if args.model:
        raise UsageError("--model without --data", "name a .txt or .jsonl file, or a folder with train.jsonl")
    return default_folder() / "verse"


def _prompt(args, valid, encoder):
    """Ids to continue before and after: --prompt, or how the first held-out row begins, which was not trained on."""
    tokenizer, is_chat = encoder.tokenizer, encoder.chat and valid.source.has_conversations
    if args.prompt and is_chat:
        return encoder.prompt([{"role": "user", "content": args.prompt}])
    if args.prompt is not None or not len(valid):
        return tokenizer.begin_ids + tokenizer.encode(args.prompt) if args.prompt else []
    ids = valid.row(0).ids
    if is_chat and (opening := encoder.opening(ids)):
        return opening
    words = tokenizer.decode(ids[len(tokenizer.begin_ids):]).split(" ")
    return tokenizer.begin_ids + tokenizer.encode(" ".join(words[:PROMPT_WORDS]))


def _introduce(readout, checkpoint, settings, encoder, train, valid, batches):
    """What is about to be done, and what became of the data."""
    for note in (*checkpoint.notes, *report.endings(checkpoint, encoder, train.source.has_conversations)):
        readout.message(f"{checkpoint.folder}: {note}")
    c = checkpoint.config
    readout.message(f"model {checkpoint.folder}: {c.num_hidden_layers} layers, width {c.hidden_size}, "
                    f"vocabulary {c.vocab_size:,}")
    for line in report.describe(train, valid, settings.seq):
        readout.message(line)
    readout.message(report.fill(batches))
    readout.message(f"end of text is {checkpoint.tokenizer.eos_name}; a row, with what is learned in [[ ]]:")
    readout.message(report.example(train.row(0), checkpoint.tokenizer))


def _conclude(console, summary, run_dir):
    before, after = summary["valid_loss_before"], summary["valid_loss_after"]
    for key in ("sample_before", "sample_after"):
        if summary[key]:
            console.print(f"\n[bold]{key.replace('_', ' ')}[/]")
            console.print(summary[key], markup=False, highlight=False)
    console.print()
    if before is not None and after is not None:
        console.print(f"valid loss {before:.4f} -> {after:.4f}, perplexity {summary['valid_perplexity_before']:.2f} -> "
                      f"{summary['valid_perplexity_after']:.2f}", highlight=False)
    live, extent, growth, resident = (f"{summary[f'{name}_bytes'] / 2**20:.1f}" for name in (
        "live_peak", "extent", "os_growth", "resident"))
    console.print(f"MiB: live peak {live}, extent {extent}; the process grew by {growth} and takes {resident}"
                  f"{_weights(summary)}", highlight=False, soft_wrap=True)
    state = "interrupted; what was trained so far is" if summary["interrupted"] else "done;"
    console.print(f"{state} in {run_dir}", markup=False, highlight=False, soft_wrap=True)


def _weights(summary):
    size = summary["weight_resident_bytes"]
    return "" if size is None else f", of which {size / 2**20:.1f} are mapped weights"


def _summary_json(summary, run_dir):
    """The summary and where the run is, as one JSON object."""
    return dumps(summary | {"run_dir": str(run_dir)})
