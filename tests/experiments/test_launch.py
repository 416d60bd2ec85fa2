# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The files for Slurm, GKE and TPU VMs: as their readers parse them; what is refused."""

import json
import os
import pathlib
import re
import shlex
import stat
import subprocess

import pytest

from experiments.cli.flags import ExitCode, parse_flags
from experiments.launch import __main__ as launch
from experiments.launch import sites, supervise
from experiments.launch.config import CLUSTERS, LaunchConfig, LaunchRunConfig

TRICKY = (
    "python -m experiments.pretrain d12 --run.directory '/runs/it'\"'\"'s here' --x '$(touch bad)'"
)

GIVEN = {
    "slurm": {"nodes": 4, "gpus_per_node": 2},
    "jobset": {"topology": "4x4", "slices": 2, "image": "a/b:c", "volume_claim": "runs"},
    "tpu_vm": {"accelerator_type": "v5litepod-16", "zone": "us-central1-a"},
}


def config(cluster: str, command: str = TRICKY, **fields) -> LaunchConfig:
    where = CLUSTERS[cluster](**{**GIVEN[cluster], **fields})
    return LaunchConfig(command=command, cluster=where, run=LaunchRunConfig(name="job-1"))


def text_of(cluster: str, **options) -> str:
    launch_config = config(cluster, **options)
    (text,) = launch_config.cluster.files(launch_config.job).files.values()
    return text


