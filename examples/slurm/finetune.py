"""Fine-tune as jobs of a Slurm cluster, by submitit: one job for each learning rate, resumed after preemption.

    pip install 'hf-vit[train,slurm]'
    python examples/slurm/finetune.py out/b16 --rates 0.001 0.003 --gpus 8 --partition gpu -- B/16 --data DATA

What follows `--` is for `hf-vit finetune`. Slurm signals a job before its time is over and when it is preempted: a
training of one process writes a checkpoint. The job is queued again, and resumes from the last checkpoint.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import submitit
from submitit.helpers import DelayedSubmission, TorchDistributedEnvironment


class Training:
    """One process of a training; a job with several GPUs or nodes has one for each GPU."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments

    def __call__(self) -> None:
        place = TorchDistributedEnvironment()
        if place.world_size > 1:
            place.export(set_cuda_visible_devices=False, overwrite=True)
        # In a session of its own: Slurm signals the whole group, but only submitit's handler may act on it.
        command = [sys.executable, "-u", "-m", "hf_vit", *self.arguments]
        self.process = subprocess.Popen(command, start_new_session=True)
        while self.process.poll() is None:  # wait() would hold a lock that the handler needs
            time.sleep(0.2)
        if self.process.returncode:
            raise SystemExit(f"hf-vit ended with {self.process.returncode}")

    def checkpoint(self) -> DelayedSubmission:
        """Stop the training, which writes a checkpoint if it is one process, and queue the job again, for submitit."""
        self.process.terminate()
        end = time.monotonic() + 90
        while self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        return DelayedSubmission(Training(self.arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="each job writes OUTPUT/RATE; logs are in OUTPUT.jobs")
    parser.add_argument("--rates", nargs="+", required=True, help="learning rates")
    parser.add_argument("--gpus", type=int, default=1, help="of each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--hours", type=float, default=4)
    parser.add_argument("--partition")
    parser.add_argument("--cluster", default="slurm", help="slurm, or local: on this machine")
    parser.add_argument("finetune", nargs="+", help="model and options of hf-vit finetune")
    given = parser.parse_args()
    resources = {"nodes": given.nodes, "gpus_per_node": given.gpus, "tasks_per_node": max(1, given.gpus)}
    resources |= {"timeout_min": round(60 * given.hours), "slurm_partition": given.partition}
    # Where one process fails, the others do not wait for it; Slurm itself queues a preempted job again.
    switches = {"slurm_srun_args": ["--kill-on-bad-exit=1"], "slurm_additional_parameters": {"requeue": True}}
    executor = submitit.AutoExecutor(f"{given.output}.jobs", cluster=given.cluster, slurm_max_num_timeout=100)
    executor.update_parameters(name="hf-vit", slurm_signal_delay_s=120, stderr_to_stdout=True, **resources, **switches)
    outputs = {rate: str(given.output / rate) for rate in given.rates}
    common = ["finetune", *given.finetune, "--resume"]
    trainings = [Training([*common, "--learning-rate", rate, "--output", place]) for rate, place in outputs.items()]
    for place, job in zip(outputs.values(), executor.submit_array(trainings), strict=True):
        print(f"{place}: job {job.job_id}, log {job.paths.stdout}")


if __name__ == "__main__":
    main()
