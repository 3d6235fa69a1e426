"""Reading a config.json: what the model is, in the layouts of transformers 4 and 5 and of MLX.

Everything that is wrong, or not computed exactly here, is told at once.  null is as good as
absent.  The base of the rotary embedding has no default: programs differ in theirs, and a wrong
one gives fluent nonsense.

    rope_theta       inside rope_scaling (transformers 4) or rope_parameters (5), else at the top
    quantization     MLX's: {"bits": 4, "group_size": 64, "mode": "affine"}, and perhaps exceptions
                     by module, {"model.embed_tokens": {"bits": 8, "group_size": 32}, "lm_head": false};
                     quantization_config says the same again, or names what is not read here

Source    transformers, configuration_utils.py and modeling_rope_utils.py; mlx-lm, utils.py
"""

from dataclasses import dataclass

from mesp_np.errors import refuse
from mesp_np.ops.quant import BITS, GROUPS

FAMILIES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}       # q, k and v have biases in the first only
OFF = ("use_sliding_window", "attention_bias", "mlp_bias")                  # not computed when on
LARGEST = 1 << 24                # above any size of a model or a run
FLOAT_LIMIT = 1e38               # what float32 holds
DEFAULT_POSITIONS = 32768        # max_position_embeddings decides no number, only how far generation goes


@dataclass(frozen=True)
class Quantization:
    """How the linears and the embedding of an MLX folder are stored: as codes of `bits`, in groups.

    overrides  (module, (bits, group_size) or None for a plain one), ...
    """

    bits: int
    group_size: int
    overrides: tuple = ()

    def of(self, name):
        """(bits, group_size) of a matrix such as model.layers.0.mlp.up_proj.weight; None when it is to be plain."""
        return dict(self.overrides).get(name.removesuffix(".weight"), (self.bits, self.group_size))


def parse(raw, where):
    """Field of ModelConfig -> value.  Raises UserError listing every problem of the object `raw`."""
    keys = Keys(raw)
    family = keys.one_of("model_type", FAMILIES)
    keys.one_of("hidden_act", ("silu",), "silu")
    for key in OFF:
        keys.one_of(key, (False,), False)
    layers = keys.get("layer_types", [])
    if not isinstance(layers, list) or any(kind != "full_attention" for kind in layers):
        keys.wrong("layer_types", layers, "a list of full_attention")
    fields = _sizes(keys) | {
        "rms_norm_eps": keys.positive("rms_norm_eps", keys.get("rms_norm_eps")), "rope_theta": _rope_theta(keys),
        "tie_word_embeddings": keys.one_of("tie_word_embeddings", (False, True), False),
        "qkv_bias": family == "qwen2", "quantization": _quantization(keys)}
    refuse(where, keys.problems, "this engine cannot compute such a model")
    return fields


class Keys:
    """An object's keys, null taken as absent; what is wrong with them is collected, each mistake once."""

    def __init__(self, raw):
        self.raw = {key: value for key, value in raw.items() if value is not None}
        self.problems = []

    def get(self, key, default=None):
        return self.raw.get(key, default)

    def wrong(self, key, value, expected):
        self.problems.append(f"{key} is {'not there' if value is None else repr(value)}, expected {expected}")

    def one_of(self, key, allowed, default=None):
        value = self.get(key, default)
        if not any(value is choice or (value == choice and type(value) is str) for choice in allowed):
            self.wrong(key, value, " or ".join(str(choice).lower() for choice in allowed))
        return value

    def whole(self, key, default=None):
        value = self.get(key, default)
        if type(value) is not int or not 0 < value < LARGEST:
            self.wrong(key, value, f"a positive whole number below {LARGEST:,}")
        return value

    def positive(self, key, value):
        if type(value) not in (int, float) or not 0 < value < FLOAT_LIMIT:
            return self.wrong(key, value, f"a positive number below {FLOAT_LIMIT:g}")
        return float(value)


def _sizes(keys):
    """Field -> size; heads that do not go together are told only when each size is right in itself."""
    sizes = {key: keys.whole(key) for key in
             ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    if keys.problems:
        return sizes
    heads = sizes["num_attention_heads"]
    for key, default in (("num_key_value_heads", heads), ("head_dim", sizes["hidden_size"] // heads),
                         ("max_position_embeddings", DEFAULT_POSITIONS)):
        sizes[key] = keys.whole(key, default)
    if not keys.problems and heads % sizes["num_key_value_heads"]:
        keys.wrong("num_attention_heads", heads, f"a multiple of num_key_value_heads {sizes['num_key_value_heads']}")
    if not keys.problems and sizes["head_dim"] % 2:
        keys.wrong("head_dim", sizes["head_dim"], "an even number")
    return sizes


def _rope_theta(keys):
    found = {"rope_theta": keys.get("rope_theta")}
    for key in ("rope_parameters", "rope_scaling"):
        block = keys.get(key, {})
        if not isinstance(block, dict):
            return keys.wrong(key, block, "an object")
        kind = block.get("rope_type", block.get("type", "default"))
        if kind != "default":
            return keys.wrong(f"{key}: rope type", kind, "default")
        found |= {name: value for name, value in block.items() if value is not None}
    if found.get("partial_rotary_factor", 1) != 1:
        keys.wrong("partial_rotary_factor", found["partial_rotary_factor"], "1")
    return keys.positive("rope_theta", found["rope_theta"])


def _quantization(keys):
    key = "quantization" if keys.get("quantization") else "quantization_config"
    block = keys.get(key)
    if not block:
        return None
    if not isinstance(block, dict):
        return keys.wrong(key, block, "an object")
    foreign = [str(block[name]) for name in ("quant_method", "quant_algo", "bnb_4bit_quant_type") if block.get(name)]
    if foreign or block.get("mode", "affine") != "affine":
        keys.problems.append(f"{key}: the weights are quantised by {' '.join(foreign) or block['mode']}, "
                             "only MLX's affine mode is read")
        return None
    overrides = tuple((name, _grouping(keys, f"{key} of {name}", value)) for name, value in block.items()
                      if name not in ("bits", "group_size", "mode") and value is not True)
    return Quantization(*_grouping(keys, key, block), overrides)


def _grouping(keys, where, block):
    """(bits, group_size) of an object of `quantization`; None for false: a plain module."""
    if block is False:
        return None
    if not isinstance(block, dict) or block.get("mode", "affine") != "affine":
        return keys.wrong(where, block, "bits and group_size, or false")
    bits, group = block.get("bits"), block.get("group_size")
    if (type(bits), type(group)) != (int, int) or bits not in BITS or group not in GROUPS:
        keys.problems.append(f"{where}: bits {bits!r} and group_size {group!r}, expected bits 4 or 8 and "
                             f"group_size {', '.join(map(str, GROUPS))}")
    return bits, group
