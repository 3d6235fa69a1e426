"""Short runs of mesp-np train, and what they logged."""

import json

from mesp_np.cli import main

FAST = ["--seq", "32", "--batch-size", "2", "--rank", "2", "--threads", "1", "--sample-tokens", "5"]


def train(model, data, run_dir, *flags):
    return main(["train", "--model", model, "--data", data, "--run-dir", str(run_dir), *FAST, *flags])


def log(run_dir):
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
