"""Where should a row's scale lie: in the row, or in an array beside it?

Sums 32 random int8 rows of 128 columns at a time, with the fp32 scale (a) in the last 4 bytes of a 132-byte row, (b) in an
array of its own. Both ask for codes and scale at once. Needs a CUDA GPU: `python benchmarks/metadata_place.py`.
"""

import statistics

import torch
import triton
import triton.language as tl

ROWS, DIM, POOL, BAGS = 32_000_000, 128, 32, 65_536


@triton.jit
def beside(codes, scales, ids, out, POOL: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr):
    bag = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM)
    total = tl.zeros((DIM,), tl.float32)
    for k in range(0, POOL, STEP):
        row = tl.load(ids + bag * POOL + k + tl.arange(0, STEP))
        code = tl.load(codes + row[:, None] * DIM + column[None, :])
        scale = tl.load(scales + row)
        total += tl.sum(code.to(tl.float32) * scale[:, None], 0)
    tl.store(out + bag * DIM + column, total)


@triton.jit
def inside(rows, ids, out, POOL: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr):
    bag = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM)
    total = tl.zeros((DIM,), tl.float32)
    for k in range(0, POOL, STEP):
        row = tl.load(ids + bag * POOL + k + tl.arange(0, STEP))
        code = tl.load(rows + row[:, None] * (DIM + 4) + column[None, :])
        scale = tl.load((rows + row * (DIM + 4) + DIM).to(tl.pointer_type(tl.float32)))
        total += tl.sum(code.to(tl.float32) * scale[:, None], 0)
    tl.store(out + bag * DIM + column, total)


def median_ms(run, sets: int) -> float:
    for i in range(4):
        run(i % sets)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(40)]
    for i, (start, end) in enumerate(marks):
        start.record()
        run(i % sets)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)


def main() -> None:
    codes = torch.randint(-127, 128, (ROWS, DIM), dtype=torch.int8, device="cuda")
    scales = torch.rand(ROWS, device="cuda")
    fused = torch.cat([codes, scales.view(-1, 1).view(torch.int8)], dim=1)
    uniform = [torch.randint(0, ROWS, (BAGS * POOL,), device="cuda") for _ in range(4)]
    skewed = [(torch.rand(BAGS * POOL, device="cuda", dtype=torch.float64) ** 12 * ROWS).long() for _ in range(4)]
    out = torch.empty(BAGS, DIM, device="cuda")
    for name, ids in (("uniform", uniform), ("skewed", skewed)):
        expected = (codes[ids[0][: 64 * POOL]].float() * scales[ids[0][: 64 * POOL], None]).view(64, POOL, DIM).sum(1)
        for step in (8, 16):
            times = {}
            for place, run in (
                ("beside", lambda i, s=step, ids=ids: beside[(BAGS,)](codes, scales, ids[i], out, POOL, DIM, s, num_warps=1)),
                ("inside", lambda i, s=step, ids=ids: inside[(BAGS,)](fused, ids[i], out, POOL, DIM, s, num_warps=1)),
            ):
                times[place] = median_ms(run, 4)
                run(0)
                torch.testing.assert_close(out[:64], expected, rtol=1e-4, atol=1e-3)
            print(f"{name:8} {step:2} rows at once: beside {times['beside']:.4f} ms, inside {times['inside']:.4f} ms")


if __name__ == "__main__":
    main()