def fake(directory: pathlib.Path, name: str, body: str) -> None:
    """A program of that name."""
    path = directory / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run(script: str, tmp_path: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script among fake programs, which come first on the PATH."""
    (tmp_path / "script").write_text(script)
    return subprocess.run(
        ["bash", str(tmp_path / "script"), *arguments],
        env={
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "77",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


PRINTS = r'printf "%s\n" "$@"'


def test_every_cluster_is_here():
    assert set(GIVEN) == set(CLUSTERS)


@pytest.mark.parametrize("cluster", ["slurm", "tpu_vm"])
def test_scripts_are_bash(cluster, tmp_path):
    (tmp_path / "script").write_text(text_of(cluster))
    subprocess.run(["bash", "-n", str(tmp_path / "script")], check=True)


def test_slurm_runs_the_command_as_it_was_given(tmp_path):
    fake(tmp_path, "srun", PRINTS)
    result = run(text_of("slurm", setup="echo ready"), tmp_path)
    assert result.returncode == 0, result.stderr
    ready, flag, *words = result.stdout.splitlines()
    assert (ready, flag) == ("ready", "--kill-on-bad-exit=0")
    assert words == shlex.split(TRICKY)
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(("code", "requeued"), [(0, ""), (2, ""), (3, ""), (75, "requeue 77")])
def test_slurm_starts_again_what_was_preempted(code, requeued, tmp_path):
    fake(tmp_path, "srun", f"exit {code}")
    fake(tmp_path, "scontrol", 'echo "$@"')
    result = run(text_of("slurm", setup=""), tmp_path)
    assert (result.returncode, result.stdout.strip()) == (code, requeued)


def test_slurm_options():
    lines = text_of("slurm", partition="gpu", time="1-00:00:00").splitlines()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", "\n".join(lines), re.M))
    assert options == {
        "job-name": "job-1",
        "nodes": "4",
        "ntasks-per-node": "2",
        "gpus-per-node": "2",
        "time": "1-00:00:00",
        "partition": "gpu",
        "signal": "TERM@300",
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    assert "gpus-per-node" not in text_of("slurm", gpus_per_node=0)
    assert "--ntasks-per-node=1" in text_of("slurm", gpus_per_node=0)


def test_jobset_is_the_yaml_it_should_be():
    import yaml  # comes with flax

    found = yaml.safe_load(text_of("jobset"))
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert found["metadata"]["name"] == "job-1"
    (replicated,) = found["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 2
    job = replicated["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0)
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"operator": "In", "values": [2, 3]}
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    (container,) = pod["containers"]
    assert container["command"] == shlex.split(TRICKY)
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert container["volumeMounts"] == [{"name": "runs", "mountPath": "/runs"}]
    assert pod["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}]


def test_tpu_vm_runs_the_command_on_every_host(tmp_path):
    fake(tmp_path, "gcloud", PRINTS)
    result = run(text_of("tpu_vm"), tmp_path, "run")
    assert result.returncode == 0, result.stderr
    words = result.stdout.splitlines()
    assert words[:5] == ["compute", "tpus", "tpu-vm", "ssh", "job-1"]
    assert "--worker=all" in words and "--zone=us-central1-a" in words
    remote = words[-1].removeprefix("--command=")
    # What the shell of the host makes of it.
    (tmp_path / "job-1").mkdir()
    fake(tmp_path, "python", f'[ "$1" = -c ] && exit; echo "$JAX_NUM_PROCESSES"; {PRINTS}')
    there = run(f"cd {tmp_path}; {remote}", tmp_path)
    assert there.stdout.splitlines() == ["4", *shlex.split(TRICKY)[1:]]
    fake(tmp_path, "python", "exit 1")
    there = run(f"cd {tmp_path}; {remote}", tmp_path)
    assert there.returncode == 2 and there.stdout == ""
    assert ": python is missing or older than Python 3.11: choose" in there.stderr


def test_tpu_vm_leaves_environments_and_runs_behind(tmp_path):
    for name in ("jaxmoe/a.py", "jaxmoe/__pycache__/a.pyc", ".venv/x", "runs/x", "tests/runs/y"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text("x")
    (tmp_path / "host").mkdir()
    # The host: what is copied lies in its folder, and commands run there.
    fake(
        tmp_path,
        "gcloud",
        f"""cd {tmp_path}/host
        case $4 in scp) cp "$5" "${{6#*:}}" ;; ssh) bash -c "${{@: -1:1}}" --command= ;; esac""",
    )
    text = text_of("tpu_vm", setup="python3 -m pip > installed").replace("--command=", "")
    fake(tmp_path, "python3", f'[ "$1" = -c ] && exit {{code}}; {PRINTS}'.format(code=0))
    result = run(f"cd {tmp_path}/tree\n{text}", tmp_path, "copy")
    assert result.returncode == 0, result.stderr
    host = tmp_path / "host"
    files = {str(p.relative_to(host)) for p in host.rglob("*") if p.is_file()}
    assert files == {"job-1/jaxmoe/a.py", "job-1/tests/runs/y", "job-1/installed"}
    fake(tmp_path, "python3", "exit 1")
    result = run(f"cd {tmp_path}/tree\n{text}", tmp_path, "copy")
    assert result.returncode == 2 and "python3 is missing or older than" in result.stderr


def test_tpu_vm_creates_copies_and_says_how_it_is_used(tmp_path):
    fake(tmp_path, "gcloud", 'echo "$@"')
    fake(tmp_path, "tar", "exit 0")
    made = run(text_of("tpu_vm", project="p"), tmp_path, "create").stdout.splitlines()
    assert made[0] == (
        "compute tpus tpu-vm create job-1 --zone=us-central1-a --project=p"
        " --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite"
    )
    assert [line.split()[3] for line in made] == ["create", "ssh", "scp", "ssh"]
    unknown = run(text_of("tpu_vm"), tmp_path, "start")
    assert unknown.returncode == 2 and unknown.stdout.startswith("Usage: tpu_vm.sh create | copy")


@pytest.mark.parametrize(
    ("cluster", "fields", "hosts"),
    [
        ("slurm", {"nodes": 3}, 3),
        ("jobset", {"accelerator": "v5p", "topology": "4x4x8", "slices": 1}, 32),
        ("jobset", {"topology": "2x2", "slices": 3}, 3),
        ("jobset", {"topology": "1x1", "slices": 1}, 1),
        ("tpu_vm", {"accelerator_type": "v5litepod-8"}, 1),
        ("tpu_vm", {"accelerator_type": "v6e-256"}, 64),
        ("tpu_vm", {"accelerator_type": "v4-32"}, 4),
        ("tpu_vm", {"accelerator_type": "v4-8"}, 1),
    ],
)
def test_hosts(cluster, fields, hosts):
    assert config(cluster, **fields).cluster.num_hosts == hosts


REFUSED = {
    "cluster.nodes=0 must be at least 1": ("slurm", {"nodes": 0}),
    "cluster.time='1 day' is not [days-]hours:minutes:seconds, such as 24:00:00": (
        "slurm",
        {"time": "1 day"},
    ),
    "cluster.partition='a b' is not a name that Slurm accepts": ("slurm", {"partition": "a b"}),
    "cluster.topology=4x4 must be 3 sizes for v5p, such as 4x4x4": (
        "jobset",
        {"accelerator": "v5p"},
    ),
    "cluster.topology=3x3 has 9 chips, which must be divisible by the 4 of a host: choose another"
    " topology": ("jobset", {"topology": "3x3"}),
    "cluster.image must be given: the container that holds this repository": (
        "jobset",
        {"image": ""},
    ),
    "the 8 hosts of cluster.topology=4x4 x cluster.slices=2 write one run directory: give"
    " cluster.volume_claim, a PersistentVolumeClaim that all can write": (
        "jobset",
        {"volume_claim": None},
    ),
    "command has --run.directory runs/a, which would lie on each host's own disk: give one beneath"
    " /runs/, where the volume is mounted": ("jobset", {"command": "c --run.directory=runs/a"}),
    "command has no --run.directory, which would lie on each host's own disk: give one beneath /,"
    " that all hosts have mounted": ("tpu_vm", {"command": "python -m experiments.pretrain"}),
    "cluster.zone must be given, such as us-central1-a": ("tpu_vm", {"zone": ""}),
    "cluster.accelerator_type=v9-8 is unknown: give a kind (v2, v3, v4, v5litepod, v5p, v6e) and a"
    " size, such as v5litepod-16": ("tpu_vm", {"accelerator_type": "v9-8"}),
    "cluster.accelerator_type=v4-12 has 6 chips, which must be divisible by the 4 of a host": (
        "tpu_vm",
        {"accelerator_type": "v4-12"},
    ),
    'command is empty: give it, such as "jaxmoe pretrain"': (
        "slurm",
        {"command": " "},
    ),
    'command="it\'s" does not end (No closing quotation): quote it': (
        "slurm",
        {"command": "it's"},
    ),
}


@pytest.mark.parametrize(
    ("cluster", "field"),
    [
        *(("tpu_vm", field) for field in ("zone", "project", "runtime_version")),
        *(("jobset", field) for field in ("image", "volume_claim")),
        *(("slurm", field) for field in ("partition", "account", "time")),
    ],
)
@pytest.mark.parametrize("value", ["a\ntouch bad", "a\r", "a\x1b[0m", "-a", "a b", "$(touch bad)"])
def test_a_name_in_a_launch_file_is_one_word(cluster, field, value):
    with pytest.raises(ValueError, match=rf"^cluster\.{field}=.* is not "):
        config(cluster, **{field: value})


def test_a_launch_file_has_no_control_characters():
    with pytest.raises(ValueError, match="^command='c .x1b' has a control character: remove it$"):
        config("slurm", command="c \x1b")
    for cluster in ("slurm", "tpu_vm"):
        with pytest.raises(ValueError, match="^cluster.setup='a.*b' has a control character"):
            config(cluster, setup="a\x00b")
    for cluster, field in (("jobset", "topology"), ("tpu_vm", "accelerator_type")):
        with pytest.raises(ValueError, match=f"^cluster.{field}='4.*x1b' is not a name that G"):
            config(cluster, **{field: "4\n4\x1b"})
    with pytest.raises(ValueError, match="^run.directory='a.*ud800' has a control character"):
        LaunchRunConfig(directory="a\ud800")
    with pytest.raises(ValueError, match="^run.directory='a.nb' has a control character"):
        LaunchRunConfig(directory="a\nb")


def test_a_line_break_in_the_command_stays_in_its_word(tmp_path):
    fake(tmp_path, "srun", r'printf "%q\n" "$@"')
    words = run(text_of("slurm", command="c 'x\ny'", setup=""), tmp_path).stdout.splitlines()
    assert words[1:] == ["c", r"$'x\ny'"]


@pytest.mark.parametrize("cluster", GIVEN)
def test_the_line_that_starts_a_job_is_quoted(cluster, tmp_path):
    for program in ("sbatch", "kubectl", "bash"):
        fake(tmp_path, program, PRINTS)
    launch_config = config(cluster)
    written = launch_config.cluster.files(launch_config.job)
    (file,) = written.files
    for directory in ("it's $(touch bad); {here} *", "-x"):
        started = subprocess.run(
            ["/bin/bash", "-c", written.start_in(directory)],
            env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        path = f"./{directory}" if directory == "-x" else directory
        assert f"{path}/{file}" in started.stdout.splitlines()
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_launched_is_refused_in_words(text):
    cluster, options = REFUSED[text]
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        config(cluster, **options)


def test_names_that_no_cluster_takes_are_refused():
    with pytest.raises(ValueError, match="^run.name='My_Job' must be 1 to 40 lower-case letters"):
        LaunchRunConfig(name="My_Job")


def test_the_command(tmp_path, capsys):
    directory = tmp_path / "files"
    arguments = ("--run.directory", str(directory), "cluster:slurm", "--cluster.nodes", "2")
    assert launch.main([*arguments, "--command", "jaxmoe pretrain d8"]) == 0
    printed = capsys.readouterr().out
    assert f"wrote {directory / 'job.sbatch'}" in printed and "2 hosts, 16 processes" in printed
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], summary["cluster"], summary["hosts"]) == ("done", "slurm", 2)
    assert summary["start"] == f"sbatch {directory}/job.sbatch"
    assert "srun --kill-on-bad-exit=0 jaxmoe pretrain d8" in (directory / "job.sbatch").read_text()


def test_a_second_launch_replaces_nothing_silently(tmp_path, capsys):
    arguments = ("--run.directory", str(tmp_path / "files"), "cluster:slurm", "--cluster.nodes")
    assert launch.main([*arguments, "2"]) == 0
    written = (tmp_path / "files" / "job.sbatch").read_text()
    assert launch.main([*arguments, "2"]) == 0  # the same file
    with pytest.raises(SystemExit) as stopped:
        launch.main([*arguments, "3"])
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    error = capsys.readouterr().err
    assert "job.sbatch is of another launch" in error and "--run.replace True" in error
    assert (tmp_path / "files" / "job.sbatch").read_text() == written
    assert launch.main([*arguments, "3", "--run.replace", "True"]) == 0
    assert (tmp_path / "files" / "job.sbatch").read_text() != written


@pytest.mark.parametrize("index", range(5))
def test_the_examples_of_the_help_work(index, tmp_path, monkeypatch, capsys):
    examples = re.findall(r"^    jaxmoe launch ((?:.*\\\n)*.*)", launch.__doc__ or "", re.M)
    assert len(examples) == 5
    words = shlex.split(examples[index].replace("\\\n", " "))
    started = []
    monkeypatch.setattr(launch.supervise, "main", lambda words: started.append(words) or 0)
    started_sites = []
    monkeypatch.setattr(sites, "main", lambda words: started_sites.append(words) or 0)
    assert launch.main([*words, "--run.directory", str(tmp_path / "files")]) == 0
    if started_sites:
        config = parse_flags(sites.SitesConfig(), started_sites[0], "p", "d")
        assert config.islands == 4
    elif started:
        config = parse_flags(supervise.SuperviseConfig(), started[0], "p", "d")
        assert config.processes == 4
    else:
        assert "start it with" in capsys.readouterr().out


def test_a_bad_configuration_ends_with_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        launch.main(["--run.directory", str(tmp_path), "cluster:jobset"])
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    assert "cluster.image must be given" in capsys.readouterr().err
