"""Records to tokens: the ids that the model sees, and which of them it is to learn.

    text, document      the text, and the end of text
    conversation        what the folder's chat template makes of it, and nothing else
    prompt and answer   strings: a user's and an assistant's turn; in a folder without a chat
                        template the two joined, and the end of text

A text that ends in the name of the end of text, such as <|endoftext|>, ends in the token
once.  Everywhere else a control token written by a user is plain characters, in messages
too: the template's own control tokens are the only ones, so no content can end its turn.
A mark, a character that nobody wrote, is put inside whatever looks like a control token
before the template sees it; the tokenizer drops it again.

With `mask_prompt` only answers are learned, where `data.answers` finds them: every
assistant turn but those of a prompt that is a list of messages, which are part of the
question, and a first turn, which answers nothing.  A token belongs to the answer when its
first character does.
"""

import re
from contextlib import contextmanager
from itertools import chain, pairwise

import numpy as np

from mesp_np.checkpoint.tokenizer import SpelledControl
from mesp_np.data.answers import Answers
from mesp_np.data.records import BadRow
from mesp_np.errors import UsageError, UserError

PRIVATE = range(0xE000, 0xF900)         # characters without a meaning


class Encoder:
    """How the records of a run become tokens.

    tokenizer    checkpoint.tokenizer.Tokenizer
    chat         checkpoint.chat_template.ChatTemplate, or None
    mask_prompt  learn answers only
    eos          append the end of text where no template decides
    """

    def __init__(self, tokenizer, chat, mask_prompt=False, eos=True):
        self.tokenizer, self.chat, self.mask_prompt, self.eos = tokenizer, chat, mask_prompt, eos
        self._answers = Answers(chat, tokenizer.control) if chat else None

    def stream(self, record):
        """Yield a text's or document's tokens block by block: (ids (n,) int32, whether it spells a control token).

        All are learned.  Raises UsageError when prompts are masked, BadRow when a control token cannot be characters.
        """
        if self.mask_prompt:
            raise UsageError(f"--mask-prompt: {record.where} is a text, which has no prompt", "leave the flag out")
        yield np.array(self.tokenizer.begin_ids, np.int32), False
        for block, following in pairwise(chain(self.tokenizer.blocks(record.pieces), [None])):
            text = self._without_end(block) if following is None else block
            with _bad_row(record.where, SpelledControl):
                ids, _ = self.tokenizer.encode_at(text)
            yield ids, self.tokenizer.control.search(text) is not None
        yield np.array(self._end_ids(), np.int32), False

    def encode(self, record):
        """(ids (n,) int32, mask (n,) bool): the tokens of any other Record, and which of them are learned.

        Raises BadRow when the template refuses the conversation, an answer has no certain place, or a control token
        cannot be characters; UserError for a conversation in a folder without a template.
        """
        with _bad_row(record.where, SpelledControl):
            ids, starts, spans = self._placed(record)
        mask = np.full(len(ids), not self.mask_prompt)
        for first, stop in spans:
            mask |= (first <= starts) & (starts < stop)
        return ids, mask

    def prompt(self, messages, tools=None):
        """Ids of a conversation that the model is to continue.  Raises UserError when there is no template for it."""
        if self.chat is None:
            raise UserError(f"{self.tokenizer.path.parent}: has no chat template", "use the folder of a chat model")
        messages, tools, mark = self._guarded(messages, tools)
        return self.tokenizer.rendered(self.chat.render(messages, tools, generation_prompt=True), mark)[0].tolist()

    def opening(self, ids):
        """The beginning of a conversation's ids, up to where its first answer begins; None when that is not found."""
        header, _ = self.tokenizer.rendered(self._answers.header if self.chat else "")
        ends = range(len(header), len(ids)) if len(header) else []
        return next((ids[:end].tolist() for end in ends if np.array_equal(ids[end - len(header):end], header)), None)

    def turn_end(self):
        """Id of the control token with which the template ends an answer, or None."""
        name = self._answers.end if self.chat else ""
        return int(self.tokenizer.rendered(name)[0][0]) if name else None

    def _placed(self, record):
        """(ids (n,), characters (n,) at which they start, spans of characters that are answers)."""
        if not record.messages:
            return np.empty(0, np.int32), np.empty(0, np.int64), []
        if self.chat:
            return self._conversation(record)
        if record.plain:
            return self._joined(*record.plain)
        raise UserError(f"{record.where}: is a conversation, and the model's folder has no chat template",
                        "use the folder of a chat model, or rows of prompt and completion")

    def _joined(self, prompt, answer):
        """Tokens of a prompt and its answer as one text."""
        text = prompt + self._without_end(answer)
        ids, starts = self.tokenizer.encode_at(text)
        begin, end = self.tokenizer.begin_ids, self._end_ids()
        ids = np.concatenate([np.int32(begin), ids, np.int32(end)])
        starts = np.concatenate([np.full(len(begin), -1), starts, np.full(len(end), len(text))])
        return ids, starts, [(len(prompt), len(text) + 1)]

    def _without_end(self, text):
        """A text without the name of the end of text, which is appended as a token."""
        return text.removesuffix(self.tokenizer.eos_name) if self.eos else text

    def _end_ids(self):
        return [self.tokenizer.eos_id] * self.eos

    def _conversation(self, record):
        """Tokens of a rendered conversation, and the spans of its answers."""
        messages, tools, mark = self._guarded(record.messages, record.tools)
        with _bad_row(record.where, UserError):
            text = self.chat.render(messages, tools)
            spans = self._answers.spans(text, messages, tools, max(record.asked, 1)) if self.mask_prompt else []
        return *self.tokenizer.rendered(text, mark), spans

    def _guarded(self, messages, tools):
        """(messages, tools, mark) with a mark inside whatever looks like a control token, if anything does."""
        written = list(_strings([list(messages), tools]))
        if not any(map(self.tokenizer.control.search, written)):
            return list(messages), tools, ""
        mark = next(chr(code) for code in PRIVATE if not any(chr(code) in text for text in written))
        return self._marked(list(messages), mark), self._marked(tools, mark), mark

    def _marked(self, value, mark):
        """A JSON value with the mark after the first character of every control token, of overlapping ones too."""
        if isinstance(value, str):
            return re.sub(f"(?=(?:{self.tokenizer.control.pattern}))(?s:.)", rf"\g<0>{mark}", value)
        if isinstance(value, list):
            return [self._marked(item, mark) for item in value]
        if isinstance(value, dict):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        return value


@contextmanager
def _bad_row(where, kind):
    """Makes an error of this kind the BadRow of a place."""
    try:
        yield
    except kind as error:
        raise BadRow(f"{where}: {error}") from None


def _strings(value):
    """Yield every string in a JSON value, the keys of its objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        yield from _strings([*value.keys(), *value.values()])
