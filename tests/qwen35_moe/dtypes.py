"""The dtypes of the scored path, region by region; `python -m tests.qwen35_moe.dtypes` writes them anew."""

from pathlib import Path

from isojax.audit import dtype_signature
from pallas_kernels.binding import Ops, bind
from tests.qwen35_moe.programs import Programs

DTYPES = ("float32", "bfloat16")


def golden(dtype: str) -> Path:
    return Path(__file__).with_name(f"dtypes_{dtype}.txt")


def signature(dtype: str, ops: Ops) -> str:
    """A line for every region of the scored forward, in program order, with the floats that go in and come out."""

    def floats(dtypes):
        return " ".join(d for d in dtypes if "float" in d) or "nothing"

    fn, args = Programs("experts", dtype, ops).score()
    return "".join(f"{name}: {floats(a)} -> {floats(b)}\n" for name, a, b in dtype_signature(fn, *args))


if __name__ == "__main__":
    for dtype in DTYPES:
        golden(dtype).write_text(signature(dtype, bind("exact")))
