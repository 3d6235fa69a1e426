"""The small JSON files of a checkpoint."""

import json
import math
from pathlib import Path

from mesp_np.errors import UserError


def read_object(path, hint=None):
    """The object in a JSON file.  Raises UserError, with `hint` or one for a folder's file, when there is none."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})", hint or "is the folder complete?") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({error})", hint or "download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no JSON object", hint or "download it again")
    return value


def dumps(value, **layout):
    """JSON text; a number for which JSON has no word, infinite or none at all, is null."""
    return json.dumps(_plain(value), allow_nan=False, **layout)


def object_bytes(value):
    """The bytes of a JSON file: two spaces, sorted keys, so the same for the same object."""
    return (dumps(value, indent=2, sort_keys=True) + "\n").encode()


def write_object(path, value):
    """Write a JSON file.  Raises UserError when the system refuses."""
    try:
        Path(path).write_bytes(object_bytes(value))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})", "choose another place") from None


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
