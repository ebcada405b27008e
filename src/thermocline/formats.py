"""The precisions a row can be stored in, as numbers that kernels can branch on.

A row of a table is two things, kept in two arrays of the table:

* its **codes**, `row_bytes(format, dim)` bytes in a `uint8` array, no padding between rows;
* its **meta**, `META_WORDS[format]` 32-bit words in an `int32` array (none for the plain float formats).

Every quantized format has its scale in the top bits of its first meta word. A scale is never negative, so the sign bit of
that word is free in every format alike: it is reserved to say "this row's value lives elsewhere" (the cache).

    format        codes                      meta                                value of a code q
    fp32          4 bytes a column           -                                   as it is
    fp16, bf16    2 bytes a column           -                                   as it is
    fp8           1 byte, e4m3               fp32 scale                          e4m3(q) * scale
    int8          1 byte, -127..127          fp32 scale                          q * scale
    int4          2 columns a byte           bf16 scale (high), bf16 bias (low)  q * scale + bias
    int2          4 columns a byte           bf16 scale (high), bf16 bias (low)  q * scale + bias
    int8_affine   1 byte, 0..255             fp32 scale, fp32 bias (2 words)     q * scale + bias
    int4_affine   2 columns a byte           fp16 scale (high), fp16 bias (low)  q * scale + bias
    int2_affine   4 columns a byte           fp16 scale (high), fp16 bias (low)  q * scale + bias

The `_affine` formats hold exactly what torch's and FBGEMM's fused row-wise tables hold, so that such tables can be imported bit
for bit and trained on. Sub-byte codes are *planar*: byte j of an int4 row holds column j (low bits) and column j + H (high
bits), H = ceil(dim / 2). A vector load of bytes then becomes whole vectors of columns with a shift and a mask. The rejected
alternative, neighbouring columns in one byte, needs an interleave on every read.
"""

from __future__ import annotations

FP32, FP16, BF16, FP8, INT8, INT4, INT2, INT8_AFFINE, INT4_AFFINE, INT2_AFFINE = range(10)

NAMES = ("fp32", "fp16", "bf16", "fp8", "int8", "int4", "int2", "int8_affine", "int4_affine", "int2_affine")
BITS = (32, 16, 16, 8, 8, 4, 2, 8, 4, 2)
META_WORDS = (0, 0, 0, 1, 1, 1, 1, 2, 1, 1)

MAX_DIM = 2048

# Fields of one row of a layout tensor (int64, one row for each feature): where the feature's table lies in the arena.
CODES, META, ROW, ELEMENT, ROWS, DIM, FORMAT, COLUMN = range(8)
LAYOUT_FIELDS = 8

# Pooling modes.
SUM, MEAN, MAX, NONE = range(4)
MODES = ("sum", "mean", "max", "none")

# Optimizers of the update kernel.
SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = range(4)
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")

# Fields of the `hyper` tensor (float64). The two powers are beta**step, kept up by `advance`.
LR, EPS, BETA1, BETA2, WEIGHT_DECAY, BETA1_POWER, BETA2_POWER = range(7)
HYPER_FIELDS = 7

# Fields of the `clock` tensor (int64).
SEED, STEP = range(2)
CLOCK_FIELDS = 2

# The cache (see `cache/reference.py`). A first meta word with the sign bit set says "cached", with INT8_SLOT set "in an int8
# slot", and the other bits are the number of the slot.
CACHED, INT8_SLOT, SLOT_BITS = -(1 << 31), 1 << 30, (1 << 30) - 1
EMPTY, DIRTY = -1, 1 << 62  # of the row that a slot remembers

# Staged rows (see `stage/reference.py`): sign bit and bit 30 of the first meta word are set, the low 28 bits name the place. A
# row whose codes are still on their way to it, or on their way back, has one bit more.
STAGED, ARRIVING, LEAVING, PLACE_BITS = -(1 << 30), 1 << 29, 1 << 28, (1 << 28) - 1
SHIFT_CODES, SHIFT_META, FIRST_ROW = range(3)  # fields of one pool at the head of the staging area (int64)
AREA_FIELDS = 3

# Fields of one pool's row of the `counts` tensor of a staging (int64).
NUMBER, FREE, TAKEN, OPEN, OPENED, LEFT, END, WISH, HAND, CHOSEN, SINCE_CHOSEN = range(11)
ROWS_IN, ROWS_OUT, ROWS_THERE, NO_ROOM = range(11, 15)
COUNT_FIELDS = 15
NO_ROW, KEPT = 1 << 30, -1  # in the list of places that are left: with the place, one without a row; one that keeps its row

# How long a staged row was not asked for, in four steps an octave (`ages_of` in `stage/reference.py`). Rows that lie where rows
# leave next have SWEPT added; a place without a row has AGE_EMPTY, or 0 if it is open already.
AGE_SHIFT, AGE_ONE, AGE_TWO, AGE_MOST, SWEPT, AGE_ALL, AGE_EMPTY = 21, 127 << 2, 4, 62, 64, 126, 127
AGES = 128

LRU, LFU, ADAPTIVE, FIXED = range(4)
POLICIES = ("lru", "lfu", "adaptive", "fixed")  # of the last, rows neither come nor go in training

# Fields of one pool's row of the `ledger` tensor (int64). The last three steer the adaptive policy.
SINCE, LOOKUPS, HITS, ADMISSIONS, EVICTIONS, WRITE_BACKS, PROMOTIONS, WINDOW, LINE, EDGE = range(10)
LEDGER_FIELDS = 10


def row_bytes(format: int, dim: int) -> int:
    """Bytes of codes in one row."""
    return (BITS[format] * dim + 7) // 8


def int8_slot_words(dim: int) -> int:
    """32-bit words of an int8 slot: the scale of the row, then its codes."""
    return 1 + (dim + 3) // 4


def planes(format: int) -> int:
    """Columns that share one byte of codes."""
    return max(1, 8 // BITS[format])


def levels(format: int) -> int:
    """The highest code of an affine integer format."""
    return (1 << BITS[format]) - 1
