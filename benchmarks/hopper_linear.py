"""What fixed splits cost on Hopper: the product kernel against XLA's dot, in one run.

    python benchmarks/hopper_linear.py --json hopper_linear.json

Kernel times by CUPTI, median of 20 launches; ratios are taken inside the run.
"""

import functools
import json
import statistics
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from jax.experimental.mosaic.gpu import profiler
from rich.console import Console
from rich.table import Table

from pallas_kernels.linear.hopper import HopperSchedule, product

SHAPES = [
    (8192, 4096, 2048),
    (8192, 2048, 8192),
    (1024, 4096, 2048),
    (64, 4096, 2048),
    (16, 2048, 8192),
    (16, 2048, 248320),
]
WIDE = [HopperSchedule(), HopperSchedule(2, 128, 64, 4, (0, 4)), HopperSchedule(2, 128, 64, 4, (1, 8))]
# Two 128 x 128 tiles, whose sums fill the registers: for one split.
TALL = [HopperSchedule(2, 128, 64, 4, snake, 128) for snake in ((0, 2), (0, 4), (0, 8), (1, 4), (1, 8), (1, 16))]
NARROW = [HopperSchedule(1, 16, 256, 5), HopperSchedule(1, 16, 128, 10), HopperSchedule(1, 32, 128, 8),
          HopperSchedule(1, 32, 256, 4), HopperSchedule(1, 64, 64, 8), HopperSchedule(1, 64, 128, 6),
          HopperSchedule(1, 64, 256, 3)]  # fmt: skip


def main(json_path: Annotated[Path, typer.Option("--json")] = Path("hopper_linear.json")) -> None:
    rows = []
    for m, k, n in SHAPES:
        x, w = (jax.random.normal(jax.random.key(i), (d, k), jnp.bfloat16) for i, d in enumerate((m, n)))
        stock = _microseconds(lambda x, w: jnp.dot(x, w.T), x, w)
        for splits in (1, 8):
            chosen = HopperSchedule.for_shape(m, n, splits, jnp.dtype("bfloat16"))
            times = {}
            for schedule in NARROW if m <= 64 else WIDE + TALL * (splits == 1):
                call = functools.partial(product, num_splits=splits, dtype=jnp.dtype("bfloat16"), schedule=schedule)
                try:
                    times[str(schedule)] = _microseconds(call, x, w)
                except Exception as error:  # A schedule that does not fit is a row of the table, not an end.
                    times[str(schedule)] = float("inf")
                    print(schedule, type(error).__name__, str(error)[:200])
            best = min(times, key=times.get)
            rows.append({"rows": m, "depth": k, "columns": n, "num_splits": splits, "microseconds": times[best],
                         "xla": stock, "ratio": times[best] / stock, "schedule": best,
                         "chosen": times[str(chosen)] / stock, "all": times})  # fmt: skip
    table = Table("shape", "splits", "us", "XLA us", "ratio", "chosen", "schedule")
    for r in rows:
        shape = f"{r['rows']}x{r['depth']}->{r['columns']}"
        times = (f"{r['microseconds']:.1f}", f"{r['xla']:.1f}", f"{r['ratio']:.2f}", f"{r['chosen']:.2f}")
        table.add_row(shape, str(r["num_splits"]), *times, r["schedule"])
    Console(width=160).print(table)
    machine = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    json_path.write_text(json.dumps(machine | {"rows": rows}, indent=1))


def _microseconds(fn, *args) -> float:
    _, times = profiler.measure(jax.jit(fn), iterations=20)(*args)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    typer.run(main)
