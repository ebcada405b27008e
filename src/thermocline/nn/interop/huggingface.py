"""Methods of transformers' `PreTrainedModel` that write or replace embeddings, for converted models.

`save_pretrained` would write the arrays of the rows, which `from_pretrained` does not know, and `resize_token_embeddings`
would refuse the module. `convert_` sets both as attributes of every `PreTrainedModel` in the model, as accelerate does with
`forward`; copies and pickles of the model keep them. The methods of the class do the work.

`save_pretrained` writes the rows of a table as `weight`, in the type of its output, so that the folder is one of transformers.
Beside it, `row_state` has the arrays of the module in the format of safetensors (cached rows, optimizer state): with them, a
checkpoint of transformers' Trainer resumes bit for bit. `from_pretrained` ignores `row_state` and lists it as unexpected.
A file of its own was rejected: the Trainer resumes by `load_state_dict`, which does not say from which folder.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from torch import Tensor, nn

from thermocline.errors import BadInput

from ..embedding import Embedding
from ..prefetch import PrefetchedBatches
from ..rows_module import RowsModule
from ..saved_rows import ROW_STATE, pack

_OF_SIZE = ("arena", "trainer", "tiers", "num_embeddings", "padding_idx", "ids")  # attributes that a resize replaces


def add_methods(model: nn.Module) -> None:
    """Let `save_pretrained` and `resize_token_embeddings` handle converted embeddings."""
    for module in _pretrained_models(model):
        module.save_pretrained = partial(save_pretrained, module)
        module.resize_token_embeddings = partial(resize_token_embeddings, module)


def remove_methods(model: nn.Module) -> None:
    """Undo `add_methods`."""
    for module in _pretrained_models(model):
        for name in ("save_pretrained", "resize_token_embeddings"):
            vars(module).pop(name, None)


def _pretrained_models(model: nn.Module) -> list[Any]:
    library = sys.modules.get("transformers.modeling_utils")  # without it there is no such model
    return [] if library is None else [module for module in model.modules() if isinstance(module, library.PreTrainedModel)]


def save_pretrained(
    model: Any, save_directory: Any, is_main_process: bool = True, state_dict: dict[str, Any] | None = None, **keywords: Any
) -> Any:
    """`PreTrainedModel.save_pretrained`, with rows as `weight`."""
    state = dict(model.state_dict() if state_dict is None else state_dict)
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, RowsModule) and f"{prefix}codes" in state:
            names = [name for name in state if name.startswith(prefix)]
            state[prefix + ROW_STATE] = pack({name[len(prefix) :]: state.pop(name) for name in names})
            for name, table in module.weight_keys().items():
                state[prefix + name] = module.read_table(table).to(module.dtype)
    return type(model).save_pretrained(model, save_directory, is_main_process, state, **keywords)


def resize_token_embeddings(model: Any, *arguments: Any, **keywords: Any) -> Any:
    """`PreTrainedModel.resize_token_embeddings`, which gets an `nn.Embedding` with the rows meanwhile."""
    rows = model.get_input_embeddings()
    if not isinstance(rows, Embedding):
        return type(model).resize_token_embeddings(model, *arguments, **keywords)
    if rows.maps is not None:
        message = f"the token embeddings map ids to rows ({rows.ids}); a table with another size needs another map"
        raise BadInput(message, parameter="ids", value=rows.ids)
    plain = nn.Embedding.from_pretrained(
        rows.read_table(0).to(rows.dtype), not rows.placeholder.requires_grad, rows.padding_idx
    )
    model.set_input_embeddings(plain)
    try:
        type(model).resize_token_embeddings(model, *arguments, **keywords)
        plain = model.get_input_embeddings()
        if plain.num_embeddings != rows.num_embeddings:
            _resize(rows, plain.weight, plain.padding_idx)
    finally:
        model.set_input_embeddings(rows)
    return rows


def _resize(rows: Embedding, weight: Tensor, padding_idx: int | None) -> None:
    """Give a module other rows in place: optimizers that have it stay valid, and rows keep their optimizer state."""
    new = Embedding.from_pretrained(weight, padding_idx=padding_idx, rows=rows.rows, dtype=rows.dtype)
    new.arena.rename([table.name for table in rows.arena.tables])
    kept, by_row = min(rows.num_embeddings, new.num_embeddings), rows.rows.optimizer.states_per_row > 0
    old_states, new_states = (m.arena.state_views(0, m.trainer.states, by_row) for m in (rows, new))
    for old, state in zip(old_states, new_states, strict=True):
        state[:kept] = old[:kept]
    new.trainer.hyper.copy_(rows.trainer.hyper)
    new.trainer.clock.copy_(rows.trainer.clock)
    rows.trained.replace(new.arena, new.trainer)
    vars(rows).update({name: vars(new)[name] for name in _OF_SIZE}, _prefetched=PrefetchedBatches())
