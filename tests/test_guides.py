# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The guides of the documentation: found by what users type, and run line by line as they stand.

A command runs in an empty folder with the files that the guide speaks of, with flags behind it that
make it small. Names on the hub are in a cache of models that are small. The Python blocks run in
`tests/test_documentation.py`.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import tomllib

import httpx2 as httpx
import pytest

from tests.experiments.test_readme_walk import ANSWERS, ENGINE, HELD_OUT, STEPS
from tests.experiments.test_walk import QUIET, SIZES
from tests.support.documented import environment, shell_lines
from tests.support.documented_files import CHATS, write_hub
from tests.support.source_tree import PACKAGES, ROOT

FOLDER = ROOT / ".docs" / "guides"
GUIDES = {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.md"))}
INDEX = GUIDES.pop("index")
WORD = re.compile(r"[a-z0-9]+")

QUERIES = {
    "train_on_your_files": ["train own data", "train on files", "pre-train from scratch"],
    "load_a_model": ["load Mixtral", "Qwen3", "gpt-oss", "Hugging Face model", "load pretrained"],
    "finetune_on_chats": ["fine-tune", "LoRA", "SFT", "instruction tuning", "chat template"],
    "reinforcement_learning": ["reinforcement", "GRPO", "RL", "reward function"],
    "serve_and_call": ["serve", "OpenAI API", "chat completions", "curl", "HTTP endpoint"],
    "gpus_and_tpus": ["GPU", "multi-GPU", "TPU pod", "multi-node", "Slurm"],
    "tune_once": ["tune learning rate", "muP", "hyperparameter transfer"],
    "your_own_router": ["custom router", "own router", "add router", "gating function"],
    "moe_layer": ["MoE layer", "Flax", "NNX", "Equinox", "Linen"],
    "muon_in_optax": ["Muon", "muonh optax", "optax optimizer", "optax chain"],
}
"""What users type into the search, by the guide that answers."""


def stem(word):
    """A word without the endings that the search of the site drops."""
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) > 2:
            return word.removesuffix(ending)
    return word.removesuffix("e") if len(word) > 3 else word


def stems(text):
    return {stem(word) for word in WORD.findall(text.lower())}


def pages():
    """Title and words of every page of the site that is written by hand, by its place."""
    paths = [path for path in (ROOT / ".docs").rglob("*.md") if "generated" not in path.parts]
    paths += [path for package in PACKAGES for path in (ROOT / package).rglob("README.md")]
    texts = {path: path.read_text("utf-8") for path in paths if "_build" not in path.parts}
    return {path: (stems(text.split("\n")[0]), stems(text)) for path, text in texts.items()}


PAGES = pages()


@pytest.mark.parametrize("guide", GUIDES)
def test_the_search_shows_a_guide_for_the_words_that_users_type(guide):
    """As the search of Sphinx: a page has all words; those in a title count 15, others 5."""
    for query in QUERIES[guide]:
        words = stems(query)
        scores = {
            path: sum(15 if word in title else 5 for word in words)
            for path, (title, text) in PAGES.items()
            if words <= title | text
        }
        score = scores.pop(FOLDER / f"{guide}.md", 0)
        better = [str(path.relative_to(ROOT)) for path, other in scores.items() if other > score]
        assert score and len(better) < 3, (query, score, better)


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_is_one_screen_with_commands_and_an_answer(guide):
    text = GUIDES[guide]
    assert len(text.splitlines()) <= 90, "more than a screen"
    blocks = re.findall(r"^```(\w+)$", text, re.MULTILINE)
    assert {"sh", "python"} & {*blocks}
    ending = text[len(text) // 2 :]
    has_picture = re.search(r"!\[.+?\]\((.+?)\)", ending)
    assert has_picture or re.search(r"^```(text|python)$|^\| -", ending, re.MULTILINE), "no answer"
    if has_picture:
        assert (FOLDER / has_picture[1]).exists()


@pytest.fixture(scope="module")
def indexes(tmp_path_factory):
    """The text of every index of the site by its place, those that a build writes included."""
    folder = tmp_path_factory.mktemp("generated")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / ".docs"))
        import flag_tables
        import package_pages
        import reference_pages
    package_pages.write(ROOT, folder / "packages")
    reference_pages.write(ROOT, folder / "reference")
    flag_tables.write(folder / "flags")
    places = [path for path in (ROOT / ".docs").rglob("index.md")]
    written = [path for path in places if not {"_build", "generated"} & {*path.parts}]
    return {str(path): path.read_text("utf-8") for path in [*written, *folder.rglob("index.md")]}


def test_an_index_has_a_line_for_each_of_its_pages(indexes):
    assert len(indexes) == 7
    for place, text in indexes.items():
        tree = re.search(r"^```{toctree}\n(?::.*\n)*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        lines = dict(re.findall(r"^\| \[[^\]]+\]\((.+?)\.\w+\) \| (.+) \|$", text, re.MULTILINE))
        assert [*lines] == tree[1].split(), place
        short = [page for page, line in lines.items() if len(line) < 12]
        assert not short, (place, short)


