"""The launch files of `examples/cluster`: they parse, and the commands that they run exist and take their options.

Shell files run with `echo` in place of Python, and with stand-ins for the two commands of Slurm that they use.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from thermocline.checkpoint import Checkpoint

FOLDER = Path(__file__).parents[1] / "examples" / "cluster"
SLURM = {
    "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NNODES": "3", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "63",
    "SLURM_CPUS_PER_TASK": "24",
}  # fmt: skip


def script():
    spec = importlib.util.spec_from_file_location("cluster_train", FOLDER / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_command(words):
    """The options of torchrun and of the script, of a command that runs the one with the other."""
    assert words[:2] == ["-m", "torch.distributed.run"]
    found = get_args_parser().parse_args(words[2:])
    assert (FOLDER / Path(found.training_script).name).exists()
    return found, script().read_arguments(found.training_script_args)


def shell(command, **variables):
    """The words of the Python command that a shell file runs."""
    environment = {**os.environ, "PYTHON": "echo", **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return shlex.split(done.stdout)


def test_torchrun_starts_one_node_or_many():
    torchrun, given = check_command(shell(["bash", str(FOLDER / "torchrun.sh"), "--steps", "7"]))
    assert (torchrun.nnodes, torchrun.nproc_per_node, given["steps"]) == ("1", "8", 7)
    many = {"NNODES": "8:16", "NPROC": "4", "ENDPOINT": "first:29500", "FOLDER": "/shared/run", "TOPOLOGY": "cluster.yaml"}
    torchrun, given = check_command(shell(["bash", str(FOLDER / "torchrun.sh")], **many))
    assert (torchrun.nnodes, torchrun.nproc_per_node, torchrun.rdzv_endpoint) == ("8:16", "4", "first:29500")
    assert (given["folder"], given["topology"], torchrun.max_restarts) == ("/shared/run", "cluster.yaml", 100)


def test_slurm_starts_an_agent_on_each_node(tmp_path):
    many = "echo n1; yes n2 | head -n 99999"  # more than a pipe holds
    for name, line in (("scontrol", many), ("srun", 'echo "$1" > "$0.cores"; shift 2; exec "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    variables = {**SLURM, "SLURM_SUBMIT_DIR": str(FOLDER), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    torchrun, given = check_command(shell(["bash", str(FOLDER / "slurm.sbatch")], **variables))
    assert (torchrun.nnodes, torchrun.nproc_per_node) == ("3", "4")
    assert (torchrun.rdzv_endpoint, torchrun.rdzv_id) == ("n1:29500", "63")
    assert given["folder"] == str(FOLDER / "run")
    assert (tmp_path / "srun.cores").read_text() == "--cpus-per-task=24\n"  # srun does not take it from sbatch
    lines = (FOLDER / "slurm.sbatch").read_text().splitlines()
    assert lines[0] == "#!/bin/bash" and lines[1].startswith("#SBATCH")  # sbatch reads options before the first command
    assert "#SBATCH --ntasks-per-node=1" in lines and "#SBATCH --requeue" in lines


def test_the_pytorchjob_runs_torchrun_in_each_pod():
    job = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    policy, workers = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] <= workers["replicas"] <= policy["maxReplicas"]
    [container] = workers["template"]["spec"]["containers"]
    assert container["name"] == "pytorch" and container["command"][0] == "python"
    torchrun, given = check_command([*container["command"][1:], *container["args"]])
    assert int(torchrun.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert given["folder"] == "/shared/run"
    check_mounts(container, workers["template"]["spec"])


def test_the_jobset_runs_torchrun_in_each_pod():
    job = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [part] = job["spec"]["replicatedJobs"]
    spec = part["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    shell_, file = container["command"]
    torchrun, _ = check_command(shell([shell_, str(FOLDER / Path(file).name)], **variables))
    assert int(torchrun.nnodes) == spec["parallelism"] == spec["completions"]
    assert int(torchrun.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    name = job["metadata"]["name"]  # pods are named JOBSET-JOB-REPLICA-POD, in a domain with the name of the job set
    assert torchrun.rdzv_endpoint == f"{name}-{part['name']}-0-0.{name}:{container['ports'][0]['containerPort']}"
    check_mounts(container, spec["template"]["spec"])


def check_mounts(container, pod):
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert {each["mountPath"] for each in container["volumeMounts"]} == {"/shared", "/dev/shm"}


def test_the_script_resumes_from_its_last_save(tmp_path, monkeypatch, capsys):
    train = script()
    monkeypatch.setattr(train, "BATCH", 63)
    for steps in (3, 5):
        train.main(str(tmp_path), steps=steps, save_every=1)
    assert "step 3 on 1 ranks" in capsys.readouterr().out
    assert Checkpoint.open(tmp_path / "saved").manifest.progress["step"] == 5


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_shell_files_parse(name):
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)
