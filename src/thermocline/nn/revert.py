"""`revert_`: give a model its torch modules back, one at a time, so that at most one table is held twice."""

from __future__ import annotations

from torch import nn

from thermocline.errors import BadInput

from .conversion_report import ConversionReport, ConvertedTable
from .convert import put_module
from .embedding import Embedding, EmbeddingBag
from .rows_module import RowsModule


def revert_(model: nn.Module) -> ConversionReport:
    """Replace the `thermocline.EmbeddingBag` and `thermocline.Embedding` modules of a model in place by torch's.

    Weights are the rows as `get_rows` reads them, in the output type of the module (fp32 by default). Optimizer state of rows
    and gradients that wait for `step` are dropped. Make optimizers afterwards. Collections are left as they are.

    Args:
        model: the model.

    Returns:
        A report of each table, with its bytes.

    Raises:
        BadInput: the model is a module of thermocline itself, or a module maps ids, which torch's modules do not. The model is
            unchanged then.

    Example::

        thermocline.convert_(model)
        thermocline.revert_(model)  # nn.Embedding and nn.EmbeddingBag again
    """
    given: object = model
    if isinstance(given, RowsModule) or not isinstance(given, nn.Module):
        way = "use nn.Embedding.from_pretrained(module.weight)" if isinstance(given, nn.Module) else "use a torch.nn.Module"
        raise BadInput(f"model is a {type(model).__name__}; {way}", parameter="model", value=type(model).__name__)
    modules = model.named_modules(remove_duplicate=False)
    found = [(name, module) for name, module in modules if isinstance(module, (Embedding, EmbeddingBag))]
    for name, module in found:
        if module.maps is not None:
            message = f"{name} maps ids to rows ({module.ids}); map ids before the module, or keep it"
            raise BadInput(message, parameter="ids", module=name)
    done: dict[int, nn.Embedding | nn.EmbeddingBag] = {}
    report: list[ConvertedTable] = []
    for name, module in found:
        if id(module) not in done:
            new = done[id(module)] = _torch_module(module)
            after = new.weight.numel() * new.weight.element_size()
            before = module.arena.memory().total
            report.append(ConvertedTable(name, module.num_embeddings, module.embedding_dim, before, after))
        put_module(model, name, done[id(module)])
    return ConversionReport(tuple(report))


def _torch_module(module: Embedding | EmbeddingBag) -> nn.Embedding | nn.EmbeddingBag:
    weight, freeze = module.read_table(0).to(module.dtype), not module.placeholder.requires_grad
    new: nn.Embedding | nn.EmbeddingBag
    if isinstance(module, Embedding):
        new = nn.Embedding.from_pretrained(weight, freeze, module.padding_idx)
    else:
        new = nn.EmbeddingBag.from_pretrained(
            weight, freeze, mode=module.mode, include_last_offset=module.include_last_offset, padding_idx=module.padding_idx
        )
    return new.train(module.training)
