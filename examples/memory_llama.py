"""Llama and Qwen with a memory of n-grams, trained by transformers' Trainer. Needs `pip install transformers accelerate`.

python examples/memory_llama.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

import thermocline as tc
from thermocline.nn import NGramEmbedding, NGramHash, PreTrainedRows


class Memory(PreTrainedRows):
    """Adds a gated memory of the last tokens before the second layer, as Engram does."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        ngrams = NGramHash(config.memory_rows, config.vocab_size, heads=2, exclude=(config.pad_token_id,))
        rows = tc.RowConfig("int8", cache=0.05, update="step", optimizer=tc.RowwiseAdagrad(lr=0.05))
        self.memory = NGramEmbedding(ngrams, 8, out_features=config.hidden_size, gate=True, rows=rows)
        self.model.layers[1].register_forward_pre_hook(self.remember)

    def remember(self, layer: Any, inputs: Any) -> Any:
        return inputs[0] + self.memory(self.tokens, inputs[0]), *inputs[1:]

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **keywords: Any) -> Any:
        self.tokens = input_ids
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **keywords)


MemoryLlama = type("MemoryLlama", (Memory, LlamaForCausalLM), {})
MemoryQwen = type("MemoryQwen", (Memory, Qwen3ForCausalLM), {})
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}


def main(steps: int = 100) -> None:
    text = torch.tensor(list(Path(__file__).read_bytes()))
    samples = [{"input_ids": row, "labels": row} for row in text.unfold(0, 32, 4)]  # bytes of this file
    for model_class, config_class in ((MemoryLlama, LlamaConfig), (MemoryQwen, Qwen3Config)):
        model = model_class(config_class(vocab_size=256, pad_token_id=0, memory_rows=20_000, **SIZES))
        with tempfile.TemporaryDirectory() as folder:
            settings = TrainingArguments(folder, max_steps=steps, learning_rate=3e-3, report_to=[], save_strategy="no")
            Trainer(model=model, args=settings, train_dataset=samples).train()
            model.save_pretrained(folder)
            again = model_class.from_pretrained(folder)
        same = torch.equal(again(text[None, :32]).logits, model.cpu().eval()(text[None, :32]).logits)
        print(f"{model_class.__name__}: {'equal' if same else 'different'} after loading")


if __name__ == "__main__":
    main()
