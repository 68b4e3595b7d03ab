"""Row-wise regions on Hopper against XLA's own fusion of the same definition, in one run.

    python benchmarks/hopper_rows.py --json hopper_rows.json

Kernel times by CUPTI, median of 20 launches; bytes are those that must be read and written once.
"""

import functools
import json
import statistics
from pathlib import Path
from typing import Annotated

import jax
import typer
from jax.experimental.mosaic.gpu import profiler
from rich.console import Console
from rich.table import Table

from pallas_kernels import mosaic
from tests.gpu.row_cases import CASES, gradient

NAMES = [
    "rms_norm",
    "residual_add",
    "swiglu",
    "output_gate",
    "l2_norm",
    "gated_norm",
    "norm_rope",
    "router",
    "moe_combine",
]
BLOCKS = (1, 2, 4, 8)
ROW_CALL = mosaic.row_call


def main(json_path: Annotated[Path, typer.Option("--json")] = Path("hopper_rows.json")) -> None:
    results = []
    for name in NAMES:
        for count in (16, 8192):
            case, args = CASES[name], CASES[name].arguments(count, "bfloat16")
            stock = _microseconds(case.reference, *args)
            times = {}
            for block in BLOCKS:
                mosaic.row_call = functools.partial(_row_call, block)
                jax.clear_caches()
                times[block] = _microseconds(case.op, *args)
            moved = sum(x.nbytes for x in jax.tree.leaves((args, case.op(*args))))
            results.append({"region": name, "rows": count, "bytes": moved, "xla": stock, "by_block": times})
    mosaic.row_call = ROW_CALL
    jax.clear_caches()
    for name in ("rms_norm", "swiglu"):
        args = CASES[name].arguments(8192, "bfloat16")
        ours, stock = (_microseconds(gradient(f), *args) for f in (CASES[name].op, CASES[name].reference))
        results.append({"region": f"{name} and gradient", "rows": 8192, "xla": stock, "by_block": {1: ours}})
    table = Table("region", "rows", *(f"{b} rows us" for b in BLOCKS), "XLA us", "best to XLA", "GB/s")
    for r in results:
        best = min(r["by_block"].values())
        times = [f"{r['by_block'][b]:.1f}" if b in r["by_block"] else "" for b in BLOCKS]
        speed = f"{r['bytes'] / best / 1e3:.0f}" if "bytes" in r else ""
        table.add_row(r["region"], str(r["rows"]), *times, f"{r['xla']:.1f}", f"{best / r['xla']:.2f}", speed)
    Console(width=130).print(table)
    machine = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    json_path.write_text(json.dumps(machine | {"rows": results}, indent=1))


def _row_call(rows_of_a_program, *args, block, **settings):
    return ROW_CALL(*args, block=rows_of_a_program, **settings)


def _microseconds(fn, *args) -> float:
    """The sum of the kernels of a call."""
    run = jax.jit(lambda *args: fn(*args))
    _, times = profiler.measure(run, iterations=20, aggregate=True)(*args)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    typer.run(main)
