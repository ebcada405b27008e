"""`examples/cluster/ray_train.py` on two nodes of Ray with two workers each, all on this machine.

    python ray_job.py LEAST_WORKERS FOLDER STEPS

A line on stdin takes the second node away, as if its machine had lost power.
"""

from __future__ import annotations

import os
import sys
import threading

EXAMPLES = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "cluster")
sys.path.insert(0, EXAMPLES)

import ray  # noqa: E402
import ray_train  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

if __name__ == "__main__":
    least, folder, steps = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    variables = {"PYTHONPATH": os.pathsep.join([os.path.abspath(EXAMPLES), *sys.path]), "OMP_NUM_THREADS": "1"}
    ray.init(address=cluster.address, runtime_env={"env_vars": variables})

    def lose_a_node() -> None:
        if sys.stdin.readline():
            cluster.remove_node(nodes[1], allow_graceful=False)

    threading.Thread(target=lose_a_node, daemon=True).start()
    settings = {"folder": folder, "topology": "hgx-h200", "steps": int(steps), "save_every": 5}
    ray_train.main(settings, (int(least), 4), gpu=False)
    print("the job has ended", flush=True)
