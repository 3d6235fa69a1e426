"""Answers: where in a conversation's text each assistant's turn stands, down to the character.

It is asked of the chat template itself, by rendering the conversation up to the answer and
with it:

    messages[:i] and generation prompt   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    messages[:i + 1]                     ... the same, then      Hello<|im_end|>\\n
                                                                 ^^^^^^^^^^^^^^^

What is marked is learned: the answer and the control token that ends it, neither the header
before it nor the line end after it.

    begin   Where the generation prompt ends.  A template may have none, when answers follow
            without a header (Llama 2: "[/INST] Hello </s>"), or write one unasked (early
            Llama 3).  Any other place is uncertain, and refused: a header is never learned.
    end     After the control token that follows a plain answer, wherever it stands last.  In a
            template without one an answer ends where its turn does.

A template that writes this part differently when other turns follow (Qwen3 drops what was
thought in earlier ones) is refused too: what is learned must stand in the text.
"""

from functools import cached_property

from mesp_np.errors import UserError

QUESTION, ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}


class Answers:
    """chat: a ChatTemplate; control: the pattern of all control tokens."""

    def __init__(self, chat, control):
        self.chat, self.control = chat, control

    @cached_property
    def header(self):
        """What the template opens an answer with when it is asked for a generation prompt; "" when it adds nothing."""
        return self._question(generation_prompt=True).removeprefix(self._question())

    @cached_property
    def end(self):
        """Name of the control token that ends an answer, or ""."""
        after = self._exchange().rpartition(ANSWER["content"])[2]
        found = self.control.search(after)
        return found[0] if found else ""

    def spans(self, text, messages, tools, asked):
        """(first, stop) characters in a conversation's text of each answer after the first `asked` messages.

        Raises UserError when a place is uncertain.
        """
        return [self._span(text, messages, tools, index) for index, message in enumerate(messages)
                if message["role"] == "assistant" and index >= asked]

    def _span(self, text, messages, tools, index):
        before = self.chat.render(messages[:index], tools, generation_prompt=True)
        if not self._is_opened(before, messages[:index], tools):
            raise UserError(f"{self.chat.path} does not tell where turn {index + 1} begins, since it has no generation "
                            "prompt there", "leave --mask-prompt out")
        after = self.chat.render(messages[:index + 1], tools)
        stop = after.rfind(self.end, len(before)) + len(self.end) if self.end in after[len(before):] else len(after)
        if not (after.startswith(before) and text.startswith(after[:stop])):
            raise UserError(f"{self.chat.path} renders turn {index + 1} differently when others follow, so its "
                            "place is unknown", "leave --mask-prompt out, or make each answer the last turn")
        return len(before), stop

    def _is_opened(self, before, messages, tools):
        """Whether the text before an answer holds the whole header, if there is any."""
        return before != self.chat.render(messages, tools) if self.header else self._follows_directly

    @cached_property
    def _follows_directly(self):
        return self._exchange().removeprefix(self._question()).lstrip().startswith(ANSWER["content"])

    def _question(self, generation_prompt=False):
        return self.chat.render([QUESTION], generation_prompt=generation_prompt)

    def _exchange(self):
        return self.chat.render([QUESTION, ANSWER])
