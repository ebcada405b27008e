"""Numbers by which an exchange knows what it moves, and from where to where.

FIELDS of a part, which is the rows of one table in one tier: bytes and meta words of a row; where codes (bytes), meta (words)
and rows of the part begin in the arena of this card; columns and format; bytes of a gradient's column as it travels.

MAP_FIELDS of a table: its first global row and the one after its last; the card that holds it whole, or -1; rows of tier 3;
which rows have copies, and which of these lie on every card (NONE, SOME: a bitmap says, ALL); the two bitmaps, words and
counts; turns of blocks, and bytes of one; the numbers of its parts of tiers 1, 2 and 3.

Ways: where the rows of a part go from here. Nowhere; straight to their home; to the card of this node with the home's number;
or to the card of the home's node with this card's number, where the cards of a group are counted by node.
"""

from __future__ import annotations

FIELDS = ROW_BYTES, WORDS, CODES, META, ROW, DIM, FORMAT, GRADIENT = tuple(range(8))
MAP = FIRST, END, CARD, COLD, COPIED, EVERYWHERE, WORDS2, BELOW2, WORDS1, BELOW1, TURNS, TURN, PART = tuple(range(13))
MAP_FIELDS = len(MAP) + 2
NONE, SOME, ALL = range(3)
NOWHERE, STRAIGHT, SAME_NODE, OTHER_NODES = range(4)
