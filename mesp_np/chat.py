"""A conversation with a model that was trained to have one.

Before each answer the whole conversation is written out by the folder's chat template, as in
training; the key/value cache keeps what has not changed since the turn before, so only
the new turn is computed.
"""

from mesp_np.generate import generate, pieces


class Chat:
    """A conversation: messages, and the generator that answers.

    source    generate.Generator
    encoder   data.encode.Encoder of a folder with a chat template
    eos_ids   every token that ends an answer
    choose    logits (V,) -> id
    system    text of a system turn, or None for the template's own choice
    """

    def __init__(self, source, encoder, eos_ids, choose, system=None):
        self.source, self.encoder, self.eos_ids, self.choose = source, encoder, eos_ids, choose
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    @property
    def full(self):
        """Is there no room left for another token?"""
        return len(self.source.tokens) >= self.source.positions - 1

    def answer(self, text, count):
        """Iterate over the answer to `text`, piece by piece, of at most `count` tokens.

        An answer that is not asked for to its end stays in the conversation as far as it went.  Raises UserError
        when the conversation has become too long; it is then as it was before.
        """
        question = {"role": "user", "content": text}
        ids = self.encoder.prompt([*self.messages, question])
        new = generate(self.source, ids, count, self.eos_ids, self.choose)
        reply = {"role": "assistant", "content": ""}
        self.messages += question, reply
        return self._tell(new, reply)

    def _tell(self, new, reply):
        for piece in pieces(new, self.encoder.tokenizer):
            reply["content"] += piece
            yield piece
