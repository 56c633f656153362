"""Tokens a second of `trueup explain` over a generated parquet dump, and the memory it takes.

python bench/explain_speed.py --tokens 20000000 --out /tmp/explain-speed
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trueup.explain.verdict import explain


def generate(folder: Path, tokens: int, length: int, rows_a_file: int = 4096) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(max(1, tokens // (length * rows_a_file))):
        lengths = rng.integers(length // 2, length * 3 // 2, rows_a_file)
        count = int(lengths.sum())
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        mu = -(rng.exponential(0.6, count).astype(np.float32) ** 2)
        size = (-0.03 * np.expm1(mu)).astype(np.float32)
        pi = mu + size * rng.standard_normal(count, np.float32) - size**2 / 2  # so that E[rho] = 1
        ragged = lambda values: pa.ListArray.from_arrays(offsets, pa.array(values))  # noqa: E731, B023
        table = pa.table(
            {
                "response_ids": ragged(rng.integers(0, 150_000, count).astype(np.int32)),
                "sampler_logprobs": ragged(mu),
                "learner_logprobs": ragged(pi),
                "loss_mask": ragged(np.ones(count, bool)),
                "sampler_version": ragged(np.full(count, number, np.int32)),
                "learner_version": pa.array(np.full(rows_a_file, number, np.int32)),
                "step": pa.array(np.full(rows_a_file, number, np.int32)),
                "group": pa.array(np.arange(rows_a_file, dtype=np.int32) // 8),
                "engine": pa.array(["vllm:bf16"] * rows_a_file),
            }
        )
        pq.write_table(table, folder / f"step-{number:06d}.parquet", compression="zstd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if not arguments.out.exists():
        generate(arguments.out, arguments.tokens, arguments.length)
    started, cpu = time.perf_counter(), time.process_time()
    verdict = explain([str(arguments.out)])
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    tokens, peak = verdict["stats"]["tokens"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{tokens:,} tokens, {wall:.1f} s, {tokens / wall:,.0f} tokens/s, {tokens / cpu:,.0f} per CPU second,")
    print(f"{peak / 1e6:,.0f} MB at most, healthy: {verdict['healthy']}")


if __name__ == "__main__":
    main()
