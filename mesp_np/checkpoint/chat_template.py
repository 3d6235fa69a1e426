"""A folder's own chat template: messages to the text that the model was trained to see.

A template is a small Jinja program that comes with the model, and only the model's own is
right: a re-written one that forgets the default system turn trains on another text than the
model will be asked with.  It stands in the first of these that exists:

    chat_template.jinja      the whole file
    tokenizer_config.json    "chat_template": a string, or a list of {"name", "template"}
                             of which "default" is taken
    chat_template.json       {"chat_template": a string}

A downloaded program is not trusted: it runs in Jinja's immutable sandbox (`template_language.py`).
What it may call is what transformers offers (documentation: "Writing a chat template"): loop controls, tojson
that escapes neither HTML nor Unicode, raise_exception, strftime_now, and the special tokens
of tokenizer_config.json by name, such as eos_token.  The {% generation %} tag, which marks
answers for transformers, is accepted and changes nothing.
"""

from functools import cached_property
from pathlib import Path

from mesp_np.errors import UserError
from mesp_np.json_file import read_object

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """The template in the file `path`, whose text is `source`; `special` are its tokens by name."""

    def __init__(self, path, source, special):
        self.path, self.source, self.special = path, source, special

    @cached_property
    def _template(self):
        from mesp_np.checkpoint.template_language import compiled

        return compiled(self.path, self.source)

    def render(self, messages, tools=None, generation_prompt=False):
        """The text of a conversation.

        messages           list of {"role", "content", ...}
        tools              list of function descriptions, or None
        generation_prompt  whether the text ends where the model's answer would begin

        Raises UserError for a template that is wrong, and with its own words when it refuses the conversation.
        """
        template = self._template
        try:
            return template.render(messages=messages, tools=tools, documents=None,
                                   add_generation_prompt=generation_prompt, **self.special)
        except Exception as error:      # whatever the program does wrong, such as adding a null to a string
            raise UserError(f"{self.path}: the chat template refuses this conversation ({error})") from None


def find(folder):
    """The ChatTemplate of a folder, or None."""
    folder = Path(folder)
    config = folder / "tokenizer_config.json"
    settings = read_object(config) if config.exists() else {}
    special = {name: _content(settings[name]) for name in SPECIAL if settings.get(name)}
    for path, source in _candidates(folder, config, settings):
        if source is not None:
            return ChatTemplate(path, _one(source, path), special)
    return None


def _candidates(folder, config, settings):
    """(path, what it says) of each place, in the order of their right."""
    alone, old = folder / "chat_template.jinja", folder / "chat_template.json"
    yield alone, _text(alone) if alone.exists() else None
    yield config, settings.get("chat_template")
    yield old, read_object(old).get("chat_template") if old.exists() else None


def _text(path):
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})", "download it again") from None


def _one(source, path):
    """The template's text, from a string or from a list of named ones."""
    if isinstance(source, list) and all(isinstance(entry, dict) for entry in source):
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
        if source is None:
            raise UserError(f"{path}: no chat template is named default, only {', '.join(map(str, named))}",
                            "name the one that is meant \"default\"")
    if not isinstance(source, str):
        raise UserError(f"{path}: chat_template is neither a string nor a list of named ones", "download it again")
    return source


def _content(token):
    """The text of a special token, which is a string or an object with its content."""
    return token.get("content") if isinstance(token, dict) else token
