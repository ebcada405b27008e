"""Replacing the embeddings of a model that exists."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn

import thermocline as tc
from support import has, mentions


class Renamed(nn.Embedding):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(31, 6, padding_idx=2)
        self.words = nn.ModuleList([nn.EmbeddingBag(17, 6, mode="sum"), nn.EmbeddingBag(9, 6, include_last_offset=True)])
        self.tied = nn.Embedding(9, 6)
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.tied.weight
        self.normed = nn.Embedding(9, 6, max_norm=1.0)
        self.other = Renamed(9, 6)
        self.frozen = nn.Embedding.from_pretrained(torch.randn(9, 6))

    def forward(self, ids_B: Tensor) -> Tensor:
        both = self.user(ids_B) + self.words[0](ids_B[:, None]) + self.words[1](ids_B, torch.arange(len(ids_B) + 1))
        return self.out(both + self.tied(ids_B) + self.frozen(ids_B))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_embeddings_are_replaced_and_the_model_gives_the_same():
    old, new = model(), model()
    report = tc.convert_(new, tc.RowConfig("fp32"))
    ids_B = torch.tensor([0, 2, 8, 2])
    torch.testing.assert_close(new(ids_B), old(ids_B))
    assert isinstance(new.user, tc.Embedding) and new.user.padding_idx == 2
    assert isinstance(new.words[0], tc.EmbeddingBag) and new.words[0].mode == "sum" and new.words[1].include_last_offset
    assert not new.frozen.placeholder.requires_grad and new.user.placeholder.requires_grad
    left = {t.name: t.skipped for t in report.tables if t.skipped}
    assert left.keys() == {"tied", "normed", "other"}
    assert "tied" in left["tied"] and left["normed"] == "max_norm" and "Renamed" in left["other"]
    assert new.out.weight is new.tied.weight


def test_the_report_counts_bytes_and_prints_as_a_table():
    report = tc.convert_(model(), tc.RowConfig("int4", cache=0.0))
    user = report.tables[0]
    assert (user.name, user.rows, user.dim, user.bytes_before, user.bytes_after) == ("user", 31, 6, 31 * 24, 31 * 7)
    assert json.loads(json.dumps(report.to_dict()))["tables"][0]["bytes_after"] == 31 * 7
    assert report.bytes_before == sum(t.bytes_before for t in report.tables)
    lines = str(report).splitlines()
    assert len(lines) == len(report.tables) + 2 and "left alone: its weight is used elsewhere too (tied)" in str(report)
    cells = [(line, f"{t.bytes_before:,}") for line, t in zip(lines[1:-1], report.tables, strict=True)]
    assert len({line.index(cell) + len(cell) for line, cell in cells}) == 1  # a column


def test_a_filter_decides_and_keywords_reach_the_modules():
    new = model()
    report = tc.convert_(
        new, tc.RowConfig(optimizer=tc.SGD(lr=0.5), update="step"), filter=lambda name, _: name.startswith("words")
    )
    assert [t.name for t in report.tables if not t.skipped] == ["words.0", "words.1"]
    assert new.words[0].rows.optimizer == tc.SGD(lr=0.5) and new.words[0].rows.update == "step"
    assert type(new.user) is nn.Embedding


def test_a_state_saved_before_conversion_still_loads():
    old, new = model(), model()
    tc.convert_(new, tc.RowConfig("fp32"))
    with torch.no_grad():
        old.user.weight.add_(1)
    new.load_state_dict(old.state_dict())
    assert torch.equal(new.user.weight, old.user.weight)


def test_a_converted_model_trains():
    new = model()
    tc.convert_(new, tc.RowConfig(optimizer=tc.SGD(lr=0.1)))
    before = new.user.weight
    new(torch.tensor([0, 2, 8])).sum().backward()
    assert (new.user.weight != before).any(1).nonzero()[:, 0].tolist() == [0, 8]  # 2 is padding


def test_a_module_that_is_used_twice_is_replaced_by_one():
    twice = nn.ModuleDict({"a": nn.Embedding(9, 6)})
    twice["b"] = twice["a"]
    report = tc.convert_(twice)
    assert isinstance(twice["a"], tc.Embedding) and twice["a"] is twice["b"] and len(report.tables) == 1


def test_half_precision_and_mode_of_training_are_kept():
    half = nn.Sequential(nn.Embedding(9, 6)).half().eval()
    tc.convert_(half)
    assert half(torch.tensor([1])).dtype == torch.float16 and not half[0].training


@pytest.mark.parametrize(
    "row, keywords, fields",
    [
        (0.0, {"cache": "20B"}, {"parameter": "cache", "needed": 32, "available": 20}),
        (float("nan"), {}, {}),
        (1e5, {"precision": "fp16"}, {}),
    ],
    ids=["cache", "not finite", "too large"],
)
def test_a_table_that_cannot_be_converted_is_named_before_anything_changes(row, keywords, fields):
    two = nn.ModuleDict({"small": nn.Embedding(9, 4), "large": nn.Embedding(9, 8, padding_idx=2)})
    with torch.no_grad():
        two["large"].weight[3, 5] = row
    with pytest.raises(tc.BadInput, check=has(module="large", **fields)):
        tc.convert_(two, tc.RowConfig(**keywords))
    assert all(type(module) is nn.Embedding for module in two.values())


def test_arguments_of_another_type_are_refused():
    with pytest.raises(tc.BadInput, check=has(parameter="model")):
        tc.convert_([nn.Embedding(9, 4)])
    with pytest.raises(tc.BadInput, check=has(parameter="filter")):
        tc.convert_(model(), filter="user")
    with pytest.raises(tc.BadInput, check=has(parameter="rows", value="int4")):
        tc.convert_(model(), "int4")
    with pytest.raises(tc.BadInput, check=has(parameter="precision", value="int4")):
        tc.convert_(model(), precision="int4")


def test_patterns_choose_the_config_and_the_first_match_counts():
    new = model()
    first, second = tc.RowConfig("fp32"), tc.RowConfig("int4", cache=0.0)
    report = tc.convert_(new, {"words.0": first, "words*": second})
    assert new.words[0].rows == first and new.words[1].rows == second
    assert {t.name: t.skipped for t in report.tables}["user"] and type(new.user) is nn.Embedding


def test_a_pattern_that_matches_no_embedding_is_refused_with_the_names_there_are():
    new = model()
    with pytest.raises(tc.BadInput, check=has(parameter="rows", value="items*")) as caught:
        tc.convert_(new, {"words*": tc.RowConfig(), "items*": tc.RowConfig()})
    assert "words.1" in caught.value.names and type(new.words[0]) is not tc.Embedding


def test_a_budget_is_for_the_tables_of_its_pattern():
    two = nn.ModuleDict({"a": nn.Embedding(4000, 64), "b": nn.Embedding(4000, 64)})
    report = tc.convert_(two, {"a": tc.RowConfig("auto", budget="250KiB"), "b": tc.RowConfig("fp32")})
    assert report.tables[0].bytes_after <= 250 << 10 and two["b"].rows.precision == "fp32"


def test_tables_can_be_made_for_another_device_and_output():
    two = nn.ModuleDict({"a": nn.Embedding(9, 4)})
    tc.convert_(two, device="meta", dtype=torch.float16)
    assert two["a"].arena.device.type == "meta" and two["a"].dtype == torch.float16


def test_a_model_on_meta_is_converted_and_then_materialized():
    with torch.device("meta"):
        new = nn.ModuleDict({"a": nn.Embedding(31, 6, padding_idx=2), "top": nn.Linear(6, 1)})
    report = tc.convert_(new, tc.RowConfig("fp32", optimizer=tc.SGD(lr=0.1)))
    assert report.tables[0].bytes_after == 31 * 6 * 4 and new["a"].arena.device.type == "meta"
    new.to_empty(device="cpu")
    for module in new.modules():  # as FSDP's param_init_fn does
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    rows = new["a"].get_rows(torch.arange(31))
    assert not rows[2].any() and rows.std() > 0.5
    new["top"](new["a"](torch.tensor([2, 5]))).sum().backward()
    changed = (new["a"].get_rows(torch.arange(31)) != rows).any(1)
    assert changed.nonzero()[:, 0].tolist() == [5]
    with pytest.raises(tc.IdOutOfRange, check=has(table="a")):
        new["a"](torch.tensor([31]))


def test_keywords_of_bags_are_refused_before_anything_changes():
    two = nn.ModuleDict({"bag": nn.EmbeddingBag(9, 4), "each": nn.Embedding(9, 4)})
    with pytest.raises(TypeError, check=mentions("'mode'")):
        tc.convert_(two, mode="sum")
    assert type(two["bag"]) is nn.EmbeddingBag


def test_errors_of_a_converted_model_say_which_table_it_was():
    new = model()
    tc.convert_(new)
    with pytest.raises(tc.IdOutOfRange, check=has(table="words.0", rows=17, position=1, id=17)):
        new.words[0](torch.tensor([[3, 17]]))
    with pytest.raises(tc.BadGradient, check=lambda error: (error.table, error.row - error.first) == ("user", 5)):
        (new.user(torch.tensor([5])) * float("nan")).sum().backward()
    with pytest.raises(tc.IdOutOfRange, check=has(table="user")):
        copy.deepcopy(new).user(torch.tensor([31]))


@pytest.mark.parametrize("precision", ["int8", {"fp32": 0.2, "int8": 0.3, "int2": 0.5}])
def test_a_name_changes_nothing_but_words(precision):
    rows, ids = torch.randn(31, 6, generator=torch.Generator().manual_seed(0)), torch.arange(31).view(1, -1)
    plain = tc.EmbeddingBag.from_pretrained(rows, False, rows=tc.RowConfig(precision))
    named = nn.ModuleDict({"a": nn.EmbeddingBag.from_pretrained(rows, False)})
    tc.convert_(named, tc.RowConfig(precision))
    for module in (plain, named["a"]):
        for _ in range(3):
            module(ids).square().sum().backward()
    assert torch.equal(plain.weight, named["a"].weight) and plain.stats() == named["a"].stats()


def test_a_model_that_is_an_embedding_cannot_be_replaced_in_place():
    with pytest.raises(tc.BadInput, check=has(parameter="model", value="Embedding")):
        tc.convert_(nn.Embedding(3, 4))


class QuotientRemainderEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_q, self.weight_r = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(5, 4))


def test_tables_of_other_kinds_are_listed_as_left_alone():
    other = nn.ModuleDict({"qr": QuotientRemainderEmbedding(), "plain": nn.Embedding(900, 16)})
    report = tc.convert_(other)
    left = {t.name: (t.rows, t.dim, t.bytes_before, t.bytes_after) for t in report.tables if t.skipped}
    assert left == {"qr.weight_q": (9, 4, 144, 144), "qr.weight_r": (5, 4, 80, 80)}
    assert "QuotientRemainderEmbedding" in report.tables[1].skipped


def test_a_model_that_was_converted_before_is_reported_and_left_alone():
    twice = nn.ModuleDict({"a": nn.Embedding(900, 16)})
    first = tc.convert_(twice)
    was = twice["a"]
    (again,) = tc.convert_(twice).tables
    assert twice["a"] is was and again.skipped and (again.name, again.rows, again.dim) == ("a", 900, 16)
    assert again.bytes_before == again.bytes_after == first.bytes_after


def test_a_table_that_grows_is_warned_of():
    report = tc.convert_(nn.ModuleDict({"narrow": nn.Embedding(900, 1), "wide": nn.Embedding(900, 16)}))
    narrow, wide = report.tables
    assert narrow.bytes_after > narrow.bytes_before and len(narrow.warnings) == 1 and not wide.warnings
    assert "warning: narrow" in str(report).splitlines()[-1]


class Regularized(nn.Module):
    """Keeps parameters as DeepCTR's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(900, 16), nn.Embedding(900, 16)
        self.top = nn.Linear(16, 1)
        self.regularization_weight = [([self.user.weight], 0.0, 1e-5), (list(self.top.named_parameters()), 0.0, 1e-5)]
        self.by_name = {"item": [self.item]}
        self.optim = torch.optim.Adam([self.item.weight, *self.top.parameters()])


