"""The result of a run as an object of JSON, and as a table in Markdown.

live    the most bytes of a step's tensors at once, as the system's own allocator counts them, adapters included, frozen
        weights not: compare these
taken   what the process grows by within a step, as the operating system counts it, and the adapters
rate    planned FLOPs a second, as a part of the machine's own rate
"""

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil
from threadpoolctl import threadpool_info

ROOT = Path(__file__).parents[2]
COLUMNS = ("system", "agrees to", "median s", "min to max s", "ratio", "of the rate", "live MiB", "taken MiB")


def machine():
    """The machine and what it runs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n") if info.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    blas = [f"{pool['internal_api']} {pool['version']} {pool.get('architecture', '')}".strip()
            for pool in threadpool_info() if pool["user_api"] == "blas"]
    return {"cpu": cpu or platform.processor() or platform.machine(), "cores": os.cpu_count(), "blas": blas,
            "ram_bytes": psutil.virtual_memory().total, "system": f"{platform.system()} {platform.release()}",
            "load_before": psutil.getloadavg()[0]}


def versions():
    """Of this interpreter and what the engine stands on."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("numpy", "numba")}


def commit():
    """The checkout's commit, with `-dirty` behind it when files were changed since; None outside of one."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def command():
    """As it was typed."""
    return " ".join(["python", "tools/bench.py", *sys.argv[1:]])


def summary(seconds):
    """Median, least and most of a list of seconds."""
    return {"median": median(seconds), "min": min(seconds), "max": max(seconds)} if seconds else {}


def complete(result):
    """Add medians, ratios to the baseline's and fractions of the machine's rate to a result's rows."""
    rate, rows = median(result["flops_per_second"]), result["rows"]
    for row in rows.values():
        row |= summary(row["seconds"])
    base = rows.get(result["baseline"], {}).get("median")
    for row in rows.values():
        if base and row["seconds"]:
            row["ratio"] = row["median"] / base
        if "flops" in row and row["seconds"]:
            row["fraction_of_rate"] = row["flops"] / row["median"] / rate
    result["against_two_forwards"] = {
        name: row["median"] / (2 * rows[other]["median"]) for name, row in rows.items()
        if name.endswith(", mezo") and "median" in rows.get(other := name.removesuffix("mezo") + "forward", {})}
    return result


def markdown(result):
    """The table, with what it was measured on above and what is not in it below."""
    place, setting = result["machine"], result["setting"]
    rates = [rate / 1e9 for rate in result["flops_per_second"]]
    lines = [
        f"`{result['command']}`, commit {result['commit']}", "",
        f"{place['cpu']}, {place['cores']} cores, {place['ram_bytes'] / 2**30:.0f} GiB, {', '.join(place['blas'])}; "
        f"sgemm on all of them {median(rates):.1f} GFLOP/s ({min(rates):.1f} to {max(rates):.1f})",
        ", ".join(f"{name} {number}" for name, number in result["versions"].items()), "",
        f"{setting['model']}, batch 1 x {setting['length']}, rank {setting['run']['rank']} on "
        f"{len(setting['run']['targets'])} projections, {setting['run']['threads']} threads, "
        f"{setting['rounds']} rounds, ratios to {result['baseline']}", "",
        "| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|",
        *("| " + " | ".join([name, *_cells(row)]) + " |" for name, row in result["rows"].items()), ""]
    lines += [f"{name}: {ratio:.2f} of two forward passes" for name, ratio in result["against_two_forwards"].items()]
    lines += [f"not run: {name}: {reason}" for name, reason in result["not_run"].items()]
    return "\n".join(lines).strip() + "\n"


def _cells(row):
    once = " (once)" if len(row["seconds"]) == 1 else ""
    return (
        f"{row['difference']:.1e}" if "difference" in row else "-",
        f"{row['median']:.3f}{once}" if row["seconds"] else "-",
        f"{row['min']:.3f} to {row['max']:.3f}" if row["seconds"] else "-",
        f"{row['ratio']:.2f}" if "ratio" in row else "-",
        f"{row['fraction_of_rate']:.0%}" if "fraction_of_rate" in row else "-",
        *(f"{size / 2**20:,.1f}" if size is not None else "-" for size in (row["live"], row["taken"])))
