"""The race of profiling against a bare count: that both count the same, not who wins."""

from __future__ import annotations

from pyarrow import parquet

from benchmarks.plan.heat_profile import throughput, write_synthetic
from thermocline.heat.log_files import profile_files


def test_a_row_has_both_times_and_what_was_counted(tmp_path):
    path = tmp_path / "log.parquet"
    columns = write_synthetic(path, 4_001, seed=1)
    row = throughput(path, columns, runs=2)
    table = parquet.read_table(path)
    listed = table["bags"].combine_chunks().flatten()
    assert row["lookups"] == 2 * 4_001 + len(listed)
    assert row["ours"] > 0 and row["ratio"] == row["peer_value"] / row["ours"] and row["runs"] == 2
    heat = profile_files([path], columns)
    assert heat["few"].distinct == len(table["few"].unique()) and heat["bags"].distinct == len(listed.unique())
    assert heat["many"].ids_H.min() < 0  # raw ids of 64 bits


def test_the_same_seed_writes_the_same_log(tmp_path):
    for name in "ab":
        write_synthetic(tmp_path / name, 1_003, seed=5)
    assert parquet.read_table(tmp_path / "a").equals(parquet.read_table(tmp_path / "b"))
