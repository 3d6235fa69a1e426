"""The small JSON files of a checkpoint."""

import json
from pathlib import Path

from mesp_np.errors import UserError


def read_object(path):
    """The object in a JSON file.  Raises UserError when there is none."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})", "is the folder complete?") from None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error})", "download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no JSON object", "download it again")
    return value


def write_object(path, value):
    """Two spaces, sorted keys: the same bytes for the same object.  Raises UserError when the system refuses."""
    try:
        Path(path).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})", "choose another place") from None
