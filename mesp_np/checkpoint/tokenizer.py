"""Text to token ids and back, with the tokenizer.json of a model's folder.

Three things are set here whatever the file says.  Truncation and padding are off: some
published files carry them, and would cut or fill rows in silence.  Control tokens written
in a text, such as <|im_end|>, are encoded as the characters they are: a document must not
be able to end itself.  And nothing is added around a text: who wants an end of text
appends `eos_id`.
"""

from pathlib import Path

import tokenizers

from mesp_np.errors import UserError
from mesp_np.json_file import read_object


class Tokenizer:
    """The tokenizer of a folder, for a model with `vocab_size` tokens.

    eos_name, eos_id   the end of text, as tokenizer_config.json names it
    """

    def __init__(self, folder, vocab_size):
        self.path, self.vocab_size = Path(folder) / "tokenizer.json", vocab_size
        self._inner = _load(self.path)
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        self.eos_name, self.eos_id = self._eos()

    def encode(self, text):
        """List of ids.  Raises UserError when one is no token of the model."""
        ids = self._inner.encode(text, add_special_tokens=False).ids
        self._check(max(ids, default=0))
        return ids

    def decode(self, ids):
        """The text of a sequence of ids, control tokens included."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)

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


def _load(path):
    if not path.is_file():
        raise UserError(f"{path}: not found", "copy the tokenizer files of the model into its folder")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: cannot be read ({error})", "download it again") from None