def test_lists_and_optimizers_that_hold_the_old_weight_are_warned_of():
    report = tc.convert_(Regularized())
    user, item = (table.warnings for table in report.tables)
    assert len(user) == 1 and "regularization_weight" in user[0]
    assert len(item) == 2 and "by_name" in item[0] and "Adam" in item[1]


class Aliased(nn.Module):
    """Keeps views of weights, and a weight that shares its memory with another."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.tied = (nn.Embedding(900, 16) for _ in range(3))
        self.first = self.user.weight[1:20]
        self.register_buffer("columns", self.item.weight.detach().T)
        self.out = nn.Linear(16, 900, bias=False)
        self.out.weight.data = self.tied.weight.data
        self.adjacency, self.lazy = torch.eye(3, device="cpu").to_sparse(), nn.LazyLinear(3)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_of_an_old_weight_are_warned_of_and_shared_memory_counts_as_tied(device):
    with torch.device(device):
        new = Aliased()
    user, item, tied = tc.convert_(new).tables
    assert len(user.warnings) == 1 and "first" in user.warnings[0]
    assert len(item.warnings) == 1 and "columns" in item.warnings[0]
    assert "tied" in tied.skipped and type(new.tied) is nn.Embedding and not tied.warnings


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_revert_gives_torchs_modules_back_with_the_rows_of_now(precision):
    new, ids_B = model(), torch.tensor([0, 2, 8, 2])
    tc.convert_(new, tc.RowConfig(precision, optimizer=tc.SGD(lr=0.1)))
    new(ids_B).sum().backward()
    rows = {name: m.get_rows(torch.arange(m.num_embeddings)) for name, m in new.named_modules() if hasattr(m, "get_rows")}
    out = new(ids_B).detach()
    report = tc.revert_(new)
    assert [t.name for t in report.tables] == list(rows) == ["user", "words.0", "words.1", "frozen"]
    for name, rows_RD in rows.items():
        plain = new.get_submodule(name)
        assert type(plain) in (nn.Embedding, nn.EmbeddingBag) and plain.weight.dtype == torch.float32
        assert torch.equal(plain.weight, rows_RD) and plain.weight.requires_grad == (name != "frozen")
    assert new.user.padding_idx == 2 and new.words[0].mode == "sum" and new.words[1].include_last_offset
    torch.testing.assert_close(new(ids_B), out)
    assert report.bytes_after == sum(4 * rows_RD.numel() for rows_RD in rows.values())


def test_revert_keeps_mode_type_and_sharing():
    half = nn.ModuleDict({"a": nn.Embedding(9, 6)}).half().eval()
    half["b"] = half["a"]
    tc.convert_(half)
    assert len(tc.revert_(half).tables) == 1
    assert type(half["a"]) is nn.Embedding and half["a"] is half["b"]
    assert half["a"].weight.dtype == torch.float16 and not half["a"].training


def test_revert_refuses_what_torch_cannot_express_and_changes_nothing():
    two = nn.ModuleDict({"a": tc.Embedding(9, 4), "b": tc.Embedding(9, 4, ids=tc.IdMap.hashed(9, salt=1))})
    with pytest.raises(tc.BadInput, check=has(parameter="ids", module="b")):
        tc.revert_(two)
    assert isinstance(two["a"], tc.Embedding)
    for wrong in (two["a"], [two]):
        with pytest.raises(tc.BadInput, check=has(parameter="model")):
            tc.revert_(wrong)


def test_a_model_without_embeddings_is_told_so():
    assert "no nn.EmbeddingBag" in str(tc.convert_(nn.Sequential(nn.Linear(2, 2))))
