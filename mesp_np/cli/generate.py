"""Continue a text, or hold a conversation (--chat), greedily or by sampling, with a key/value cache.

A conversation is read from the terminal, or a turn a line from a pipe; --prompt has one turn.
Ctrl-C ends an answer, Ctrl-D the conversation.
"""

import sys
from contextlib import suppress
from itertools import chain

from rich.console import Console

from mesp_np.chat import Chat
from mesp_np.checkpoint import adapter
from mesp_np.cli import flags
from mesp_np.cli.texts import utf8
from mesp_np.config import RunConfig
from mesp_np.data.encode import Encoder
from mesp_np.engine import Engine, plan_setup
from mesp_np.errors import UsageError, UserError
from mesp_np.generate import Sampling, generate, generator, pieces, sampler
from mesp_np.interrupt import gently
from mesp_np.readout import make

with suppress(ImportError):
    import readline  # noqa: F401    input() then edits lines, where the system has it

CONTEXT, NEW_TOKENS = 4096, 100
SAMPLING_HELP = {
    "temperature": "0 takes the likeliest token",
    "top_p": "draw from the smallest set of tokens with this much of the probability",
    "top_k": "draw from this many of the likeliest tokens; 0: from all",
}


def add_flags(parser):
    flags.add_model_flag(parser)
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter of PEFT or mlx-lm")
    parser.add_argument("--prompt", help="the text to continue; with --chat the one turn to answer")
    parser.add_argument("--chat", action="store_true", help="hold a conversation")
    parser.add_argument("--system", metavar="TEXT", help="the system turn of the conversation (default: the "
                        "template's own)")
    parser.add_argument("--context", type=int, metavar="N", help="tokens that prompt and answers have room for "
                        f"(default: what the model was made for, {CONTEXT} at most)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="new tokens at most (default: "
                        f"{NEW_TOKENS}; in a conversation as many as fit)")
    flags.add_config_flags(parser, Sampling, SAMPLING_HELP)
    flags.add_config_flags(parser, RunConfig, {name: flags.RUN_HELP[name]
                                               for name in ("threads", "seed", "dtype", "residency")})


def run(args):
    sampling = Sampling(**flags.given(args, Sampling))
    _check(args)
    checkpoint = flags.checkpoint(args)
    positions = _context(args, checkpoint.config)
    tokenizer, encoder = checkpoint.tokenizer, Encoder(checkpoint.tokenizer, checkpoint.chat)
    if args.chat:
        encoder.prompt([{"role": "user", "content": ""}])       # a folder without a template is refused at once
        count = args.max_tokens or positions
    else:
        ids, count = tokenizer.begin_ids + tokenizer.encode(args.prompt), args.max_tokens or NEW_TOKENS
        positions = min(positions, len(ids) + count)
    settings = flags.run_config(args, optimizer="sgd", batch_size=1, seq=positions, dropout=0.0,
                                trainable="lora" if args.adapter else "none")
    for note in checkpoint.notes:
        print(f"{checkpoint.folder}: {note}", file=sys.stderr)
    setup = plan_setup(checkpoint.config, settings, checkpoint.weights)
    with Engine(checkpoint.config, checkpoint.weights, settings, setup) as engine:
        if args.adapter:
            adapter.load(args.adapter, engine.parameters, settings)
        source, choose = generator(engine, positions), sampler(sampling, settings.seed)
        stop = checkpoint.eos_ids | {tokenizer.eos_id}
        if args.chat:
            _converse(Chat(source, encoder, stop, choose, args.system), args.prompt, count)
        else:
            new = generate(source, ids, count, stop, choose)
            _show(chain([args.prompt], pieces(new, tokenizer, ids[-1:])))


def _check(args):
    if args.prompt is None and not args.chat:
        raise UsageError("neither --prompt nor --chat is given", "one of them says what to write")
    if args.system is not None and not args.chat:
        raise UsageError("--system without --chat", "only a conversation has a system turn")
    for name in ("max_tokens", "context"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}", "it must be 1 or more")


def _context(args, config):
    most = config.max_position_embeddings
    if args.context and args.context > most:
        raise UsageError(f"--context is {args.context}", f"the model was made for {most} tokens")
    return args.context or min(most, CONTEXT)


def _converse(chat, prompt, count):
    """Answer the one prompt, or turn by turn whoever is at standard input."""
    if prompt is not None:
        _answer(chat, prompt, count)
    elif not sys.stdin.isatty():
        for line in sys.stdin:
            if line.strip():
                _answer(chat, line.rstrip("\r\n"), count)
    else:
        while (line := _ask()) is not None:
            try:
                _answer(chat, line, count)
            except UserError as error:
                print(f"mesp-np generate: {error}", file=sys.stderr)


def _ask():
    """A turn from the terminal, or None at its end."""
    try:
        while not (line := input("you> ")).strip():
            pass
        return line
    except EOFError:
        print()
        return None


def _answer(chat, text, count):
    with gently() as asked_to_stop:
        _show(chat.answer(utf8("the turn", text), count), asked_to_stop.is_set)
    if chat.full:
        print("the context is full; start again, or raise --context", file=sys.stderr)


def _show(text, stop=lambda: False):
    """Write pieces of text as they come, until they or the user end it."""
    with make(Console(stderr=True), live=False).compiling():
        for piece in text:
            sys.stdout.write(piece)
            sys.stdout.flush()
            if stop():
                break
    print()
