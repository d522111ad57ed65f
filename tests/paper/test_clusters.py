"""Runs on a cluster: what is submitted to SLURM and Ray, and how a SLURM job starts, awaits and stops its Ray.

`sbatch`, `srun` and `scontrol` are stand-ins that write down how they were called; `srun` runs one task a "node" on this
machine. In the fast tests Ray is a stand-in, too: a process that listens, registers its node and leaves at SIGTERM.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from recipes.demo.prepare import prepare

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LAUNCH, JOB = ROOT / "recipes" / "launch.sh", ROOT / "recipes" / "slurm.sbatch"
SLURM = {
    "sbatch": 'printf "%s\\n" "$@" >"$CALLS/sbatch"; echo "42;cluster"',
    "scontrol": """
        echo "$@" >>"$CALLS/scontrol"
        if [[ $1 == show ]]; then printf "%s\\n" n1 n2; else exit "${REQUEUE_STATUS:-0}"; fi""",
    "srun": """
        printf "%s\\n" "$@" >"$CALLS/srun"
        while [[ $1 == --* ]]; do shift; done
        trap 'kill "${tasks[@]}" 2>/dev/null; wait; exit 143' TERM
        for task in 0 1; do
            SLURM_PROCID=$task SLURMD_NODENAME=n$((task + 1)) "$@" &
            tasks+=($!)
        done
        wait -n || { status=$?; kill "${tasks[@]}" 2>/dev/null; wait; exit $status; }
        wait""",
}
RAY = {
    "ray/__init__.py": """
        import json, os, pathlib, types
        connected, util = [], types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        is_initialized = lambda: bool(connected)
        init = lambda address, **options: connected.append(address)
        nodes = lambda: [json.loads(path.read_text()) for path in pathlib.Path(os.environ["NODES"]).iterdir()]
        """,
    "ray/scripts/scripts.py": """
        import json, os, pathlib, signal, socket, sys, time
        options = dict(a.lstrip("-").split("=", 1) for a in sys.argv if "=" in a)
        node = options["node-name"]
        if node == os.environ.get("BROKEN"): sys.exit(f"Ray does not start on {node}")
        if node == os.environ.get("SLOW"): time.sleep(60)
        if "--head" in sys.argv: head = socket.create_server(("", int(options["port"])))
        here = pathlib.Path(os.environ["NODES"], node)
        def leave(*_):
            here.unlink()
            sys.exit()
        signal.signal(signal.SIGTERM, leave)
        resources = {"GPU": float(options["num-gpus"]), "CPU": float(options["num-cpus"])}
        devices = {k: v for k, v in os.environ.items() if k.endswith("VISIBLE_DEVICES")}
        here.write_text(json.dumps({"NodeName": node, "Alive": True, "Resources": resources, "Devices": devices}))
        while os.environ.get("DIES") != node or not pathlib.Path(os.environ["CALLS"], "running").exists(): time.sleep(0.1)
        here.unlink()
        sys.exit(f"Ray died on {node}")
        """,
}


def lines(text: str) -> str:
    """Without the margin of a text in this file."""
    return "\n".join(line.removeprefix(" " * 8) for line in text.splitlines()) + "\n"


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job on two nodes, with the stand-ins."""
    for folder in ("bin", "calls", "nodes", "stand_in/ray/scripts", "results", "data"):
        (tmp_path / folder).mkdir(parents=True)
    for name, script in SLURM.items():
        (tmp_path / "bin" / name).write_text("#!/usr/bin/env bash\n" + lines(script))
        (tmp_path / "bin" / name).chmod(0o755)
    for name, module in RAY.items():
        (tmp_path / "stand_in" / name).write_text(lines(module))
    job = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_ON_NODE": "64"}
    folders = {"CALLS": tmp_path / "calls", "NODES": tmp_path / "nodes"}
    folders |= {"RESULTS_DIR": tmp_path / "results", "DATA_DIR": tmp_path / "data"}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, **job, "PATH": path, "PYTHON": sys.executable}
    return environment | {name: str(folder) for name, folder in folders.items()}


