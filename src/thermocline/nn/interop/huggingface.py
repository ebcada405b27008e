"""Methods of transformers' `PreTrainedModel` that write or replace embeddings, for converted models.

`save_pretrained` would write the arrays of the rows, which `from_pretrained` does not know, and `resize_token_embeddings`
would refuse the module. `convert_` sets both as attributes of every `PreTrainedModel` in the model, as accelerate does with
`forward`; copies and pickles of the model keep them. The methods of the class do the work.

`save_pretrained` writes the rows of a table as `weight`, in the type of its output, so that the folder is one of transformers.
In a checkpoint of transformers' Trainer (a folder `checkpoint-N`), `row_state` beside it has the arrays of the module in the
format of safetensors (cached rows, optimizer state): with them, the Trainer resumes bit for bit. `from_pretrained` of a
checkpoint ignores `row_state` and lists it as unexpected, so other folders are written without it. A file of its own was
rejected: the Trainer resumes by `load_state_dict`, which does not say from which folder.

`PreTrainedRows` is for models whose constructor makes thermocline modules. `save_pretrained` and the Trainer handle their
arrays as they are. `from_pretrained` builds the model on the meta device and sets parameters one by one, which cannot set
arrays: the mixin hides them from it, and loads them afterwards from the same files, which safetensors maps into memory.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from torch import Tensor, nn

from thermocline.errors import BadInput

from ..embedding import Embedding
from ..prefetch import PrefetchedBatches
from ..rows_module import RowsModule
from ..saved_rows import ROW_STATE, pack

if TYPE_CHECKING:
    from typing_extensions import Self

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
    resumes = re.fullmatch(r"checkpoint-\d+", Path(save_directory).name)  # a checkpoint of the Trainer
    state = dict(model.state_dict() if state_dict is None else state_dict)
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, RowsModule) and f"{prefix}codes" in state:
            names = [name for name in state if name.startswith(prefix)]
            arrays = {name[len(prefix) :]: state.pop(name) for name in names}
            if resumes:
                state[prefix + ROW_STATE] = pack(arrays)
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


_loading: ContextVar[bool] = ContextVar("_loading", default=False)  # whether `from_pretrained` of transformers runs
_FROM_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class PreTrainedRows:
    """Mixin for a `PreTrainedModel` whose constructor makes thermocline modules: `from_pretrained` loads their rows.

    Rows, cache and optimizer state are saved and loaded as they are. Name the mixin before the class of transformers.

    Example::

        class Model(thermocline.nn.PreTrainedRows, transformers.LlamaForCausalLM):
            def __init__(self, config):
                super().__init__(config)
                self.memory = thermocline.nn.NGramEmbedding(thermocline.nn.NGramHash(1_000_000, config.vocab_size), 32)

        Model(config).save_pretrained("saved")
        model = Model.from_pretrained("saved")
    """

    _keys_to_ignore_on_load_unexpected = (r"\.(codes|meta|state[01]|hyper|clock|tables|ids|ngrams|(cache|elastic)\w*)$",)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *arguments: Any, **keywords: Any) -> Self:
        """`PreTrainedModel.from_pretrained`, with the rows of thermocline modules.

        Args:
            pretrained_model_name_or_path: a folder of `save_pretrained`, or a name on the hub.
            arguments: as transformers takes them.
            keywords: as transformers takes them; rows are on the CPU until the model is moved.

        Returns:
            The model, in evaluation mode.

        Raises:
            RuntimeError: the files have rows of another size, precision or map.
        """
        token = _loading.set(True)
        try:
            model = super().from_pretrained(pretrained_model_name_or_path, *arguments, **keywords)  # type: ignore[misc]
        finally:
            _loading.reset(token)
        found = model[0] if keywords.get("output_loading_info") else model
        hub = {name: keywords[name] for name in _FROM_HUB if name in keywords}
        _load_rows(found, pretrained_model_name_or_path, hub)
        return model  # type: ignore[no-any-return]

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """State of the model; without arrays of rows while transformers loads parameters."""
        state = super().state_dict(*arguments, **keywords)  # type: ignore[misc]
        if _loading.get():
            for key in {key for keys in _keys(self, state).values() for key in keys}:
                del state[key]
        return state


def _holders(model: Any) -> Iterator[tuple[str, Any]]:
    """Modules whose state has more than parameters and buffers, with the prefix of their keys."""
    for path, module in model.named_modules():
        if isinstance(module, RowsModule) or hasattr(module, "saved_texts"):
            yield f"{path}." if path else "", module


def _keys(model: Any, state: Iterable[str]) -> dict[str, list[str]]:
    """The keys of rows among those of a state, by prefix."""
    found: dict[str, list[str]] = {}
    for prefix, module in _holders(model):
        texts = {prefix + text for text in getattr(module, "saved_texts", ())}
        rows = isinstance(module, RowsModule)
        found[prefix] = [key for key in state if key in texts or (rows and key.startswith(prefix))]
    return found


def _load_rows(model: Any, name: Any, hub: dict[str, Any]) -> None:
    """Give modules on the meta device arrays, and load the rows of all modules; those that have none begin with new ones."""
    opened: list[Any] = [safe_open(path, "pt") for path in _checkpoint_files(name, hub)]
    files = {key: file for file in opened for key in file.keys()}  # noqa: SIM118
    holders: dict[str, Any] = dict(_holders(model))
    for prefix, keys in sorted(_keys(model, files).items(), key=lambda item: not isinstance(holders[item[0]], RowsModule)):
        module: Any = holders[prefix]
        state = {key[len(prefix) :]: files[key].get_tensor(key) for key in keys}
        if not isinstance(module, RowsModule):
            module._apply(lambda tensor: tensor)  # what it keeps of its rows goes to their device
            module.load_state_dict(state, strict=False)
            continue
        if module.arena.device.type == "meta":
            module.to_empty(device="cpu")
        if state:
            module.load_state_dict(state)
        else:
            module.reset_parameters()  # type: ignore[operator]
            warnings.warn(f"'{name}' has no rows of {prefix[:-1] or 'the model'}: they are newly initialized", stacklevel=3)


def _checkpoint_files(name: Any, hub: dict[str, Any]) -> list[str]:
    """Paths of the files that `save_pretrained` wrote."""
    cached_file = import_module("transformers.utils").cached_file
    index = cached_file(name, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False, **hub)
    if index is None:
        return [cached_file(name, "model.safetensors", **hub)]
    names = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    return [cached_file(name, file, **hub) for file in sorted(names)]
