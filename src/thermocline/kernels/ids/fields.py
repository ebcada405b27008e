"""The numbers that say how the ids of a feature become rows: one row of a small int64 tensor for each feature.

    START         ANY: the id as it is; WITHIN: it must be 0 to START_ROWS - 1; HASHED: hashed to START_ROWS rows
    KEPT          ALL: the number so far is the row. SORTED, BITMAP: ids that are kept have the row of their rank among them,
                  others a hashed one of OTHERS rows that follow
    FIRST         added to the row at the end: where the feature's rows begin in its table

Kept ids are named in one of two ways. SORTED: `KEPT_COUNT` ids in rising order, in `words` from PLACE on. BITMAP: bit i of the
words from PLACE on says whether id LOW + i is kept (i counts from the low bits of each word), and `counts` from BLOCK on says
how many are kept before each block of `BLOCK_WORDS` words. LOW and HIGH are the smallest and largest kept id.
"""

from __future__ import annotations

# Of what ids become. Operators carry it, so that graphs which torch.compile keeps on disk end with it; files of maps name it.
VERSION = 1

(
    START, START_ROWS, START_KEY, KEPT, KEPT_COUNT, PLACE, BLOCK, LOW, HIGH, OTHERS, OTHERS_KEY, FIRST,
) = range(12)  # fmt: skip
FIELDS = 12

ANY, WITHIN, HASHED = range(3)
ALL, SORTED, BITMAP = range(3)

BLOCK_WORDS = 8  # 512 bits: one cache line, and a 32-bit count for each makes 1.06 bits an id
