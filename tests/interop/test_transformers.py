"""Models of transformers, converted: saving, resizing, and the Trainer, against the same model without conversion."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import thermocline as tc
from support import has
from thermocline.nn import NGramEmbedding, NGramHash, PreTrainedRows

transformers = pytest.importorskip("transformers", reason="no transformers here; CONTRIBUTING.md says how to get it")
pytest.importorskip("accelerate", reason="no accelerate here; CONTRIBUTING.md says how to get it")

WORDS, LENGTH, SAMPLES = 211, 12, 96
INT8 = tc.RowConfig("int8", cache=0.05, update="step")
SGD_ROWS = tc.RowConfig("fp32", update="step", optimizer=tc.SGD(lr=0.3))


def gpt2(tied=False, seed=0):
    torch.manual_seed(seed)
    sizes = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens, tie_word_embeddings=tied))


def bert(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=32, **sizes)
    return transformers.BertForSequenceClassification(config)


MODELS = {"GPT-2": gpt2, "tied GPT-2": lambda seed=0: gpt2(tied=True, seed=seed), "BERT": bert}


def samples(model, seed=1):
    draw = torch.Generator().manual_seed(seed)
    ids = (torch.rand(SAMPLES, LENGTH, generator=draw) ** 2 * WORDS).long()
    if "Bert" in type(model).__name__:
        return [{"input_ids": row, "labels": int((row < 40).sum() > LENGTH // 2)} for row in ids]
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(model, folder, **arguments):
    chosen = {"optim": "sgd", "learning_rate": 0.3, "max_steps": 6, "save_strategy": "no", "seed": 3, **arguments}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    settings = transformers.TrainingArguments(output_dir=folder, per_device_train_batch_size=8, **quiet, **chosen)
    return transformers.Trainer(model=model, args=settings, train_dataset=samples(model), eval_dataset=samples(model, seed=2))


def plain_state(model):
    """The state of a model with plain weights."""
    reverted = copy.deepcopy(model)
    tc.revert_(reverted)
    return reverted.state_dict()


def assert_same(found, expected, **tolerance):
    found, expected = plain_state(found), plain_state(expected)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if "key.bias" not in name:  # softmax does not depend on it: its gradient is rounding
            torch.testing.assert_close(found[name], tensor, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def train_rows(model, steps=3):
    """Train without a Trainer, so that rows have optimizer state; returns the optimizer."""
    torch.manual_seed(0)  # for dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(samples(model)[: 8 * steps], batch_size=8):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


# -- save_pretrained ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["5GB", "4KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_loads_as_a_plain_one_and_converts_to_the_same_rows(name, shard, tmp_path):
    model = MODELS[name]()
    tc.convert_(model, INT8)
    train_rows(model)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "4KB")
    loaded, loading = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[f"{kind}_keys"] for kind in ("missing", "mismatched", "unexpected"))
    assert_same(loaded, model, rtol=0, atol=0)
    tc.convert_(loaded, tc.RowConfig("int8", cache=0.0))
    for module in model.modules():
        if isinstance(module, tc.Embedding):
            module.flush()  # rounds cached rows
    assert_same(loaded, model)


def test_the_saved_row_state_restores_cache_and_optimizer_of_a_converted_model(tmp_path):
    model, again, other = bert(), bert(seed=1), bert(seed=1)
    tc.convert_(model, INT8)
    train_rows(model)
    model.save_pretrained(tmp_path / "checkpoint-3")
    tc.convert_(again, INT8)
    tc.convert_(other, tc.RowConfig("fp32"))
    saved = safetensors.torch.load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    for loaded in (again, other):
        assert not loaded.load_state_dict(saved, strict=False).unexpected_keys
        assert_same(loaded, model, rtol=0, atol=0)
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    for each in (model, again):
        train_rows(each)
    assert_same(again, model, rtol=0, atol=0)


def test_a_part_of_a_model_saves_and_a_reverted_model_saves_weights_alone(tmp_path):
    model = bert()
    tc.convert_(model, INT8)
    expected = plain_state(model.bert)
    model.bert.save_pretrained(tmp_path / "part")
    assert_same(transformers.BertModel.from_pretrained(tmp_path / "part"), model.bert)
    tc.revert_(model)
    assert type(model.bert.embeddings.word_embeddings) is nn.Embedding
    assert not {"save_pretrained", "resize_token_embeddings"} & {*vars(model), *vars(model.bert)}
    model.bert.save_pretrained(tmp_path / "plain")
    saved = safetensors.torch.load_file(tmp_path / "plain" / "model.safetensors")
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in saved)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_saves_and_resizes_its_own_rows(way, tmp_path):
    model = gpt2()
    tc.convert_(model, INT8)
    if way == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        torch.save(model, file := io.BytesIO())
        copied = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    copied.get_input_embeddings().set_rows(torch.tensor([3]), torch.ones(1, 16))
    copied.save_pretrained(tmp_path)
    assert_same(transformers.GPT2LMHeadModel.from_pretrained(tmp_path), copied, rtol=0, atol=0)
    copied.resize_token_embeddings(WORDS + 5)
    assert (copied.get_input_embeddings().num_embeddings, model.get_input_embeddings().num_embeddings) == (WORDS + 5, WORDS)


# -- resize_token_embeddings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [WORDS + 9, WORDS - 9])
@pytest.mark.parametrize("optimizer", [tc.Adagrad(lr=0.1), tc.RowwiseAdagrad(lr=0.1)], ids=["by column", "by row"])
@pytest.mark.parametrize("name", ["GPT-2", "BERT"])
def test_resized_embeddings_keep_rows_and_their_optimizer_state(name, optimizer, words):
    model = MODELS[name]()
    tc.convert_(model, tc.RowConfig("fp32", update="step", optimizer=optimizer))
    dense = train_rows(model)
    rows = model.get_input_embeddings()
    before, kept = rows.weight.detach(), min(words, WORDS)
    state = rows.trainer.states[0].view(WORDS, -1).clone()
    assert model.resize_token_embeddings(words) is rows is model.get_input_embeddings()
    assert model.config.vocab_size == rows.num_embeddings == words and rows.weight.shape == (words, 16)
    assert torch.equal(rows.weight[:kept], before[:kept])
    assert torch.equal(rows.trainer.states[0].view(words, -1)[:kept], state[:kept])
    if name == "GPT-2":
        assert model.get_output_embeddings().weight.shape[0] == words
    ids = torch.arange(kept - 4, kept)
    model(input_ids=ids[None]).logits.sum().backward()
    dense.step()  # the optimizer from before still steps the rows
    assert not torch.equal(rows.weight[ids], before[ids])


def test_resized_embeddings_of_a_tied_model_stay_tied_and_a_dropped_padding_row_is_none():
    tied = gpt2(tied=True)
    tc.convert_(tied, INT8)
    tied.resize_token_embeddings(WORDS + 9)
    assert tied.lm_head.weight is tied.transformer.wte.weight and isinstance(tied.transformer.wpe, tc.Embedding)
    model = bert()
    model.bert.embeddings.word_embeddings.padding_idx = WORDS - 1
    tc.convert_(model, INT8)
    model.resize_token_embeddings(WORDS - 3)
    assert model.get_input_embeddings().padding_idx is None
    assert model.resize_token_embeddings(pad_to_multiple_of=64).num_embeddings == 256


def test_a_resize_that_fails_leaves_the_rows_in_place():
    model = gpt2()
    tc.convert_(model, INT8)
    rows, before = model.get_input_embeddings(), model.get_input_embeddings().weight
    with pytest.raises(ValueError):
        model.resize_token_embeddings(WORDS + 1, pad_to_multiple_of=2.5)
    assert model.get_input_embeddings() is rows and torch.equal(rows.weight, before)


# -- Trainer -----------------------------------------------------------------------------------------------------------

SETTINGS = {
    "defaults": {},
    "strong clipping": {"max_grad_norm": 0.05},
    "no clipping": {"max_grad_norm": 0.0},
    "accumulation": {"gradient_accumulation_steps": 3, "max_steps": 4},
    "schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_the_trainer_trains_a_converted_model_as_the_unconverted_one(name, setting, tmp_path):
    found = []
    for converted in (False, True):
        model = MODELS[name]()
        if converted:
            tc.convert_(model, SGD_ROWS)
        trainer(model, tmp_path, **SETTINGS[setting]).train()
        found.append(model)
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if setting in ("bf16", "fp16") else {"rtol": 1e-4, "atol": 1e-6}
    assert_same(found[1], found[0], **tolerance)
    begun = MODELS[name]().state_dict()
    assert all(
        not torch.equal(begun[key], rows) for key, rows in plain_state(found[0]).items() if "embed" in key or "wpe" in key
    )


def test_torchs_adagrad_and_the_adagrad_of_rows_agree_under_the_trainer(tmp_path):
    found = []
    for converted in (False, True):
        model = bert()
        if converted:
            tc.convert_(model, tc.RowConfig("fp32", update="step", optimizer=tc.Adagrad(lr=0.02)))
        trainer(model, tmp_path, optim="adagrad", learning_rate=0.02, warmup_steps=2).train()
        found.append(model)
    assert_same(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_trainer_ends_where_an_uninterrupted_one_does(name, tmp_path):
    def new_trainer(folder, seed=0):
        model = MODELS[name](seed=seed)
        tc.convert_(model, INT8)
        settings = {"save_strategy": "steps", "save_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3}
        return trainer(model, tmp_path / folder, max_steps=8, **settings)

    whole = new_trainer("whole")
    whole.train()
    resumed = new_trainer("resumed", seed=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert_same(resumed.model, whole.model, rtol=0, atol=0)


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    model = bert()
    tc.convert_(model, INT8)
    every = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    best = trainer(model, tmp_path, load_best_model_at_end=True, metric_for_best_model="loss", **every)
    best.train()
    assert_same(model, transformers.BertForSequenceClassification.from_pretrained(best.state.best_model_checkpoint))


def test_rows_updated_in_backward_are_refused_at_the_first_step(tmp_path):
    """The Trainer always clips: without `max_grad_norm` to infinity."""
    model = bert()
    tc.convert_(model, tc.RowConfig("fp32", optimizer=tc.SGD(lr=0.3)))
    with pytest.raises(tc.BadInput, check=has(parameter="update", tool="gradient clipping")):
        trainer(model, tmp_path, max_grad_norm=0.0).train()


@pytest.mark.parametrize("name", MODELS)
def test_int8_with_a_small_cache_learns_within_the_spread_of_seeds(name, tmp_path):
    losses = {False: [], True: []}
    for converted, of_seeds in losses.items():
        for seed in range(4):
            model = MODELS[name](seed=seed)
            if converted:
                tc.convert_(model, tc.RowConfig("int8", cache=0.05, update="step", optimizer=tc.Adam(lr=5e-3)))
            loop = trainer(model, tmp_path, optim="adamw_torch", learning_rate=5e-3, max_steps=24, seed=seed)
            loop.train()
            of_seeds.append(loop.evaluate()["eval_loss"])
    plain, ours = (torch.tensor(losses[converted]) for converted in (False, True))
    assert abs(float((ours - plain).mean())) < float(plain.std())


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "huggingface.md"
    (code,) = re.findall(r"^```python transformers\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    exec(compile(code, str(page), "exec"), {"__name__": "block"})


# -- models that make rows: PreTrainedRows -----------------------------------------------------------------------------


class Memory(PreTrainedRows):
    """A memory of n-grams, and a bag, in the constructor."""

    def __init__(self, config):
        super().__init__(config)
        rows = tc.RowConfig("int8", cache=0.1, update="step")
        ngrams = NGramHash(997, config.vocab_size, heads=2, exclude=(0,), salt=config.salt)
        self.memory = NGramEmbedding(ngrams, 4, out_features=config.hidden_size, gate=True, rows=rows)
        self.counts = tc.EmbeddingBag(WORDS, config.hidden_size, mode="mean", rows=rows)
        self.model.layers[1].register_forward_pre_hook(self.remember)

    def remember(self, layer, inputs):
        added = self.memory(self.tokens, inputs[0]) + self.counts(self.tokens)[:, None]
        return inputs[0] + added, *inputs[1:]

    def forward(self, input_ids=None, attention_mask=None, labels=None, **keywords):
        self.tokens = input_ids
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **keywords)


LLAMA, QWEN = transformers.LlamaForCausalLM, transformers.Qwen3ForCausalLM
MEMORIES = {base: type(f"Memory{base.__name__}", (Memory, base), {}) for base in (LLAMA, QWEN)}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}


def remembering(base, seed=0, salt=0):
    torch.manual_seed(seed)
    return MEMORIES[base](base.config_class(vocab_size=WORDS, pad_token_id=0, salt=salt, **SIZES))


def assert_equal_states(found, expected):
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("base", MEMORIES, ids=lambda base: base.__name__)
def test_a_model_that_makes_rows_trains_resumes_and_loads_exactly(base, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3}
    whole = trainer(remembering(base), tmp_path / "whole", **{**settings, "max_steps": 4})
    whole.train()
    resumed = trainer(remembering(base, seed=1), tmp_path / "resumed", **{**settings, "max_steps": 4})
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_equal_states(resumed.model, whole.model)
    whole.model.save_pretrained(tmp_path / "saved", max_shard_size="6KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    loaded, loading = MEMORIES[base].from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    assert_equal_states(loaded, whole.model)
    tokens = torch.stack([sample["input_ids"] for sample in samples(loaded)[:5]])
    assert torch.equal(loaded(tokens).logits, whole.model.eval()(tokens).logits)
    trainer(loaded, tmp_path / "more", max_steps=1).train()  # and trains on


def test_a_checkpoint_without_rows_begins_with_new_rows_and_says_so(tmp_path):
    plain = LLAMA(transformers.LlamaConfig(vocab_size=WORDS, pad_token_id=0, salt=0, **SIZES))
    plain.save_pretrained(tmp_path)
    with pytest.warns(UserWarning) as said:
        loaded = MEMORIES[LLAMA].from_pretrained(tmp_path)
    assert sum("newly initialized" in str(one.message) for one in said) == 2
    assert torch.equal(loaded.model.layers[0].mlp.up_proj.weight, plain.model.layers[0].mlp.up_proj.weight)
    assert loaded.memory.table.get_rows("ngrams").count_nonzero() > 0
    trainer(loaded, tmp_path / "run", max_steps=1).train()


def test_rows_of_another_map_are_refused_by_from_pretrained(tmp_path):
    remembering(LLAMA, salt=1).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ngrams"):
        MEMORIES[LLAMA].from_pretrained(tmp_path, salt=3)
    assert_equal_states(MEMORIES[LLAMA].from_pretrained(tmp_path), remembering(LLAMA, salt=1))
