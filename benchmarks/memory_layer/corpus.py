"""Python sources and documentation installed on this machine, as tokens of a byte-pair encoding that is trained on them.

Files are taken in the order of a hash of their text, equal ones once, until there is enough text; every 25th is held out.
Pairs are merged many at a time (a pass): in a pass no token is the left of one pair and the right of another, so occurrences
never overlap, and a pass is a few tensor operations on a CPU or GPU. Merges stay within words; a word is a run of letters, of
digits, of white space or of signs, letters with the space before them. Token 0 stands between files.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline.errors import BadInput

SUFFIXES = (".py", ".pyi", ".rst", ".md", ".txt")
HELD_OUT = 25  # every so many files
BYTES = 256  # tokens before the first merge
GROWTH = 0.04  # new tokens of a pass, at most, as a share of those there are
LEAST = 0.5  # count of the rarest pair of a pass, as a share of the most frequent
SAMPLE = 24 << 20  # bytes that merges are learned from
PIECE = 64 << 20  # bytes encoded at a time
LONGEST = 1 << 20  # bytes of a file: longer ones are data


class Pass(NamedTuple):
    """Pairs that are merged at once; pair number i becomes token `first + i`."""

    left_P: Tensor
    right_P: Tensor
    first: int


@dataclass(frozen=True)
class Corpus:
    """Tokens of the training and the held-out part, and how many bytes they stand for."""

    train: Tensor
    held_out: Tensor
    vocabulary: int
    train_bytes: int
    held_out_bytes: int
    digest: str

    @property
    def bytes_per_token(self) -> float:
        """Of the held-out part."""
        return self.held_out_bytes / max(1, len(self.held_out))


def folders() -> list[Path]:
    """Where Python sources and documentation usually lie."""
    names = [*(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")), "/usr/share/doc"]
    found = [path.resolve() for path in (*map(Path, names), Path(torch.__file__).parents[1]) if path.is_dir()]
    return [one for one in dict.fromkeys(found) if not any(other in one.parents for other in found)]


def texts(roots: Iterable[Path], most: int) -> Iterator[bytes]:
    """Texts of distinct files in the order of their hashes, at most `most` bytes."""
    names = sorted({path for root in roots for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()})
    known: dict[bytes, Path] = {}
    for path in names:
        if (text := _read(path)) is not None:
            known.setdefault(hashlib.sha1(text).digest(), path)
    taken = 0
    for _, path in sorted(known.items()):
        text = _read(path)
        if text is not None and taken + len(text) <= most:
            taken += len(text)
            yield text


def _read(path: Path) -> bytes | None:
    try:
        if not 0 < path.stat().st_size <= LONGEST:
            return None
        text = path.read_bytes()
    except OSError:
        return None
    return None if b"\0" in text else text


def build(roots: Sequence[Path], tokens: int, vocabulary: int, device: str = "cpu") -> Corpus:
    """Read about as much text as `tokens` tokens need, train the encoding, and encode the text."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    digest = hashlib.sha1()
    for number, text in enumerate(texts(roots, most=5 * tokens)):
        digest.update(text)
        parts[number % HELD_OUT == 0].append(text)
    if not all(parts):
        message = f"{', '.join(map(str, roots))}: too few texts; use folders with at least two of {', '.join(SUFFIXES)}"
        raise BadInput(message, parameter="roots", value=roots)
    sample, size = [], 0
    for text in parts[0]:
        sample.append(text)
        if (size := size + len(text)) > SAMPLE:
            break
    passes = learn(b"\0".join(sample), vocabulary, device)
    encoded = [torch.cat([encode(piece, passes, device).cpu() for piece in _pieces(part)]) for part in parts]
    sizes = [sum(map(len, part)) for part in parts]
    return Corpus(encoded[0], encoded[1], vocabulary, sizes[0], sizes[1], digest.hexdigest()[:12])


def _pieces(parts: list[bytes]) -> Iterator[bytes]:
    piece: list[bytes] = []
    for text in parts:
        piece.append(text)
        if sum(map(len, piece)) >= PIECE:
            yield b"\0".join([*piece, b""])
            piece = []
    if piece:
        yield b"\0".join([*piece, b""])


# -- byte-pair encoding -----------------------------------------------------------------------------------------------


def _start(text: bytes, device: str) -> tuple[Tensor, Tensor]:
    """Bytes as tokens, and whether each continues the word of the one before."""
    kinds = torch.tensor([_kind(byte) for byte in range(BYTES)], dtype=torch.uint8)
    token_N = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).int()
    kind_N = kinds.to(device)[token_N]
    same_N = torch.zeros(len(token_N), dtype=torch.bool, device=device)
    same_N[1:] = (kind_N[1:] == kind_N[:-1]) & (kind_N[1:] != 0)
    one_space_N = (token_N == ord(" ")) & ~same_N
    one_space_N[:-1] &= kind_N[1:] == 1
    same_N[1:] |= one_space_N[:-1]
    return token_N, same_N


