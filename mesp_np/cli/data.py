"""The flags that say how a user's files become tokens."""

from mesp_np.data.encode import Encoder
from mesp_np.errors import UsageError


def add_flags(parser):
    parser.add_argument("--mask-prompt", action="store_true", help="learn answers only: of a conversation every "
                        "assistant's turn, of prompt and completion the completion")
    parser.add_argument("--packing", action="store_true", help="put several short rows into one of up to --seq "
                        "tokens; they do not see each other")
    parser.add_argument("--no-eos", action="store_true", help="append no end of text")
    parser.add_argument("--max-bad-rows", type=int, default=0, metavar="N", help="skip and report up to N rows that "
                        "cannot be used (default: 0)")


def encoder(args, checkpoint):
    """The Encoder for a checkpoint, as the flags say."""
    if args.max_bad_rows < 0:
        raise UsageError(f"--max-bad-rows is {args.max_bad_rows}", "it must be 0 or more")
    return Encoder(checkpoint.tokenizer, checkpoint.chat, args.mask_prompt, not args.no_eos)


def settings(args):
    """The flags by name, for a run's config.json."""
    return {"mask_prompt": args.mask_prompt, "packing": args.packing, "eos": not args.no_eos,
            "max_bad_rows": args.max_bad_rows}
