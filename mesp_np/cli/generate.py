"""Continue a text, greedily or by sampling, with a key/value cache."""

import math
import sys

from rich.console import Console

from mesp_np.checkpoint import adapter
from mesp_np.cli import flags
from mesp_np.config import RunConfig
from mesp_np.engine import Engine, plan_setup
from mesp_np.errors import UsageError
from mesp_np.generate import generate, generator
from mesp_np.readout import make


def add_flags(parser):
    flags.add_model_flag(parser)
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter in PEFT's format")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--max-tokens", type=int, default=100, help="new tokens at most (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from this much of the probability (default: 1)")
    flags.add_config_flags(parser, RunConfig, {name: flags.RUN_HELP[name] for name in ("threads", "seed", "dtype")})


def run(args):
    if args.max_tokens < 1 or not 0 <= args.temperature < math.inf or not 0 < args.top_p <= 1:
        raise UsageError("--max-tokens must be 1 or more, --temperature 0 or more, --top-p in (0, 1]")
    checkpoint = flags.checkpoint(args)
    ids = checkpoint.tokenizer.encode(args.prompt)
    positions = min(checkpoint.config.max_position_embeddings, len(ids) + args.max_tokens)
    settings = flags.run_config(args, optimizer="sgd", batch_size=1, seq=positions,
                                trainable="lora" if args.adapter else "none")
    setup = plan_setup(checkpoint.config, settings, checkpoint.weights)
    with Engine(checkpoint.config, checkpoint.weights, settings, setup) as engine:
        if args.adapter:
            adapter.load(args.adapter, engine.parameters, settings)
        stop = checkpoint.eos_ids | {checkpoint.tokenizer.eos_id}
        new = generate(generator(engine, positions), ids, args.max_tokens, stop, args.temperature, args.top_p,
                       settings.seed)
        with make(Console(stderr=True), live=False).compiling():
            _stream(args.prompt, new, checkpoint.tokenizer)


def _stream(prompt, new, tokenizer):
    """Print text as it grows; a character of several tokens waits until it is whole."""
    sys.stdout.write(prompt)
    ids, shown = [], ""
    for token in new:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            sys.stdout.write(text[len(shown):])
            sys.stdout.flush()
            shown = text
    print(tokenizer.decode(ids)[len(shown):])
