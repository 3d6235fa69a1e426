"""The language of chat templates: Jinja in its immutable sandbox, with what transformers offers a template.

A module of its own, since Jinja takes 7 MB and a run on plain text renders no conversation.
"""

import json
from datetime import datetime

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mesp_np.errors import UserError


def compiled(path, source):
    """The template of this text.  Raises UserError naming the file and the line."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{path}: the chat template is wrong (line {error.lineno}: {error.message})",
                        "take the template that the model was published with") from None


def _environment():
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what is between."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _strftime_now(form):
    return datetime.now().strftime(form)