def _kind(byte: int) -> int:
    """0 between files, 1 letters, 2 digits, 3 white space, 4 signs."""
    sign = chr(byte)
    tests = (byte == 0, byte >= 128 or sign.isalpha() or sign == "_", sign.isdigit(), sign.isspace(), True)
    return tests.index(True)


def learn(text: bytes, vocabulary: int, device: str = "cpu") -> list[Pass]:
    """Passes up to a number of tokens, or until no pair occurs twice."""
    token_N, same_N = _start(text, device)
    passes: list[Pass] = []
    count = BYTES
    while count < vocabulary:
        inside_N = same_N[1:]
        pair_P, often_P = torch.unique(token_N[:-1][inside_N].long() * vocabulary + token_N[1:][inside_N], return_counts=True)
        most = max(1, min(int(GROWTH * count), vocabulary - count))
        often_P, order_P = often_P.topk(min(4 * most, len(often_P)))
        pairs = _disjoint(pair_P[order_P].tolist(), often_P.tolist(), vocabulary, most)
        if not pairs:
            break
        left_P, right_P = torch.tensor(pairs, dtype=torch.int32, device=device).t().contiguous()
        passes.append(Pass(left_P, right_P, count))
        token_N, same_N = _merge(token_N, same_N, passes[-1], count)
        count += len(pairs)
    return passes


def _disjoint(pairs: list[int], often: list[int], vocabulary: int, most: int) -> list[tuple[int, int]]:
    """The first pairs in which no token is both a left and a right; a doubled token is alone."""
    taken: list[tuple[int, int]] = []
    lefts, rights = set[int](), set[int]()
    for pair, count in zip(pairs, often, strict=True):
        left, right = divmod(pair, vocabulary)
        if count < max(2, LEAST * often[0]) or len(taken) == most:
            break
        if left == right and not taken:
            return [(left, right)]
        if left != right and left not in rights and right not in lefts:
            taken.append((left, right))
            lefts.add(left)
            rights.add(right)
    return taken


def _merge(token_N: Tensor, same_N: Tensor, step: Pass, known: int) -> tuple[Tensor, Tensor]:
    """Replace the pairs of a pass."""
    left_P, right_P, first = step
    is_left, is_right = (torch.zeros(known, dtype=torch.bool, device=token_N.device) for _ in range(2))
    is_left[left_P.long()], is_right[right_P.long()] = True, True
    at_C = (is_left[token_N[:-1]] & is_right[token_N[1:]] & same_N[1:]).nonzero()[:, 0]
    key_P, order_P = (left_P.long() * known + right_P).sort()
    key_C = token_N[at_C].long() * known + token_N[at_C + 1]
    place_C = torch.searchsorted(key_P, key_C).clamp_(max=len(key_P) - 1)
    hit_C = key_P[place_C] == key_C
    at_C, new_C = at_C[hit_C], order_P[place_C[hit_C]]
    if int(left_P[0]) == int(right_P[0]) and len(at_C):  # of a run, every second one
        number_C = torch.arange(len(at_C), device=at_C.device)
        begins_C = torch.ones_like(at_C, dtype=torch.bool)
        begins_C[1:] = at_C.diff() > 1
        even_C = (number_C - torch.where(begins_C, number_C, 0).cummax(0).values) % 2 == 0
        at_C, new_C = at_C[even_C], new_C[even_C]
    token_N = token_N.clone()
    token_N[at_C] = (new_C + first).int()
    kept_N = torch.ones(len(token_N), dtype=torch.bool, device=token_N.device)
    kept_N[at_C + 1] = False
    return token_N[kept_N], same_N[kept_N]


def encode(text: bytes, passes: Sequence[Pass], device: str = "cpu") -> Tensor:
    """Tokens of a text."""
    token_N, same_N = _start(text, device)
    for step in passes:
        token_N, same_N = _merge(token_N, same_N, step, step.first)
    return token_N


def decode(tokens: Tensor, passes: Sequence[Pass]) -> bytes:
    """The text of tokens."""
    parts = [bytes([byte]) for byte in range(BYTES)]
    for left_P, right_P, _ in passes:
        parts += [parts[left] + parts[right] for left, right in zip(left_P.tolist(), right_P.tolist(), strict=True)]
    return b"".join(parts[token] for token in tokens.tolist())