@pytest.fixture
def job(slurm, tmp_path):
    """Starts slurm.sbatch with 8 GPUs a node and a command of bash; the process."""
    started = []

    def start(command: str, **environment: str) -> subprocess.Popen:
        slurm.update(PYTHONPATH=str(tmp_path / "stand_in"), **environment)
        process = subprocess.Popen(
            ["bash", str(JOB), "8", "bash", "-c", command],
            env=slurm,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def end(process: subprocess.Popen, environment: dict) -> tuple[int, str]:
    """The job's exit status and log; its Ray must be gone."""
    log, _ = process.communicate(timeout=60)
    assert not list(Path(environment["NODES"]).iterdir()), "a node's Ray was left running"
    return process.returncode, log


def when(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.05)


RUNNING = (
    'trap "touch $CALLS/ended; exit 0" TERM; touch "$CALLS/running"; while :; do sleep 0.1; done'  # the trap first
)


def test_the_command_runs_against_all_nodes_and_its_status_is_the_jobs(job, slurm):
    status, log = end(job('ls "$NODES"; cat "$NODES"/n2; echo "address $RAY_ADDRESS"; exit 3'), slurm)
    assert status == 3
    assert "2 of 2 nodes, 16 of 16 GPUs" in log
    assert re.search(r"^n1\nn2\n\{.*\"GPU\": 8.0, \"CPU\": 64.0.*address 127.0.0.1:\d+$", log, re.M | re.S)
    srun = Path(slurm["CALLS"], "srun").read_text().splitlines()
    assert srun[:4] == ["--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpu-bind=none"]


def test_a_command_that_succeeds_ends_the_job_well(job, slurm):
    assert end(job("true", SLURM_CPUS_ON_NODE="1"), slurm)[0] == 0
    assert "requeue" not in Path(slurm["CALLS"], "scontrol").read_text()


def test_the_devices_of_another_maker_are_not_named_beside_cudas(job, slurm):
    """SLURM sets both where it does not know the maker, and verl's worker refuses both."""
    both = {"CUDA_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0,1"}
    status, log = end(job('cat "$NODES"/n*; env | grep VISIBLE_DEVICES', **both), slurm)
    assert status == 0
    assert log.count('"Devices": {"CUDA_VISIBLE_DEVICES": "0,1"}') == 2
    assert "CUDA_VISIBLE_DEVICES=0,1" in log
    assert "ROCR_VISIBLE_DEVICES" not in log


def test_slots_suffice_for_verl_where_a_job_has_few_cores(job, slurm):
    _, log = end(job('cat "$NODES/n1"', SLURM_CPUS_ON_NODE="1"), slurm)
    assert '"CPU": 48.0' in log  # 4 for each GPU, and 16


def test_nodes_that_do_not_register_are_named(job, slurm):
    status, log = end(job('touch "$CALLS/running"', SLOW="n2", RAY_START_SECONDS="3"), slurm)
    assert status == 1
    assert "after 3 s Ray has 1 of 2 nodes with 8 GPUs each; missing: n2." in log
    assert not Path(slurm["CALLS"], "running").exists()


def test_a_node_whose_ray_does_not_start_ends_the_job_at_once(job, slurm):
    begin = time.monotonic()
    status, log = end(job("true", BROKEN="n2"), slurm)
    assert status == 1
    assert "Ray does not start on n2" in log
    assert "Ray ended while its nodes were awaited" in log
    assert time.monotonic() - begin < 20  # not RAY_START_SECONDS


def test_a_node_lost_during_the_run_ends_the_job(job, slurm):
    status, log = end(job(RUNNING, DIES="n2"), slurm)
    assert status == 1
    assert "Ray ended on a node while the run was going on" in log
    assert Path(slurm["CALLS"], "ended").exists()


def test_a_folder_that_one_node_lacks_is_named(job, slurm):
    Path(slurm["CALLS"]).with_name("bin").joinpath("srun").write_text(
        '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\nrmdir "$DATA_DIR"\n'
        'SLURM_PROCID=1 SLURMD_NODENAME=n2 exec "$@"\n'
    )
    status, log = end(job("true"), slurm)
    assert status == 1
    assert f"n2: no folder {slurm['DATA_DIR']}: use one that all nodes share" in log


def test_before_the_time_limit_the_run_is_stopped_and_queued_again(job, slurm):
    process = job(RUNNING)
    when(Path(slurm["CALLS"], "running"))
    process.send_signal(signal.SIGUSR1)
    status, log = end(process, slurm)
    assert status == 0
    assert Path(slurm["CALLS"], "ended").exists()
    assert Path(slurm["CALLS"], "scontrol").read_text().splitlines()[-1] == "requeue 42"
    assert "resumes from its last checkpoint" in log


def test_a_job_that_cannot_be_queued_again_says_so(job, slurm):
    process = job(RUNNING, REQUEUE_STATUS="1")
    when(Path(slurm["CALLS"], "running"))
    process.send_signal(signal.SIGUSR1)
    status, log = end(process, slurm)
    assert status == 1
    assert "submit the same run once more" in log


def test_a_cancelled_job_stops_its_run_and_stays_cancelled(job, slurm):
    process = job(RUNNING)
    when(Path(slurm["CALLS"], "running"))
    process.send_signal(signal.SIGTERM)
    status, _ = end(process, slurm)
    assert status == 143
    assert Path(slurm["CALLS"], "ended").exists()
    assert "requeue" not in Path(slurm["CALLS"], "scontrol").read_text()


def test_usr1_while_nodes_are_awaited_queues_the_job_again(job, slurm):
    process = job("true", SLOW="n2")
    when(Path(slurm["NODES"], "n1"))
    process.send_signal(signal.SIGUSR1)
    status, _ = end(process, slurm)
    assert status == 0
    assert "requeue 42" in Path(slurm["CALLS"], "scontrol").read_text()


def launch(environment: dict, *arguments: str) -> subprocess.CompletedProcess:
    command = ["bash", str(LAUNCH), "qwen3_1.7b_dapo17k", "balanced", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_slurm_gets_the_plan_and_the_launchers_own_command(slurm):
    for name in ("dapo17k", "math500", "aime24", "aime25", "olympiadbench", "minerva", "livecodebench"):
        Path(slurm["DATA_DIR"], f"{name}.parquet").touch()
    result = launch(slurm, "--cluster", "2x8x80gb", "--via", "slurm", "seed=3")
    assert result.returncode == 0, result.stderr
    assert "job 42; log: tail -F" in result.stdout
    assert Path(slurm["CALLS"], "sbatch").read_text().splitlines() == [
        *("--parsable", "--nodes=2", "--gpus-per-node=8", "--job-name=qwen3_1.7b_dapo17k-balanced-seed3"),
        f"--output={slurm['RESULTS_DIR']}/slurm/%x-%j.log",
        *(str(JOB), "8", "bash", str(LAUNCH), "qwen3_1.7b_dapo17k", "balanced", "cluster=2x8x80gb", "seed=3"),
    ]
    assert Path(slurm["RESULTS_DIR"], "slurm").is_dir()
    assert not list(Path(slurm["RESULTS_DIR"]).rglob("manifest.json"))  # the job writes it


def test_a_run_that_would_fail_is_not_submitted(slurm):
    result = launch(slurm, "--via", "slurm")
    assert result.returncode == 2
    assert f"data.train_files={slurm['DATA_DIR']}/dapo17k.parquet: no such file" in result.stderr
    assert not Path(slurm["CALLS"], "sbatch").exists()


def submit(how: str, environment: dict, *arguments: str) -> subprocess.CompletedProcess:
    """What launch.sh calls once it knows the plan: 2 nodes of 8 GPUs."""
    command = ["bash", str(ROOT / "recipes" / f"submit_{how}.sh"), "cuda 2 8 metrics", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_dry_run_submits_nothing(slurm):
    result = submit("slurm", slurm, "--dry-run", "demo", "arm=token")
    assert result.returncode == 0
    assert "would submit:\n  sbatch --parsable --nodes=2 --gpus-per-node=8 --job-name=demo-token" in result.stdout
    assert not list(Path(slurm["CALLS"]).iterdir())
    assert not list(Path(slurm["RESULTS_DIR"]).iterdir())


def test_no_sbatch_is_one_clear_error(slurm, tmp_path):
    for tool in ("bash", "dirname"):
        (tmp_path / "nodes" / tool).symlink_to(shutil.which(tool))
    result = submit("slurm", {**slurm, "PATH": str(tmp_path / "nodes")}, "demo", "arm=token")
    assert result.returncode == 2
    assert "no sbatch here: --via slurm is for a node of a SLURM cluster" in result.stderr


def command_words(shown: str) -> list[str]:
    """The command of a dry run."""
    return shlex.split(shown.split("would submit:")[1])


def runtime_environment(shown: str) -> dict:
    words = command_words(shown)
    return json.loads(words[words.index("--runtime-env-json") + 1])


def test_a_ray_job_takes_the_checkout_and_the_environment_but_no_secrets(slurm):
    secrets = {"WANDB_API_KEY": "secret", "HF_TOKEN": "secret"}
    environment = {**slurm, **secrets, "WANDB_MODE": "offline", "NCCL_DEBUG": "INFO", "RAY_ADDRESS": "http://head:8265"}
    result = submit("ray", environment, "--dry-run", "demo", "arm=token", "seed=2")
    assert result.returncode == 0, result.stderr
    words = command_words(result.stdout)
    assert words[words.index("--address") + 1] == "http://head:8265"
    assert words[words.index("--") + 1 :] == ["bash", "recipes/launch.sh", "demo", "token", "seed=2"]
    runtime_env = runtime_environment(result.stdout)
    expected = {name: environment[name] for name in ("RESULTS_DIR", "DATA_DIR", "PYTHON", "WANDB_MODE", "NCCL_DEBUG")}
    expected |= {"VERL_USE_EXTERNAL_MODULES": "verl_ba.plugin"}
    assert runtime_env["env_vars"].items() >= expected.items()
    assert "secret" not in result.stdout


def test_a_ray_job_uploads_the_package_and_not_what_lies_beside_it(slurm, tmp_path):
    """With Ray's own packaging, on a checkout with data and results."""
    from ray._private.runtime_env import packaging

    checkout = tmp_path / "checkout"
    for file in (
        "recipes/submit_ray.sh",
        "verl_ba/paper/data/build.py",
        "data/d.parquet",
        "results/r",
        ".git/c",
        ".venv/v",
    ):
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        (checkout / file).write_text("content")
    for name in ("submit_ray.sh", "manifest.py"):
        shutil.copy(ROOT / "recipes" / name, checkout / "recipes")
    command = [
        "bash",
        str(checkout / "recipes" / "submit_ray.sh"),
        "cuda 2 8 metrics",
        "--dry-run",
        "demo",
        "arm=token",
    ]
    result = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=60)
    runtime_env = runtime_environment(result.stdout)
    assert runtime_env["working_dir"] == str(checkout)
    package = tmp_path / "package.zip"
    packaging.create_package(str(checkout), package, include_gitignore=True, excludes=runtime_env["excludes"])
    names = {name for name in zipfile.ZipFile(package).namelist() if not name.endswith("/")}
    assert names == {"recipes/submit_ray.sh", "recipes/manifest.py", "verl_ba/paper/data/build.py"}


def test_a_ray_jobs_paths_are_the_clusters(slurm):
    result = submit("ray", {**slurm, "MODEL_DIR": "models"}, "--dry-run", "demo", "arm=token")
    assert result.returncode == 2
    assert "MODEL_DIR=models: expected an absolute path" in result.stderr


def ray_processes(session: str) -> list[str]:
    """Command lines of the processes of one real Ray, told by its folder."""
    found = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    return [" ".join(words) for words in found if any(session in word for word in words)]


@pytest.mark.trainer
def test_a_job_with_a_real_ray_sees_both_nodes_and_leaves_nothing(slurm, tmp_path):
    slurm["SLURM_JOB_ID"] = job_id = f"test-{os.getpid()}"
    folder = Path(f"/tmp/ray-{job_id}")  # the job's; sockets need a short path
    look = "import ray; ray.init(); print('seen', int(ray.cluster_resources()['GPU']), len(ray.nodes()))"
    try:
        result = subprocess.run(
            ["bash", str(JOB), "4", sys.executable, "-c", look], env=slurm, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr[-4000:]
        assert "seen 8 2" in result.stdout
        assert folder.exists(), "the folder by which the next line finds processes"
        assert not ray_processes(str(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def real_ray():
    """A Ray that runs already, with a server for jobs: its address, and the environment to reach it."""
    folder, port = Path(f"/tmp/ray-test-{os.getpid()}-jobs"), free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--temp-dir={folder}"]
    command += [f"--port={free_port()}", f"--dashboard-port={port}", f"--ray-client-server-port={free_port()}"]
    command += ["--num-gpus=2", "--num-cpus=10", "--dashboard-agent-listen-port=0", "--disable-usage-stats"]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": f"http://127.0.0.1:{port}"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "block forever" in line:
            break
    yield environment
    process.terminate()
    process.communicate(timeout=60)
    shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.trainer
@pytest.mark.deep
def test_a_ray_job_trains_with_the_uploaded_package(real_ray, tmp_path):
    """Entry points are off, as on nodes where the package is not installed. Two variables go to job and workers alike."""
    paths = prepare(ROOT / ".cache")
    environment = {**real_ray, "RESULTS_DIR": str(tmp_path), "PYTHON": sys.executable}
    environment |= {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "verl_cpu.plugin"}
    environment |= {"SANDBOX_FUSION_URL": "http://127.0.0.1:9/run_code", "VERL_FULL_DETERMINISM": "0"}
    files = [f"data.train_files={paths['train'].resolve()}", f"data.val_files={paths['validation'].resolve()}"]
    overrides = [*files, f"actor_rollout_ref.model.path={paths['model'].resolve()}", "trainer.total_training_steps=2"]
    command = ["bash", str(LAUNCH), "demo", "balanced", "--via", "ray", *overrides]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    job = re.search(r"^job (\S+); log: ray job logs", result.stdout, re.M)
    assert job, result.stdout
    job_id = job[1]
    jobs = [sys.executable, "-m", "ray.scripts.scripts", "job"]
    subprocess.run([*jobs, "logs", "--follow", job_id], env=environment, stdout=subprocess.DEVNULL, timeout=600)
    log = subprocess.run([*jobs, "logs", job_id], env=environment, capture_output=True, text=True, timeout=60).stdout
    assert "[verl_ba] rank 0: actor_rollout_ref.actor.loss_agg_mode=balanced" in log, log[-4000:]
    (metrics,) = (tmp_path / "demo" / "balanced-seed1" / "metrics").glob("*.jsonl")
    (start,) = json.loads((tmp_path / "demo" / "balanced-seed1" / "manifest.json").read_text())["starts"]
    assert re.fullmatch("[0-9a-f]{40}", start["git"]["revision"])  # of the checkout that was sent
    losses = [json.loads(line)["data"].get("actor/pg_loss") for line in metrics.read_text().splitlines()]
    assert [abs(loss) <= 1e-6 for loss in losses if loss is not None] == [True, True]
