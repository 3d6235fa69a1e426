"""Records to tokens: the ids that the model sees, and which of them it is to learn.

    text, document      the text, and the end of text
    conversation        what the folder's chat template makes of it, and nothing else
    prompt and answer   strings: a user's and an assistant's turn; in a folder without a chat
                        template the two joined, and the end of text

A text that ends in the name of the end of text, such as <|endoftext|>, ends in the token
once.  Everywhere else a control token written by a user is plain characters, in messages
too: the template's own control tokens are the only ones, so no content can end its turn.

With `mask_prompt` only answers are learned: every assistant turn (those of a prompt that is
a list of messages are part of the question), with the control token that ends it, without
the header before it and the line end after it.  Where an answer stands is asked of the
template itself, by rendering the conversation up to it:

    messages[:i] and generation prompt   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    messages[:i + 1]                     ... the same, then      Hello<|im_end|>\\n
                                                                 ^^^^^^^^^^^^^^^

Both must begin the whole text as it was rendered; a template that writes earlier turns
differently is refused.  A token belongs to the answer when its first character does.
"""

import json

import numpy as np

from mesp_np.data.records import TEXTS, BadRow
from mesp_np.errors import UsageError, UserError

EXCHANGE = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
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

    def encode(self, record):
        """(ids (n,) int32, mask (n,) bool): the tokens of a Record, and which of them are learned.

        Raises BadRow for a conversation that the template refuses, UsageError for a text when prompts are masked,
        UserError for a conversation in a folder without a template.
        """
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
        if not self.chat:
            return None
        question = list(EXCHANGE[:1])
        header = self.chat.render(question, generation_prompt=True).removeprefix(self.chat.render(question))
        header, _ = self.tokenizer.rendered(header)
        ends = range(len(header), len(ids)) if len(header) else []
        return next((ids[:end].tolist() for end in ends if np.array_equal(ids[end - len(header):end], header)), None)

    def turn_end(self):
        """Id of the control token with which the template ends an answer, or None."""
        names = self.tokenizer.control.findall(self.chat.render(list(EXCHANGE))) if self.chat else []
        return int(self.tokenizer.rendered(names[-1])[0][0]) if names else None

    def spells_control(self, record):
        """Whether a text spells a control token anywhere but at its end."""
        text = record.text.removesuffix(self.tokenizer.eos_name)
        return self.tokenizer.control.search(text) is not None

    def _placed(self, record):
        """(ids (n,), characters (n,) at which they start, spans of characters that are answers)."""
        if record.form in TEXTS:
            if self.mask_prompt:
                raise UsageError(f"--mask-prompt: {record.where} is a text, which has no prompt", "leave the flag out")
            return self._joined("", record.text)
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
        text = prompt + (answer.removesuffix(self.tokenizer.eos_name) if self.eos else answer)
        ids, starts = self.tokenizer.encode_at(text)
        begin, end = self.tokenizer.begin_ids, [self.tokenizer.eos_id] * self.eos
        ids = np.concatenate([np.int32(begin), ids, np.int32(end)])
        starts = np.concatenate([np.full(len(begin), -1), starts, np.full(len(end), len(text))])
        return ids, starts, [(len(prompt), len(text) + 1)]

    def _conversation(self, record):
        """Tokens of a rendered conversation, and the spans of its answers."""
        messages, tools, mark = self._guarded(record.messages, record.tools)
        try:
            text = self.chat.render(messages, tools)
            spans = self._answers(text, messages, tools, record.asked) if self.mask_prompt else []
        except UserError as error:
            raise BadRow(f"{record.where}: {error}") from None
        unmarked = [tuple(at - text.count(mark, 0, at) for at in span) for span in spans] if mark else spans
        return *self.tokenizer.rendered(text, mark), unmarked

    def _answers(self, text, messages, tools, asked):
        """Where in a conversation's text each answer stands, with the control token that ends it."""
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and index >= asked:
                before = self.chat.render(messages[:index], tools, generation_prompt=True)
                after = self.chat.render(messages[:index + 1], tools)
                if not (text.startswith(before) and text.startswith(after)):
                    raise UserError(f"{self.chat.path} renders turn {index + 1} differently when others follow, so its "
                                    "place is unknown", "leave --mask-prompt out, or make each answer the last turn")
                spans.append((len(before), len(before) + self._end(after[len(before):])))
        return spans

    def _end(self, answer):
        """Length of an answer up to its last control token, when only white space follows that."""
        ends = [match.end() for match in self.tokenizer.control.finditer(answer)]
        return ends[-1] if ends and not answer[ends[-1]:].strip() else len(answer)

    def _guarded(self, messages, tools):
        """(messages, tools, mark) with a mark inside whatever looks like a control token, if anything does."""
        everything = json.dumps([messages, tools], ensure_ascii=False)
        if not self.tokenizer.control.search(everything):
            return list(messages), tools, ""
        mark = next(chr(code) for code in PRIVATE if chr(code) not in everything)
        return self._marked(list(messages), mark), self._marked(tools, mark), mark

    def _marked(self, value, mark):
        """A JSON value with the mark after the first character of every control token in it."""
        if isinstance(value, str):
            return self.tokenizer.control.sub(lambda match: match[0][0] + mark + match[0][1:], value)
        if isinstance(value, list):
            return [self._marked(item, mark) for item in value]
        if isinstance(value, dict):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        return value
