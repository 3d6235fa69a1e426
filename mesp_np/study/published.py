"""Figures that papers report, in MB: footprints of whole processes, sampled by the operating system.

Source    MeSP, arXiv 2602.13069, tables 1, 2, 3 and 5, with the figures for MeBP that stand beside its own.
          Their app divides bytes by 1024 twice, so an MB there is a MiB.
"""

PEAKS = {                                # (model, seq, rank) -> method -> MB
    ("qwen2.5-0.5b", 256, 8): {"mebp": 360.8, "mesp": 136.2},
    ("qwen2.5-1.5b", 256, 8): {"mebp": 516.2, "mesp": 262.6},
    ("qwen2.5-3b", 256, 8): {"mebp": 637.6, "mesp-store-h": 398.5, "mesp": 368.4},
    ("qwen2.5-0.5b", 128, 8): {"mebp": 252.7, "mesp": 110.7},
    ("qwen2.5-0.5b", 512, 8): {"mebp": 582.4, "mesp": 245.8},
    ("qwen2.5-0.5b", 1024, 8): {"mebp": 1050.3, "mesp": 513.6},
    ("qwen2.5-0.5b", 256, 4): {"mebp": 355.2, "mesp": 132.8},
    ("qwen2.5-0.5b", 256, 16): {"mebp": 372.4, "mesp": 143.5},
    ("qwen2.5-0.5b", 256, 32): {"mebp": 395.8, "mesp": 158.2},
}


def peak(model, seq, rank, method):
    """The reported MB, or None."""
    return PEAKS.get((model, seq, rank), {}).get(method)
