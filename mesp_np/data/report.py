"""What became of the data, in words, before anything is trained on it.

Every number that decides what is learned is said: rows by form, tokens and trained tokens,
what was cut, skipped or bad and where, how much is padding; and one row as the model will
see it, the learned part in [[double brackets]].  Most faults of training data show here.
"""

from itertools import groupby

import numpy as np
from rich.text import Text

from mesp_np.checkpoint.folder import eos_ids
from mesp_np.ops.cross_entropy import IGNORE

LEARNED = "bold green"
SHOWN = 300                     # tokens of the example, at most
PLACES = 3


def describe(train, valid, seq):
    """Lines about Rows to train and to validate on, and about the files they are from."""
    for name, rows in (("train", train), ("valid", valid)):
        yield f"{name}: {len(rows):,} rows, {rows.tokens:,} tokens, {rows.trained_tokens:,} with a target"
        if rows is train or rows.source is not train.source:
            yield from about(rows.source, seq)


def about(source, seq):
    """Lines about what became of one file's records, cut at `seq` tokens."""
    forms = ", ".join(f"{count:,} {form}" for form, count in source.forms.items())
    yield f"  {source.path}: {forms}; {source.truncated:,} cut at {seq}"
    for reason, places in source.skipped.items():
        yield f"  {places.count:,} skipped, {reason}: {_first(places)}"
    if source.bad.count:
        yield f"  {source.bad.count:,} bad rows skipped: {_first(source.bad)}"
    if source.unasked.count:
        yield (f"  {source.unasked.count:,} conversations begin with an answer, which is not learned: "
               f"{_first(source.unasked)}")
    if source.written.count:
        yield (f"  {source.written.count:,} texts spell control tokens, which are learned as plain characters "
               f"(give conversations as messages): {_first(source.written)}")


def fill(batches):
    """A line about how full the batches of the first epoch are."""
    shapes, tokens = batches.shapes(range(batches.per_epoch)), int(batches.units.lengths.sum())
    positions = sum(B * T * count for (B, T), count in shapes.items())
    packed = f", {len(batches.units.rows):,} rows packed into {len(batches.units):,}" if batches.units.packed else ""
    return (f"{batches.per_epoch:,} batches an epoch{packed}: {tokens:,} of {positions:,} positions hold a token, "
            f"{1 - tokens / positions:.1%} padding")


def example(row, tokenizer):
    """A Row as rich Text, from a little before its first learned token; what is learned is bracketed and coloured."""
    last = row.labels[-1:]
    tokens = np.append(row.ids, last[last != IGNORE])      # a last token that is not learned is not known
    learned = np.append(False, row.labels != IGNORE)       # whether each token is
    first = max(0, int(np.argmax(learned)) - SHOWN // 2)
    text = Text("..." if first else "")
    shown = zip(learned[first:first + SHOWN], tokens[first:first + SHOWN])
    for is_learned, part in groupby(shown, key=lambda pair: pair[0]):
        words = tokenizer.decode([token for _, token in part])
        text.append(f"[[{words}]]" if is_learned else words, LEARNED if is_learned else "")
    return text.append("..." if len(tokens) > first + SHOWN else "")


def endings(checkpoint, encoder, has_conversations):
    """Warnings when a folder's files disagree about the end of text, or its conversations end in another way."""
    tokenizer, eos = checkpoint.tokenizer, checkpoint.tokenizer.eos_id
    files = (checkpoint.folder / name for name in ("generation_config.json", "config.json"))
    said = {path.name: ids for path in files if (ids := eos_ids(path))}
    if any(eos not in ids for ids in said.values()):
        others = ", ".join(f"{name} {_names(tokenizer, ids)}" for name, ids in said.items())
        yield (f"the files disagree about the end of text: tokenizer_config.json says {tokenizer.eos_name}, {others}; "
               f"{tokenizer.eos_name} is appended to texts")
    end = encoder.turn_end() if has_conversations else None
    if end is not None and end not in checkpoint.eos_ids:
        yield (f"conversations end a turn with {_names(tokenizer, [end])}, but generation stops at "
               f"{_names(tokenizer, checkpoint.eos_ids) or 'nothing'}: list it under eos_token_id in "
               "generation_config.json; a base model has never learned it, and adapters cannot teach it")


def _names(tokenizer, ids):
    return " or ".join(tokenizer.decode([index]) or str(index) for index in sorted(ids))


def _first(places):
    more = [f"and {places.count - PLACES:,} more"] if places.count > PLACES else []
    return ", ".join(places.first[:PLACES] + more)