def commands(guide):
    """The lines of the shell blocks of a guide, as words."""
    return [shlex.split(line, comments=True) for line in shell_lines(GUIDES[guide])]


def small(words, folder):
    """The flags that make a command small."""
    sizes = (*SIZES, *QUIET, "--training.sequence_length", "64", "--schedule.warmup_steps", "0")
    return {
        "pretrain": (*sizes, "--training.steps", "2", "--training.accumulation", "1"),
        "data": (),
        "generate": ("--length", "4"),
        "evaluate": (),
        "describe": (),
        "checkpoint": (),
        "finetune": (*STEPS, *HELD_OUT, *QUIET),
        "rl": (*STEPS, *HELD_OUT, *QUIET, *ANSWERS),
        "serve": ("--port", "0", *ENGINE),
        "doctor": (),
        "plan": ("--compiles", "0"),
        "launch": (),
        "transfer": TRANSFER,
    }[words[1]]


TRANSFER = (
    *("--points", "16", "32", "--arms", "standard", "--rates", "0.01", "0.02", "0.04"),
    *(
        "--budget",
        "None",
        "--seeds",
        "1",
        "--extend",
        "0",
        "--training.steps",
        "2",
        "--training.batch_size",
        "2",
    ),
)


def write_files(folder):
    """Write what the guides speak of: documents, chats, questions, a reward, a router."""
    (folder / "docs").mkdir()
    for number in range(24):
        text = "\n\n".join(list(GUIDES.values())[number % len(GUIDES)].split("\n\n")[number % 5 :])
        (folder / "docs" / f"{number}.md").write_text(text)
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    questions = [{"prompt": chat["prompt"], "answer": chat["completion"]} for chat in CHATS]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (folder / "rewards.py").write_text("def score(question, text):\n    return len(text) / 99\n")
    page = GUIDES["your_own_router"]
    project = tomllib.loads(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])
    entries = project["project"]["entry-points"]["jaxmoe.catalog"]
    site = folder / "site"
    site.mkdir()
    (site / "my_router.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    metadata = site / "my_router-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-router\nVersion: 0.1.0\n")
    rows = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (metadata / "entry_points.txt").write_text(f"[jaxmoe.catalog]\n{rows}\n")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A folder with the files of all guides and the run of the demo, small."""
    folder = tmp_path_factory.mktemp("guides")
    write_files(folder)
    write_hub(folder / "cache")
    _run(["jaxmoe", "pretrain"], folder)
    return folder


def _environment(folder, devices):
    """The package with the router is installed in the folder `site`."""
    variables = environment(devices, HF_HOME=str(folder / "cache"))
    path = os.pathsep.join([variables["PYTHONPATH"], str(folder / "site")])
    return variables | {"PYTHONPATH": path}


def _run(words, folder, devices=1):
    done = subprocess.run(
        [*words, *small(words, folder)],
        cwd=folder,
        env=_environment(folder, devices),
        input="1+5=\n",
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout + done.stderr


def check_install(words):
    """Raise if an extra of a line of pip is not there."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = re.search(r"\[(.+)\]", words[-1])[1].split(",")
    assert words[:3] == ["pip", "install", "-e"] and {*named} <= {*extras}, words


@contextlib.contextmanager
def _serving(words, folder):
    """Yield the address of an endpoint."""
    with subprocess.Popen(
        [*words, *small(words, folder)],
        cwd=folder,
        env=_environment(folder, 1),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        with contextlib.ExitStack() as stack:
            stack.callback(server.send_signal, signal.SIGINT)
            lines = iter(server.stdout.readline, "")
            line = next((line for line in lines if line.startswith("next: ")), "")
            yield re.search(r"http://[\d.]+:\d+", line)[0]
    assert server.returncode == 0


@pytest.mark.slow
@pytest.mark.rows(8)
@pytest.mark.parametrize("guide", [guide for guide in GUIDES if shell_lines(GUIDES[guide])])
def test_the_commands_of_a_guide_run_as_they_stand(guide, demo):
    devices = 8 if guide == "gpus_and_tpus" else 1
    with contextlib.ExitStack() as stack:
        address = None
        for words in commands(guide):
            if words[0] == "pip":
                check_install(words)
            elif words[0] == "curl":
                url = words[1].replace("http://127.0.0.1:8000", address)
                if len(words) == 2:
                    answer = httpx.get(url, timeout=120)
                else:
                    answer = httpx.post(url, content=words[3], timeout=120)
                assert answer.status_code == 200, answer.text
            elif words[:2] == ["jaxmoe", "serve"]:
                address = stack.enter_context(_serving(words, demo))
            else:
                _run(words, demo, devices)
