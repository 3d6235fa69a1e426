"""What is computed (ModelConfig) and how (RunConfig).

ModelConfig has the keys of a Hugging Face config.json under their own names (config_json.py
reads them).  RunConfig is the only place where a default stands; the command line reads them here.
"""

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mesp_np.config_json import DEFAULT_POSITIONS, FAMILIES, FLOAT_LIMIT, LARGEST, Quantization, parse
from mesp_np.errors import UsageError, UserError
from mesp_np.json_file import read_object

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a Qwen2 or Llama decoder; field names are the keys of config.json.

    quantization  how the linears and the embedding are stored in an MLX folder; None: plainly
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int = DEFAULT_POSITIONS
    qkv_bias: bool = True            # Qwen2's q, k and v have biases, Llama's have none
    quantization: Quantization | None = None

    @property
    def query_width(self):
        """H*E: columns of q and of the merged heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self):
        """K*E: columns of k and of v."""
        return self.num_key_value_heads * self.head_dim

    def weight_shapes(self):
        """Checkpoint name -> shape of every tensor, in the order of the forward pass.

        Linear weights are (out, in).  A tied model has no lm_head.weight.
        """
        D, F, Q, KV = self.hidden_size, self.intermediate_size, self.query_width, self.key_width
        shapes = {"model.embed_tokens.weight": (self.vocab_size, D)}
        sizes = {"q_proj": (Q, D), "k_proj": (KV, D), "v_proj": (KV, D), "o_proj": (D, Q),
                 "gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (D,)
            for name, size in sizes.items():
                if name == "gate_proj":
                    shapes[prefix + "post_attention_layernorm.weight"] = (D,)
                module = prefix + module_name(name)
                shapes[module + ".weight"] = size
                if self.qkv_bias and name in ("q_proj", "k_proj", "v_proj"):
                    shapes[module + ".bias"] = size[:1]
        shapes["model.norm.weight"] = (D,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, D)
        return shapes

    @classmethod
    def from_folder(cls, folder):
        """Read and check config.json.  Raises UserError naming the file and the key."""
        path = Path(folder) / "config.json"
        if not path.exists():
            raise UserError(f"{path}: not found", "name a folder in Hugging Face form (for `plan` also a preset)")
        return cls.from_json(read_object(path), str(path))

    @classmethod
    def from_json(cls, raw, where="config.json"):
        """Build from the object in config.json.  Raises UserError listing what is wrong or not computed here."""
        return cls(**parse(raw, where))

    def to_json(self):
        """The object of a config.json that transformers 4 and 5 both read, for plainly stored weights."""
        family = "qwen2" if self.qkv_bias else "llama"
        raw = {"architectures": [FAMILIES[family]], "model_type": family, "hidden_act": "silu",
               "attention_dropout": 0.0, "torch_dtype": "bfloat16"} | asdict(self)
        return {key: value for key, value in raw.items() if key not in ("qkv_bias", "quantization")}


def module_name(projection):
    """`q_proj` -> `self_attn.q_proj`, `up_proj` -> `mlp.up_proj`."""
    part = "self_attn" if projection in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return f"{part}.{projection}"


def _preset(hidden, intermediate, layers, heads, kv_heads, vocab=151936, tied=True, theta=1e6):
    return ModelConfig(vocab, hidden, intermediate, layers, heads, kv_heads, hidden // heads, 1e-6, theta, tied)


PRESETS = {
    "qwen2.5-0.5b": _preset(896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _preset(1536, 8960, 28, 12, 2),
    "qwen2.5-3b": _preset(2048, 11008, 36, 16, 2),
    "qwen2.5-7b": _preset(3584, 18944, 28, 28, 4, vocab=152064, tied=False),
    "tiny": replace(_preset(128, 352, 5, 8, 2, vocab=1024, theta=1e4), max_position_embeddings=512),
}


@dataclass(frozen=True)
class RunConfig:
    """How a step is computed.  Everything here decides bytes, bits or both."""

    method: str = "mesp-lean"
    keep: tuple = ()                 # names kept in a block instead of the method's own
    batch_size: int = 4
    seq: int = 256                   # tokens in a row, at most
    rank: int = 8
    alpha: float = 16.0
    rslora: bool = False
    dropout: float = 0.0             # of an adapter's input, in training only
    targets: tuple = PROJECTIONS
    layers: tuple = ()               # layers that get adapters, from the front or (negative) the back; empty: all
    trainable: str = "lora"          # or full; none when nothing is trained
    loss: str = "vocab:1024"         # rows[:C], vocab[:C] or full
    update: str = "after"            # or fused
    optimizer: str = "adamw"         # or sgd
    weight_decay: float = 0.01
    betas: tuple = (0.9, 0.999)
    adam_eps: float = 1e-8
    clip: float = 0.0                # global norm; 0: off
    grad_accumulation: int = 1
    mezo_eps: float = 1e-3
    probes: int = 1
    perturb: str = "copy"            # or inplace: the published scheme
    dtype: str = "float32"           # or float64
    residency: str = "mapped"        # or widened: frozen weights in the run's dtype, in the arena
    compute: str = "full"            # or bf16: inputs of large products rounded to bfloat16
    row_tile: int = 256              # rows that norms, projections and the MLP work on at a time
    stored_layers: int = 0           # the last layers, so many, keep what `store-lean` keeps and are not replayed
    checkpoint_every: int = 1        # layers from one kept block input to the next
    checkpoint_store: str = "ram"    # or bf16 (rounded), or disk (a temporary file)
    threads: int = 1
    seed: int = 0

    def __post_init__(self):
        for name in ("keep", "targets", "layers", "betas"):
            object.__setattr__(self, name, tuple(getattr(self, name)))           # a list will do as well
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)!r}",
                                 f"choose from {', '.join(allowed)}")
        self._within(("batch_size", "seq", "rank", "grad_accumulation", "probes", "threads", "row_tile",
                      "checkpoint_every"),
                     lambda value: 1 <= value < LARGEST, f"1 or more, and below {LARGEST:,}")
        self._within(("stored_layers",), lambda value: 0 <= value < LARGEST, f"0 or more, and below {LARGEST:,}")
        self._within(("seed", "clip", "weight_decay"),
                     lambda value: 0 <= value < FLOAT_LIMIT, f"0 or more, and below {FLOAT_LIMIT:g}")
        self._within(("alpha", "mezo_eps", "adam_eps"),
                     lambda value: 0 < value < FLOAT_LIMIT, f"a positive number below {FLOAT_LIMIT:g}")
        self._within(("dropout",), lambda value: 0 <= value < 1, "0 or more, and below 1")
        unknown = [name for name in self.targets if name not in PROJECTIONS]
        if unknown or not self.targets:
            raise UsageError(f"--targets names {', '.join(unknown) or 'nothing'}",
                             f"choose from {', '.join(PROJECTIONS)}")
        if self.update == "fused" and (self.clip or self.grad_accumulation > 1):
            raise UsageError("--update fused cannot go with --clip or --grad-accumulation",
                             "both need all gradients before the first update")
        if self.compute == "bf16" and self.dtype == "float64":
            raise UsageError("--compute bf16 cannot go with --dtype float64", "rounded products are summed in float32")
        if self.perturb == "inplace" and self.probes > 1:
            raise UsageError("--perturb inplace cannot go with --probes", "the published scheme uses one probe")
        self.loss_tile()

    def _within(self, names, right, expected):
        for name in names:
            if not right(getattr(self, name)):
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}", f"it must be {expected}")

    @property
    def scale(self):
        """The factor on an adapter's output: alpha / R, or alpha / sqrt(R)."""
        return self.alpha / (self.rank ** 0.5 if self.rslora else self.rank)

    def adapted_layers(self, count):
        """The indices of the layers with adapters, in a model of `count` layers; from the back, as many as there are.

        Raises UsageError for layers that it has not.
        """
        wrong = [index for index in self.layers if index >= count]
        if wrong:
            raise UsageError(f"--layers names {', '.join(map(str, wrong))}", f"the model has layers 0 to {count - 1}")
        return frozenset(index % count for index in self.layers or range(count) if index >= -count)

    def loss_tile(self):
        """(variant, size): rows and C rows, or vocab and C tokens; full is all rows at once (size 0)."""
        variant, _, size = self.loss.partition(":")
        defaults = {"rows": 32, "vocab": 1024, "full": 0}
        wrong = size if variant == "full" else not re.fullmatch("([1-9][0-9]*)?", size)
        if variant not in defaults or wrong:
            raise UsageError(f"--loss is {self.loss!r}", "write rows, rows:64, vocab, vocab:1024 or full")
        return variant, int(size or defaults[variant])


CHOICES = {"trainable": ("lora", "full", "none"), "update": ("after", "fused"), "optimizer": ("adamw", "sgd"),
           "perturb": ("copy", "inplace"), "dtype": ("float32", "float64"), "residency": ("mapped", "widened"),
           "compute": ("full", "bf16"), "checkpoint_store": ("ram", "bf16", "disk")}
