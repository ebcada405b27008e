"""Fields of parts and tables in a row exchange.

FIELDS of a part (the rows of one table in one tier): bytes and meta words of a row; offsets of codes (bytes), meta (words) and
rows of the part in the arena of this rank; columns and format; bytes of a gradient's column in a message.

MAP_FIELDS of a table: first global row and end; the rank that owns the whole table, or -1; rows of tier 3; which rows have
copies, and which of those are on every rank (NONE, SOME by a bitmap, ALL); the two bitmaps, words and counts; rotations of
blocks, and bytes of one; the bits of its rows of tier 3; the numbers of its parts of tiers 1, 2 and 3.

Routes of the rows of a part: none; to the owner; to the rank of this node with the owner's local rank; or to the rank of the
owner's node with this rank's local rank, where the ranks of a group are counted by node.
"""

from __future__ import annotations

FIELDS = ROW_BYTES, WORDS, CODES, META, ROW, DIM, FORMAT, GRADIENT = tuple(range(8))
MAP = FIRST, END, OWNER, COLD, COPIED, EVERYWHERE, WORDS2, BELOW2, WORDS1, BELOW1, TURNS, TURN, BITS, PART = tuple(range(14))
MAP_FIELDS = len(MAP) + 2
NONE, SOME, ALL = range(3)
NOWHERE, STRAIGHT, SAME_NODE, OTHER_NODES = range(4)
