"""Speed and memory of `trueup explain`, the command as a user runs it, over a generated parquet dump.

    python bench/explain_speed.py --tokens 200000000 --out DIR --repeats 3

DIR takes about 10 bytes a token and is left there (delete it). Prints tokens a second of wall time and of CPU time, the
largest resident memory of the process, and the seconds from start to verdict on a small dump of 64 responses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def generate(folder: Path, tokens: int, length: int, rows_a_file: int = 4096) -> None:
    """Healthy bf16 rollouts, a file a step: responses of length/2 to 3 length/2 tokens, until there are `tokens`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    number = 0
    while tokens > 0:
        lengths = rng.integers(length // 2, length * 3 // 2, rows_a_file)
        lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
        pq.write_table(table(rng, lengths, number), folder / f"step-{number:06d}.parquet", compression="zstd")
        tokens -= int(lengths.sum())
        number += 1


def table(rng: np.random.Generator, lengths: np.ndarray, step: int) -> pa.Table:
    count, rows = int(lengths.sum()), len(lengths)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    mu = -(rng.exponential(0.6, count).astype(np.float32) ** 2)
    size = (-0.03 * np.expm1(mu)).astype(np.float32)
    pi = mu + size * rng.standard_normal(count, np.float32) - size**2 / 2  # so that E[rho] = 1
    ragged = lambda values: pa.ListArray.from_arrays(offsets, pa.array(values))  # noqa: E731
    return pa.table(
        {
            "response_ids": ragged(rng.integers(0, 150_000, count).astype(np.int32)),
            "sampler_logprobs": ragged(mu),
            "learner_logprobs": ragged(pi),
            "loss_mask": ragged(np.ones(count, bool)),
            "sampler_version": ragged(np.full(count, step, np.int32)),
            "learner_version": pa.array(np.full(rows, step, np.int32)),
            "step": pa.array(np.full(rows, step, np.int32)),
            "group": pa.array(np.arange(rows, dtype=np.int32) // 8),
            "engine": pa.array(["vllm:bf16"] * rows),
        }
    )


def run(dump: Path) -> tuple[dict, float, float, float]:
    """`trueup explain DUMP --json` in a process of its own -> verdict, wall seconds, CPU seconds, peak bytes."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "trueup.cli", "explain", str(dump), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"trueup explain {dump} exited with {process.returncode}")
    return json.loads(said), time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    large, small = arguments.out / "large", arguments.out / "small"
    if not arguments.out.exists():
        generate(large, arguments.tokens, arguments.length)
        generate(small, 64 * 128, 128)
    size = sum(path.stat().st_size for path in large.iterdir())
    files = len(list(large.iterdir()))
    for name, dump in (("large", large), ("small", small)):
        walls, cpus, peaks = [], [], []
        for _ in range(arguments.repeats):
            verdict, wall, cpu, peak = run(dump)
            walls, cpus, peaks = [*walls, wall], [*cpus, cpu], [*peaks, peak]
        tokens = verdict["stats"]["tokens"]
        print(f"{name}: {tokens:,} tokens" + (f" in {files} files of {size / 1e9:.2f} GB" if name == "large" else ""))
        print(f"  seconds: {min(walls):.2f} least, {statistics.median(walls):.2f} median of {len(walls)}")
        print(f"  CPU seconds: {min(cpus):.2f} least, {statistics.median(cpus):.2f} median")
        for label, seconds in (("second", walls), ("CPU second", cpus)):
            print(
                f"  tokens a {label}: {tokens / min(seconds):,.0f} best, {tokens / statistics.median(seconds):,.0f} median"
            )
        print(f"  {max(peaks) / 1e6:,.0f} MB at most, healthy: {verdict['healthy']}")


if __name__ == "__main__":
    main()
