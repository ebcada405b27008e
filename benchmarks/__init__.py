"""Benchmarks of this project: `python -m benchmarks NAME --json FILE`, from a checkout.

    runner/      race of contenders, paired experiment, record, timing, `show` and `compare`
    kernels/     lookups and training steps against FBGEMM and torch
    sweep/       lookups and steps on workloads drawn from a family, against FBGEMM
    tables/      memory, cache hit rates, capacity of one GPU
    host/        tables in host memory: single steps, and a DLRM end to end
    accuracy/    low precision against fp32, paired by seed
    levers/      fewer rows against all rows, paired by seed
    quality/     int8 rows, bf16 gradients and tiers on two ranks, paired by seed
    plan/        planning time, plan balance, heat profiles
    zoo/         models of other libraries, converted against unconverted, paired by seed
    exchange/    sharded training over shaped network links
    checkpoint/  save, load and crash recovery
    serve/       the server against other servers
    chaos/       the server under faults
    commits/     two checkouts of this project against each other: `python -m benchmarks.commits --old PATH`
    cli/         the command line

`asked.json` lists the required cases, `results/` the recorded runs. A peer may need its own Python environment:
`kernels.worker` and its imports need torch only, so that this folder can be loaded there without thermocline.
"""
