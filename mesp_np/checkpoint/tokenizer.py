"""Text to token ids and back, with the tokenizer.json of a model's folder.

Two things are set here whatever the file says.  Truncation and padding are off: some
published files carry them, and would cut or fill rows in silence.  And there are two ways
to read a control token, such as <|im_end|>, that stands in a text:

    encode      as the characters it is made of: a document must not be able to end itself
    rendered    as the control token, for text that a chat template has made

Neither adds anything around a text: `begin_ids` is what this tokenizer puts before one (its
post-processor's begin of text; nothing in Qwen's), `eos_id` is the end of text.

The library takes some 500 bytes a token while it works.  So a long text is encoded in blocks,
cut between two words or lines, where byte-level tokenizers such as Qwen's begin a token anyway.
"""

import re
from pathlib import Path

import numpy as np
import tokenizers

from mesp_np.errors import UserError
from mesp_np.json_file import read_object

BLOCK = 1 << 18                                             # characters
CUT = re.compile(r"(?<=\S\n)(?=\w)|(?<=\S)(?= \w)")


class Tokenizer:
    """The tokenizer of a folder, for a model with `vocab_size` tokens.

    eos_name, eos_id   the end of text, as tokenizer_config.json names it
    begin_ids          ids that belong before a text that begins a sequence
    control            compiled pattern of the names of all control tokens (special added tokens)
    """

    def __init__(self, folder, vocab_size):
        self.path, self.vocab_size = Path(folder) / "tokenizer.json", vocab_size
        self._inner = _load(self.path)
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        self.eos_name, self.eos_id = self._eos()
        self.begin_ids = self._begin()
        self.control = _pattern(token.content for token in self._inner.get_added_tokens_decoder().values()
                                if token.special)

    def encode(self, text):
        """List of ids; control tokens are plain characters.  Raises UserError when one is no token of the model."""
        return self.encode_at(text)[0].tolist()

    def encode_at(self, text):
        """(ids (n,) int32, starts (n,) int64): as `encode`, and the character at which each token starts."""
        return self._joined((at, *self._block(block)) for at, block in _blocks(text))

    def rendered(self, text, mark=""):
        """(ids, starts) of a chat template's text, in which control tokens are what they are.

        mark  a character that breaks up what only looks like a control token; it is dropped, and `starts` count
              without it.  The text is then encoded piece by piece between the true control tokens, as the
              tokenizer itself would cut it.
        """
        if mark and mark in text:
            return self._in_pieces(text, mark)
        self._inner.encode_special_tokens = False
        try:
            return self.encode_at(text)
        finally:
            self._inner.encode_special_tokens = True

    def decode(self, ids):
        """The text of a sequence of ids, control tokens included."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)

    def _in_pieces(self, text, mark):
        found, at = [], 0
        for piece in re.split(f"({self.control.pattern})", text):
            if self.control.fullmatch(piece):
                found.append((at, [self._inner.token_to_id(piece)], [0]))
            else:
                piece = piece.replace(mark, "")
                found.append((at, *self.encode_at(piece)))
            at += len(piece)
        return self._joined(found)

    def _block(self, text):
        found = self._inner.encode(text, add_special_tokens=False)
        return found.ids, [start for start, _ in found.offsets]

    def _joined(self, found):
        """One (ids, starts) of several, each (where its text begins, ids, starts)."""
        parts = [(np.array(ids, np.int32), at + np.array(starts, np.int64)) for at, ids, starts in found]
        ids, starts = map(np.concatenate, zip(*parts))
        self._check(int(ids.max(initial=0)))
        return ids, starts

    def _begin(self):
        """What the post-processor puts before a text: the special tokens before the first other one."""
        around = self._inner.encode("a", add_special_tokens=True)
        return around.ids[:around.special_tokens_mask.index(0)]

    def _eos(self):
        path = self.path.with_name("tokenizer_config.json")
        name = read_object(path).get("eos_token")
        name = name.get("content") if isinstance(name, dict) else name
        index = self._inner.token_to_id(name) if isinstance(name, str) else None
        if index is None:
            raise UserError(f"{path}: eos_token is {name!r}, which is no token of {self.path.name}",
                            "name the token that ends a text, such as <|endoftext|>")
        self._check(index)
        return name, index

    def _check(self, index):
        if index >= self.vocab_size:
            raise UserError(f"{self.path}: token {self._inner.id_to_token(index)!r} has id {index}, "
                            f"the model has {self.vocab_size} tokens", "use the tokenizer that belongs to the model")


def _blocks(text):
    """Yield (at, block): the text in blocks of about BLOCK characters, and where each begins."""
    at, cut = 0, CUT.search(text, BLOCK)
    while cut:
        yield at, text[at:cut.start()]
        at, cut = cut.start(), CUT.search(text, cut.start() + BLOCK)
    yield at, text[at:]


def _pattern(names):
    """A pattern of any of the names, the longest first; of nothing when there are none."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _load(path):
    if not path.is_file():
        raise UserError(f"{path}: not found", "copy the tokenizer files of the model into its folder")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: cannot be read ({error})", "download it again") from None
