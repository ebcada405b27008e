"""A sequence model whose table lies row by row on all cards: torchrun --nproc-per-node 2 examples/sequence_many_cards.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thermocline as tc
from thermocline.data.sequences import Share
from thermocline.data.synthetic_sequences import SyntheticSequences
from thermocline.heat.profiler import profile_batches
from thermocline.models import SequenceModel
from thermocline.plan.tables import TablesConfig
from thermocline.plan.topology import Topology
from thermocline.train.sequence import sampled_softmax

dist.init_process_group("gloo")  # nccl on GPUs
rank, cards = dist.get_rank(), dist.get_world_size()
items, dim, length, batch = 3200, 32, 20, 64
log = SyntheticSequences(1500, items).log(length=length)
made = [None, None]
if rank == 0:  # usually files: plan.json and heat.tc
    heat = profile_batches([{"item": log.training_items()}])
    table = {"name": "item", "rows": items, "dim": dim, "pooling": "none", "lookups": 84, "precision": "int8", "cache": 0}
    cluster = Topology.load("laptop").model_copy(update={"gpus_per_node": cards})
    made = [tc.make_plan(TablesConfig.model_validate({"batch": batch, "tables": [table]}), heat, cluster, "1MB"), heat]
dist.broadcast_object_list(made)
torch.manual_seed(0)  # the same dense part on every rank
table = tc.Table("item", items, dim, features=["item", "negative"])  # history and candidates look up one table
model = SequenceModel(tc.EmbeddingCollection([table], mode="none", rows=tc.RowConfig(cache=0.0), device="meta"), dim, length)
sharding = tc.shard_(model, *made)  # this card's part of the table, and
model.encoder = DistributedDataParallel(model.encoder)  # its copy of the dense part
adam = torch.optim.Adam(model.encoder.parameters(), lr=1e-3)
for mine in log.batches(batch, share=Share(rank, cards)):  # each rank its own samples; at the end fewer, maybe none
    loss = sampled_softmax(model(mine.items_N, mine.offsets, mine.negatives_BK), mine).sum() / (batch * length)
    adam.zero_grad()
    loss.backward()  # rows are updated here, on the cards that hold them
    adam.step()
sharding.check_replicas()
print(f"rank {rank} of {cards} has sent {sum(line.bytes for line in sharding.sent()):,} bytes")
dist.destroy_process_group()
