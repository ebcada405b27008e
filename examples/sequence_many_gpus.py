"""A sequence model with a table sharded row by row: torchrun --nproc-per-node 2 examples/sequence_many_gpus.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thermocline as tc
from thermocline.data.synthetic_sequences import SyntheticSequences
from thermocline.heat import profile_batches
from thermocline.models import SequenceModel
from thermocline.plan import TablesConfig, Topology
from thermocline.train.sequence import sampled_softmax

dist.init_process_group("gloo")  # nccl on GPUs
rank, ranks = dist.get_rank(), dist.get_world_size()
items, dim, length, batch = 3200, 32, 20, 64
log = SyntheticSequences(1500, items).log(length=length)
made = [None, None]
if rank == 0:  # usually files: plan.json and heat.tc
    heat = profile_batches([{"item": log.training_items()}])
    table = {"name": "item", "rows": items, "dim": dim, "pooling": "none", "lookups": 84, "precision": "int8", "cache": 0}
    cluster = Topology.load("laptop").model_copy(update={"gpus_per_node": ranks})
    made = [tc.make_plan(TablesConfig.model_validate({"batch": batch, "tables": [table]}), heat, cluster, "1MB"), heat]
dist.broadcast_object_list(made)
torch.manual_seed(0)  # the same dense part on every rank
table = tc.Table("item", items, dim, features=["item", "negative"])  # history and candidates look up one table
model = SequenceModel(tc.EmbeddingCollection([table], mode="none", rows=tc.RowConfig(cache=0.0), device="meta"), dim, length)
sharding = tc.shard_(model, *made)  # this rank's shard of the table, and
model.encoder = DistributedDataParallel(model.encoder)  # its replica of the dense part
adam = torch.optim.Adam(model.encoder.parameters(), lr=1e-3)
for mine in log.batches(batch, rank=rank, ranks=ranks):  # the last batch may be smaller or empty
    loss = sampled_softmax(model(mine.items_N, mine.offsets, mine.negatives_BK), mine).sum() / (batch * length)
    adam.zero_grad()
    loss.backward()  # updates rows on the ranks that hold them
    adam.step()
sharding.check_replicas()
print(f"rank {rank} of {ranks} sent {sum(line.bytes for line in sharding.sent()):,} bytes")
dist.destroy_process_group()
