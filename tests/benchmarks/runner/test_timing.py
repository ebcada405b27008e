"""How times become numbers; no test here looks at a clock."""

from __future__ import annotations

from benchmarks.runner.timing import Times, cpu_chunk, enough, interleave, quantile


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.25) == 2.5
    assert quantile([7.0], 0.9) == 7.0


def test_spread_is_relative_to_the_median() -> None:
    times = Times([float(i) for i in range(11)], [])
    assert times.median == 5.0
    assert times.spread == 8.0 / 5.0


def test_contenders_take_turns_and_the_order_turns_around() -> None:
    order: list[str] = []

    def chunk(name: str, ms: float):  # type: ignore[no-untyped-def]
        def run(iterations: int) -> list[float]:
            order.append(name)
            return [ms] * iterations

        return run

    times = interleave({"a": chunk("a", 1.0), "b": chunk("b", 2.0)}, 3, {"a": 4, "b": 2})
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert len(times["a"].all) == 12 and len(times["b"].all) == 6
    assert times["b"].rounds == [2.0, 2.0, 2.0]


def test_a_chunk_rotates_over_its_inputs_and_drops_what_warms_up() -> None:
    seen: list[int] = []
    taken = cpu_chunk(seen.append, [0, 1, 2], warm=1)(5)
    assert len(taken) == 5
    assert seen == [0, 1, 2, 0, 1, 2]


def test_iterations_fill_their_time_within_bounds() -> None:
    assert enough([2.0, 2.0], 100.0, 4, 100) == 50
    assert enough([1000.0], 100.0, 4, 100) == 4
    assert enough([0.0], 100.0, 4, 100) == 100
