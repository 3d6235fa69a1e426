"""Text to token ids and back, with the tokenizer.json of a model's folder.

Two things are set here whatever the file says.  Truncation and padding are off: some
published files carry them, and would cut or fill rows in silence.  And there are two ways
to read a control token, such as <|im_end|>, that stands in a text:

    encode      as the characters it is made of: a document must not be able to end itself
    rendered    as the control token, for text that a chat template has made

Neither adds anything around a text: `begin_ids` is what this tokenizer puts before one (its
post-processor's begin of text; nothing in Qwen's), `eos_id` is the end of text.

The library takes some 500 bytes a token while it works.  So a long text is encoded in blocks,
where that changes nothing: byte-level tokenizers such as Qwen's begin a word at every place
that CUT finds, whatever stands before it.  SentencePiece's do not (they put a space before a
text, and join words across lines); with those a text is encoded whole.
"""

import re
from pathlib import Path

import numpy as np

from mesp_np.errors import UserError
from mesp_np.json_file import read_object

BLOCK = 1 << 18                                             # characters
CUT = re.compile(r"(?<=\S\n)(?=\w)|(?<=\S)(?= \w)")
SAMPLE = "He's 12 _a (b)\nc, 3\n4! \u00fc\n_\u6f22\u3002\n\u6f22"      # of all that stands around a cut


class SpelledControl(UserError):
    """A text spells a control token, and the tokenizer cannot take it as characters."""


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
        added = self._inner.get_added_tokens_decoder()
        special = {index: token.content for index, token in added.items() if token.special}
        self.control, self._control_ids = _pattern(special.values()), list(special)
        self._may_cut = self._has_same_words() and not any(map(_spans_a_cut, added.values()))

    def encode(self, text):
        """List of ids; control tokens are plain characters.

        Raises UserError when an id is no token of the model, SpelledControl when a control token remains one.
        """
        return self.encode_at(text)[0].tolist()

    def encode_at(self, text):
        """(ids (n,) int32, starts (n,) int64): as `encode`, and the character at which each token starts."""
        ids, starts = self._encoded(text)
        self._refuse_control(text, ids, starts)
        return ids, starts

    def blocks(self, pieces):
        """Yield a text, given in pieces, in blocks whose ids are together the text's: all of it where none may be cut.

        A block has about BLOCK characters; no name of an added token crosses from one to the next.
        """
        if not self._may_cut:
            yield "".join(pieces)
            return
        text = ""
        for piece in pieces:
            text, at = text + piece, 0
            while cut := CUT.search(text, at + BLOCK):
                yield text[at:cut.start()]
                at = cut.start()
            text = text[at:]
        yield text

    def rendered(self, text, mark=""):
        """(ids, starts) of a chat template's text, in which control tokens are what they are.

        mark  a character that breaks up what only looks like a control token, after its first character.  The
              library finds control tokens before it normalises the text between them; there the mark is dropped.

        Raises as `encode`.
        """
        kept = self._inner.normalizer
        self._inner.encode_special_tokens = False
        if mark:
            from tokenizers.normalizers import Replace, Sequence

            self._inner.normalizer = Sequence([Replace(mark, "")] + [kept] * (kept is not None))
        try:
            ids, starts = self._encoded(text)
        finally:
            self._inner.encode_special_tokens, self._inner.normalizer = True, kept
        if mark:
            self._refuse_control(text, ids, starts, mark)
        return ids, starts

    def decode(self, ids):
        """The text of a sequence of ids, control tokens included."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)

    def _encoded(self, text):
        parts, at = [], 0
        for block in self.blocks([text]):
            found = self._inner.encode(block, add_special_tokens=False)
            starts = at + np.array([start for start, _ in found.offsets], np.int64)
            parts.append((np.array(found.ids, np.int32), starts))
            at += len(block)
        ids, starts = map(np.concatenate, zip(*parts))
        self._check(int(ids.max(initial=0)))
        return ids, starts

    def _refuse_control(self, text, ids, starts, mark=""):
        """Raise SpelledControl when what only spells a control token became one: a Unigram model has it as a word."""
        for at in np.flatnonzero(np.isin(ids, self._control_ids)):
            name = self._inner.id_to_token(int(ids[at]))
            if text.startswith(name[0] + mark + name[1:], starts[at]):
                raise SpelledControl(f"spells the control token {name}, which {self.path} cannot take as characters",
                                     "write it in another way")

    def _has_same_words(self):
        """Whether cut text has the words of the whole: the normalizer and pre-tokenizer do not look beyond a cut."""
        return self._words(SAMPLE) == sum(map(self._words, CUT.split(SAMPLE)), [])

    def _words(self, text):
        """The words of a text, of which each is made into tokens alone."""
        normalizer, splitter = self._inner.normalizer, self._inner.pre_tokenizer
        text = normalizer.normalize_str(text) if normalizer else text
        return [word for word, _ in splitter.pre_tokenize_str(text)] if splitter else [text]

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


def _spans_a_cut(token):
    """Whether an added token could stand on both sides of a cut, or takes the space beside it."""
    between = range(2, len(token.content) + 1)      # two of its characters, x being before it
    cuts = (cut.start() for cut in CUT.finditer(f"x{token.content}x"))
    return token.lstrip or token.rstrip or any(at in between for at in cuts)


def _pattern(names):
    """A pattern of any of the names, the longest first; of nothing when there are none."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _load(path):
    if not path.is_file():
        raise UserError(f"{path}: not found", "copy the tokenizer files of the model into its folder")
    import tokenizers  # not before there is one: a plan reads none

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: cannot be read ({error})", "download it again") from None
