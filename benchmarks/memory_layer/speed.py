"""The contender of `memory_layer`: one GPT, and memory tables that its training steps look up.

The network is compiled once. It is given the vectors of its tokens, so every arm runs the same code: "none" gives it a fixed
tensor that requires a gradient. An arm looks up 16 rows a token, and its backward updates them. Arms take turns, a stretch
of steps each, after their caches have settled in steps of the tables alone.

Tokens are drawn independently, by Zipf's law. Text repeats more n-grams: more lookups would find their row in the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import thermocline as tc
from benchmarks.kernels.ids import ZipfSampler
from benchmarks.memory_layer.gpt import GPT, GPTShape, adamw
from benchmarks.runner.isolated_process import Measurement, tried
from benchmarks.runner.lookahead import stretch, wait
from benchmarks.runner.race import cache_work
from benchmarks.runner.timing import quantile
from thermocline.kernels.ngrams import reference
from thermocline.nn import NGramEmbedding, NGramHash

ORDERS, HEADS = (2, 3), 8
AUTOCAST = torch.bfloat16


class WrongMemory(Exception):
    """A check before timing failed."""


def make_memory(arm: dict[str, Any], shape: GPTShape, device: str) -> NGramEmbedding:
    rows = tc.RowConfig(arm["precision"], cache=arm["cache"], residency=arm["residency"], optimizer=tc.RowwiseAdagrad(lr=0.02))
    ngrams = NGramHash(arm["rows"], shape.vocabulary, ORDERS, HEADS)
    torch.manual_seed(5)  # of the initial rows
    return NGramEmbedding(ngrams, arm["dim"], rows=rows, device=device)


class Training:
    """A network, its optimizer, and steps with or without a memory."""

    def __init__(self, shape: GPTShape, width: int, device: str, compiled: bool) -> None:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        self.shape, self.device = shape, device
        self.model = GPT(shape, width).to(device)
        self.run: Callable[..., Tensor] = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.optimizer = adamw(self.model, 3e-4, device)
        self.fixed = torch.randn(shape.batch, shape.length, width, device=device, dtype=AUTOCAST).mul_(1e-3).requires_grad_()
        self.generator = torch.Generator(device).manual_seed(1)
        self.zipf = ZipfSampler(shape.vocabulary, self.generator, device)

    def draw(self) -> Tensor:
        """Tokens of a step, and one more in each sequence."""
        at = self.zipf.draw(self.shape.batch * (self.shape.length + 1), self.generator)
        return self.zipf.rows_of_rank[at].view(self.shape.batch, -1)

    def step(self, tokens: Tensor, vectors: Tensor) -> None:
        with torch.autocast(self.device, AUTOCAST):
            loss = self.run(tokens[:, :-1], tokens[:, 1:], vectors)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.fixed.grad = None

    def without(self, this: Any, _: Any) -> None:
        self.step(this, self.fixed.view_as(self.fixed))

    def within(self, memory: NGramEmbedding) -> Callable[[Any, Any], None]:
        def step(this: Any, _: Any) -> None:
            tokens, rows = this
            with torch.autocast(self.device, AUTOCAST):
                vectors = memory(rows)
            self.step(tokens, vectors)

        return step


def inputs_of(tokens: Tensor) -> Tensor:
    return tokens[:, :-1]


class Arm:
    """A memory, with how its batches reach it."""

    def __init__(self, how: dict[str, Any], training: Training) -> None:
        began = time.perf_counter()
        self.how, self.training = how, training
        self.memory = make_memory(how, training.shape, training.device)
        wait(training.device)
        self.built_s = time.perf_counter() - began
        self.step = training.within(self.memory)

    def through(self, batches: list[Tensor]) -> Iterable[Any]:
        """The batches with their rows; those of host memory are prefetched."""
        if self.how["residency"] == "host":
            return self.memory.prefetched(batches, ids=inputs_of)
        return ((tokens, inputs_of(tokens)) for tokens in batches)

    def settle(self, steps: int) -> None:
        """Steps of the table alone, until its cache is in the steady state."""
        shape = self.training.shape
        grad = torch.randn(shape.batch, shape.length, self.memory.width, device=self.training.device).mul_(1e-4).to(AUTOCAST)

        def step(this: Any, _: Any) -> None:
            with torch.autocast(self.training.device, AUTOCAST):
                self.memory(this[1]).backward(grad)

        for _ in range(0, steps, 32):
            stretch(step, self.training.draw, self.training.device, min(32, steps), self.through)

    def sizes(self) -> dict[str, float]:
        memory = self.memory.table.memory()
        parts = {name.replace(" ", "_") + "_bytes": float(size) for name, size in memory.parts.items()}
        return {"card_bytes": memory.total - memory.host, "host_bytes": memory.host, "built_s": self.built_s, **parts}


# -- checks -----------------------------------------------------------------------------------------------------------


def check(arm: dict[str, Any], shape: GPTShape, device: str) -> None:
    """Raise unless rows and vectors are those of the definition, and prefetched rows in host memory train to the same bits."""
    small = {**arm, "rows": 4099, "cache": 0.1}
    one, other = (make_memory({**small, "residency": residency}, shape, device) for residency in ("device", "host"))
    zipf = ZipfSampler(shape.vocabulary, torch.Generator(device).manual_seed(2), device)
    draws = torch.Generator(device).manual_seed(3)
    batches = [zipf.rows_of_rank[zipf.draw(64 * 9, draws)].view(64, 9) for _ in range(12)]
    ngrams = one.ngrams
    rows = reference.ngram_rows(*ngrams.arrays(device), batches[0], ngrams.orders, ngrams.vocabulary, ngrams.part)
    if not torch.equal(ngrams(batches[0]), rows):
        raise WrongMemory("rows of n-grams differ from their definition")
    with torch.autocast(device, AUTOCAST):
        vectors = one(batches[0])
    stored = one.table.get_rows("ngrams", rows.reshape(-1)).to(AUTOCAST).view(vectors.shape)
    if not torch.equal(vectors.detach(), stored):
        raise WrongMemory("vectors differ from the rows of the table")
    grads = torch.Generator(device).manual_seed(4)
    for tokens, ahead in other.prefetched(batches, at_once=4):
        grad = torch.randn(vectors.shape, generator=grads, device=device).to(AUTOCAST)
        with torch.autocast(device, AUTOCAST):
            one(tokens).backward(grad)
            other(ahead).backward(grad)
    if torch.equal(one.table.get_rows("ngrams", rows.reshape(-1)).to(AUTOCAST).view(vectors.shape), stored):
        raise WrongMemory("training changed no row")
    if not torch.equal(one.table.get_rows("ngrams"), other.table.get_rows("ngrams")):
        raise WrongMemory("prefetched rows in host memory were trained to other values")


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(job: dict[str, Any]) -> Iterator[Measurement]:
    """Check the arms; time steps of all of them in turn; then time decoding with those in host memory."""
    shape, device, start = GPTShape(**job["shape"]), job["device"], time.perf_counter()
    if device == "cpu":
        torch.set_num_threads(1)
    for how in job["arms"]:
        check(how, shape, device)
    training = Training(shape, job["arms"][0]["dim"] * len(ORDERS) * HEADS, device, job["compiled"])
    began = time.perf_counter()
    stretch(training.without, training.draw, device, 4)
    yield {
        "name": "network",
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "warm_up_s": _since(began, device),
    }
    yield {"name": "vector gradient", "ms": _vector_gradient(training, device)}
    arms: dict[str, Arm] = {}
    for how in job["arms"]:
        found = tried(how["name"], lambda how=how: _ready(how, training, arms, job["settle"]))  # type: ignore[misc]
        if "error" in found:
            yield found
    yield from _raced(training, arms, job, start + job["race_until_s"])
    if job["decode"]:
        peer = UvaGather(job["peer_rows"], job["arms"][0]["dim"], device)
        for arm in arms.values():
            for tokens in job["decode"] if arm.how["residency"] == "host" else ():
                yield from _decoded(arm, peer, tokens, job)


def _ready(how: dict[str, Any], training: Training, arms: dict[str, Arm], settle: int) -> Measurement:
    arm = Arm(how, training)
    arm.settle(settle)
    arms[how["name"]] = arm
    return {}


def _raced(training: Training, arms: dict[str, Arm], job: dict[str, Any], deadline: float) -> Iterator[Measurement]:
    """Stretches of steps of every arm in turn, with the order reversed in every second round; fewer rounds if time runs out."""
    device, none = job["device"], "none"
    taken: dict[str, list[list[float]]] = {name: [] for name in (none, *arms)}
    before = {name: arm.memory.table.stats() for name, arm in arms.items()}
    for turn in range(job["rounds"] + 1):  # the first is not timed
        if turn > 2 and time.perf_counter() > deadline:
            break
        for name in list(taken) if turn % 2 else list(taken)[::-1]:
            if name == none:
                ms = stretch(training.without, training.draw, device, job["steps"])
            else:
                ms = stretch(arms[name].step, training.draw, device, job["steps"], arms[name].through)
            if turn:
                taken[name].append(ms)
    for name, rounds in taken.items():
        every = [ms for each in rounds for ms in each]
        median = statistics.median(every)
        found = {"name": name, "ms": median, "spread": (quantile(every, 0.9) - quantile(every, 0.1)) / median}
        found |= {"rounds": [statistics.median(each) for each in rounds], "tokens_per_s": training.shape.tokens / median * 1e3}
        if name != none:
            table = arms[name].memory.table
            found |= {**cache_work(before[name], table.stats()), **arms[name].sizes()}
        yield found


def _vector_gradient(training: Training, device: str) -> float:
    """Milliseconds of the gradient of the vectors, which a network without a table would not compute: it is in every arm."""
    projection = training.model.projection
    assert projection is not None
    grad = torch.randn(training.shape.tokens, training.shape.width, device=device, dtype=AUTOCAST)
    weight = projection.weight.detach().to(AUTOCAST)
    return statistics.median(stretch(lambda _, __: grad @ weight, lambda: None, device, 16))


def _since(began: float, device: str) -> float:
    wait(device)
    return time.perf_counter() - began


# -- decoding ---------------------------------------------------------------------------------------------------------

Runs = dict[str, tuple[Callable[[Tensor], Any], list[Tensor]]]


def _decoded(arm: Arm, peer: UvaGather, tokens: int, job: dict[str, Any]) -> Iterator[Measurement]:
    """Microseconds of a lookup for some tokens, until the vectors are there: rows in host memory, nothing prefetched."""
    memory, training, name = arm.memory, arm.training, f"decode/{arm.how['name']}/{tokens}"
    copies = -(-tokens // training.shape.batch)
    drawn = [training.draw()[:, -max(ORDERS) :].repeat(copies, 1)[:tokens] for _ in range(job["calls"])]
    rows = [memory.ngrams(last)[:, -1:].contiguous() for last in drawn]
    runs: Runs = {
        "rows": (memory, rows),
        "tokens": (lambda last: memory(last)[:, -1:], drawn),
        "uva": (peer, [each.reshape(-1) % peer.rows for each in rows]),
    }
    yield tried(name, lambda: _timed(runs, training.device))
    if training.device != "cpu":
        yield tried(f"{name}/graph", lambda: _timed(_as_graphs(runs), training.device))


def _timed(runs: Runs, device: str) -> Measurement:
    """Medians of all calls but the first quarter; the contenders take turns."""
    taken: dict[str, list[float]] = {f"{name}_us": [] for name in runs}
    with torch.no_grad(), torch.autocast(device, AUTOCAST):
        for at in range(len(next(iter(runs.values()))[1])):
            for name, (run, inputs) in runs.items():
                wait(device)
                began = time.perf_counter()
                run(inputs[at])
                wait(device)
                taken[f"{name}_us"].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(us[len(us) // 4 :]) for name, us in taken.items()}


def _as_graphs(runs: Runs) -> Runs:
    return {each: (_captured(*runs[each]), runs[each][1]) for each in ("rows", "uva")}


def _captured(run: Callable[[Tensor], Any], inputs: list[Tensor]) -> Callable[[Tensor], Any]:
    """The same lookup as a CUDA graph, whose input is copied first."""
    given, side = inputs[0].clone(), torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    side.wait_stream(torch.cuda.current_stream())
    graph: Any = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.autocast("cuda", AUTOCAST):
        with torch.cuda.stream(side):
            for _ in range(3):
                run(given)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            run(given)

    def replay(now: Tensor) -> None:
        given.copy_(now)
        graph.replay()

    return replay


class UvaGather:
    """What serving stacks write by hand: bf16 rows in pinned memory, read by a kernel over the link."""

    def __init__(self, rows: int, dim: int, device: str) -> None:
        self.rows, self.device = rows, device
        self.table = torch.zeros(rows, dim, dtype=torch.bfloat16, pin_memory=device != "cpu")

    def __call__(self, rows_N: Tensor) -> Tensor:
        if self.device == "cpu":
            return self.table[rows_N]
        from benchmarks.memory_layer.uva import gather_rows

        return gather_rows(self.table, rows_N)
