"""A plan in a file: the settings of a run, for what it was made, and the bytes that it takes.

    {"model": {...}, "run": {...}, "memory_budget": 100663296, "extent_bytes": ..., "live_peak_bytes": ...}

model          the sizes of the model, under the names of config.json
run            what a RunConfig has, but for UNPLANNED
memory_budget  bytes that a step was to fit into, for who reads the file (a run has samples too); 0: no limit was set

A plan that is used again must be as exact as when it was made: it is refused for a model of other
sizes, and when a step now takes other bytes than it says, as of weights that are stored otherwise.
"""

from dataclasses import asdict, dataclass, fields

from mesp_np.checkpoint.atomic import new_file
from mesp_np.config import RunConfig
from mesp_np.errors import UsageError, UserError, refuse
from mesp_np.json_file import object_bytes, read_object
from mesp_np.ledger import show_bytes
from mesp_np.planner import plan_figures

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "tie_word_embeddings", "qkv_bias")
COUNTS = ("memory_budget", "extent_bytes", "live_peak_bytes")
UNPLANNED = ("seed", "betas", "adam_eps")        # no byte depends on them, nor has a flag of a plan to repeat them
AGAIN = "make the plan again with `mesp-np plan --save`"


@dataclass(frozen=True)
class SavedPlan:
    """What a plan file says; `run` is a dict of the fields of a RunConfig that stand in it."""

    path: str
    model: dict
    run: dict
    memory_budget: int
    extent_bytes: int
    live_peak_bytes: int

    def check(self, config, run, weights=None):
        """Refuse a model of other sizes, or a step that takes other bytes."""
        refuse(self.path, [f"is for a model with {name} {self.model[name]}, this one has {size}"
                           for name, size in _sizes(config).items() if size != self.model[name]], AGAIN)
        now = plan_figures(config, run, weights=weights)
        if (now.extent_bytes, now.live_peak_bytes) != (self.extent_bytes, self.live_peak_bytes):
            raise UserError(f"{self.path}: says {show_bytes(self.extent_bytes)}, a step of this model takes "
                            f"{show_bytes(now.extent_bytes)}", AGAIN)


def save(path, config, run, memory_budget, figures):
    """Write a plan.  Raises UserError when the system refuses; what was there is then as it was."""
    settings = {name: value for name, value in asdict(run).items() if name not in UNPLANNED}
    with new_file(path) as file:
        file.write(object_bytes({"model": _sizes(config), "run": settings, "memory_budget": memory_budget,
                                 "extent_bytes": figures.extent_bytes, "live_peak_bytes": figures.live_peak_bytes}))


def load(path):
    """The SavedPlan in a file.  Raises UserError with all that is wrong with it."""
    raw = read_object(path, AGAIN)
    _expect(path, "", raw, {"model": {}, "run": {}} | dict.fromkeys(COUNTS, 0))
    _expect(path, "model.", raw["model"], dict.fromkeys(SIZES, 0) | dict.fromkeys(SIZES[-2:], True))
    defaults = {field.name: field.default for field in fields(RunConfig) if field.name not in UNPLANNED}
    _expect(path, "run.", raw["run"], defaults | {"keep": ("x",), "layers": (0,)})
    run = {name: tuple(value) if isinstance(value, list) else value for name, value in raw["run"].items()}
    try:
        RunConfig(**run)
    except UsageError as error:
        raise UserError(f"{path}: {error.message.removeprefix('--')}", AGAIN) from None
    return SavedPlan(str(path), raw["model"], run, *[raw[name] for name in COUNTS])


def _expect(path, where, found, patterns):
    """Refuse an object that has not just these keys, with values like these."""
    problems = [f"{where}{name} is missing" for name in patterns if name not in found]
    problems += [f"{where}{name} is no key of a plan" for name in found if name not in patterns]
    problems += [f"{where}{name} is {found[name]!r}" for name, pattern in patterns.items()
                 if name in found and not _is_like(pattern, found[name])]
    refuse(path, problems, AGAIN)


def _is_like(pattern, value):
    """Has a value of JSON the type of this one?  A tuple stands for a list of values like its first."""
    if isinstance(pattern, tuple):
        return isinstance(value, list) and all(_is_like(pattern[0], item) for item in value)
    return type(value) is type(pattern) or (type(pattern), type(value)) == (float, int)


def _sizes(config):
    return {name: getattr(config, name) for name in SIZES}
