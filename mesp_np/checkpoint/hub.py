"""A model by its name on the Hugging Face hub, OWNER/NAME: from the local cache, or downloaded into it.

    $HF_HUB_CACHE, or $HF_HOME/hub, or $XDG_CACHE_HOME/huggingface/hub, or ~/.cache/huggingface/hub
        models--OWNER--NAME/refs/main            which snapshot is the newest one fetched
        models--OWNER--NAME/snapshots/ID/        its files

The cache is read without any library, and what is whole there is never asked for again.
Downloading needs huggingface_hub, the `hub` extra of this package.

Source    huggingface_hub, "Understand caching"
"""

import os
import re
from pathlib import Path

from mesp_np.checkpoint.weight_files import INDEX, WEIGHTS, shards
from mesp_np.errors import UserError

CONFIG = "config.json"
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json",
              "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
              "additional_chat_templates/*.jinja", "generation_config.json", "LICENSE*", "NOTICE*")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find(name, weights=True):
    """The folder of a model: `name` itself when there is such a folder, else that of OWNER/NAME.

    weights  False: config.json is enough
    Raises UserError when there is none, and it cannot be downloaded.
    """
    if Path(name).exists():
        return Path(name)
    if not HUB_NAME.fullmatch(str(name)):
        raise UserError(f"{name}: no such folder", "name a folder in Hugging Face form, or a model on its hub as "
                                                   "OWNER/NAME (for `plan` also a preset)")
    snapshot = _cached(str(name))
    return snapshot if snapshot and is_whole(snapshot, weights) else _download(str(name), weights)


def name_of(folder):
    """OWNER/NAME of a snapshot in a cache; of any other folder its path."""
    places = Path(folder).parts
    cached = len(places) > 2 and places[-2] == "snapshots" and places[-3].startswith("models--")
    return places[-3].removeprefix("models--").replace("--", "/") if cached else str(folder)


def cache_folder():
    """Where the Hugging Face programs keep what they download."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    home = Path(os.environ.get("HF_HOME") or home)
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def _cached(name):
    """The newest snapshot of a model in the cache, or None."""
    model = cache_folder() / f"models--{name.replace('/', '--')}"
    try:
        return model / "snapshots" / (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None


def is_whole(folder, weights=True):
    """Whether a folder has all files that it names: a download may have been cut short, or left out the weights."""
    files = [CONFIG]
    if weights:
        in_shards = (folder / INDEX).exists() and not (folder / WEIGHTS).exists()
        files += shards(folder / INDEX) if in_shards else [WEIGHTS]
    return all((folder / file).exists() for file in files)


def _download(name, weights):
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"{name}: no such folder, and not whole in {cache_folder()}",
                        "install the hub extra to download it: pip install 'mesp-np[hub]'") from None
    patterns = [CONFIG, *COMPANIONS, "model*.safetensors", INDEX] if weights else [CONFIG]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, cache_dir=cache_folder()))
    except Exception as error:                  # what goes wrong on a network has many names
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name}: no such folder, and it cannot be downloaded ({reason})",
                        "check the name and the connection, or name a folder") from None
