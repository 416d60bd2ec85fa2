# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The lm-evaluation-harness on a run: the same answers as its own model over transformers gives for
the exported one. Local tasks; nothing is downloaded."""

import json
import pathlib

import httpx2 as httpx
import jax
import pytest

from experiments.checkpoint import __main__ as checkpoint
from experiments.cli.flags import ExitCode
from experiments.evaluate_tasks import __main__ as evaluate_tasks
from experiments.evaluate_tasks.harness import answer_of, harness_model, text_tokens
from jaxmoe.data import CorpusConfig, TextOnlyConfig
from jaxmoe.data.tokenizer import FileConfig
from jaxmoe.run.load import load_run
from jaxmoe.run.serving import ServedCheckpoint, open_served
from jaxmoe.serve.http.app import Endpoint
from jaxmoe.serve.sizes import EngineSizesConfig
from jaxmoe.training.score import Scorer
from tests.experiments.test_convert_huggingface import (
    model_of,
    new_run,
    refused,
    trained_vocabulary,
)
from tests.support.endpoint import answering
from tests.support.sentencepiece_tokenizers import BEGIN, END, write_sentencepiece

TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "whole": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "word3"
generation_kwargs: {until: [" and "], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def documents():
    """Texts of odd lengths, some longer than the model reads."""
    for number in range(7):
        yield {
            "question": "word3 and 5 " * (number * number) + f"word{number % 7}",
            "choices": [" and 5", " word2 and", " 11 and word1 and 9"],
            "answer": number % 3,
            "text": f"word{number % 5} and {number} " * (1 + 6 * number),
        }


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A directory of tasks."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: extra lm-eval")
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = "".join(json.dumps(document) + "\n" for document in documents())
    (folder / "documents.jsonl").write_text(lines)
    for name, text in TASKS.items():
        head = f"task: own_{name}\ndataset_path: json\ntest_split: train\n"
        kwargs = f"dataset_kwargs: {{data_files: {folder / 'documents.jsonl'}}}\n"
        cache = "dataset_name: null\n"
        (folder / f"{name}.yaml").write_text(head + cache + kwargs + text)
    return folder


def test_texts_of_imported_models_begin_as_their_tokenizer_begins_them(tmp_path):
    """With <s> before a context, once, and never before a continuation alone."""
    place = write_sentencepiece(tmp_path / "words")
    text = text_tokens(TextOnlyConfig(tokenizer=FileConfig(path=str(place))).build())
    whole, context = text.encode("hello world"), text.encode("hello")
    assert text.begin == (1,) and whole[0] == context[0] == 1 and 1 not in whole[1:]
    assert whole[: len(context)] == context  # what follows is the continuation
    assert text.encode_rest("hello world") == whole[1:]
    assert text.encode("<s>hello") == context
    plain = write_sentencepiece(tmp_path / "plain", has_bos=False)
    other = text_tokens(TextOnlyConfig(tokenizer=FileConfig(path=str(plain))).build())
    assert other.begin == () and other.encode("hello") == context[1:] == other.encode_rest("hello")


def test_answers_end_at_each_of_the_ids_that_end_a_text():
    text = text_tokens(CorpusConfig().build(), (ord("#"),))
    for end in (0, ord("#")):
        assert end in text.stop_ids
        assert answer_of(text, [*b"42", end, *b" more", 0], ("\n",)) == "42"
    assert answer_of(text, list(b"4\n2"), ("\n",)) == "4"


def test_evaluate_tasks_refuses_ids(tmp_path, capsys):
    source = CorpusConfig().build()
    text = text_tokens(source)
    assert text.encode("\u00df\n") == [0xC3, 0x9F, 10] and text.decode([0xC3, 0x9F]) == "\u00df"
    from experiments.recipes.markov import markov

    with pytest.raises(ValueError, match="the data of this run is token ids"):
        text_tokens(markov().data.build())
    assert "tasks is empty" in refused(capsys, evaluate_tasks.main, "--run.directory", "none")
    nowhere = ("--run.directory", "none", "--to", str(tmp_path / "none" / "results.json"))
    assert "its directory does not exist, make it first" in refused(
        capsys, evaluate_tasks.main, *nowhere
    )


def with_begin(place):
    """Give a model on disk a tokenizer like SentencePiece's, which puts <s> before a text."""
    write_sentencepiece(place)
    names = {"bos_token": BEGIN, "eos_token": END}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((place / "config.json").read_text())
    config |= {"bos_token_id": 1, "eos_token_id": 2}
    (place / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the harness's own
@pytest.mark.parametrize("has_begin", [False, True], ids=["run", "imported with <s>"])
def test_evaluate_tasks_equals_transformers_harness(has_begin, tasks, tmp_path, caplog, capsys):
    """Log-likelihoods, greedy flags, rolling ones and texts, request by request.

    Of a run whose documents begin with the separator, and of a model whose tokenizer puts <s>
    before a text, once, and marks words by the space before them.
    """
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")
    transformers = pytest.importorskip("transformers", reason="not installed: extra hf")
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: extra lm-eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    data = trained_vocabulary(tmp_path)
    run = new_run(tmp_path / "run", data, model_of(400 if has_begin else 300))
    place = str(tmp_path / "hf")
    given = ("--to_huggingface", "auto", "--exported.max_length", "48", "--to", place)
    assert checkpoint.main(["convert", "--run.directory", run, *given]) == ExitCode.DONE
    if has_begin:
        with_begin(pathlib.Path(place))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = HFLM(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(place, **eager),
        tokenizer=transformers.AutoTokenizer.from_pretrained(place),
        device="cpu",
        dtype=torch.float32,
        batch_size=4,
        max_length=48,
    )
    assembly, state, _ = load_run(place if has_begin else run, None, needs_data=not has_begin)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    names = [f"own_{name}" for name in TASKS]

    def asked(model):
        results = lm_eval.simple_evaluate(
            model=model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True
        )
        return results["results"], results["samples"]

    with jax.set_mesh(assembly.mesh):
        scorer = Scorer(
            assembly.plan.model, state.params, max_length=48, execution=assembly.execution
        )
        text, executor_of = text_tokens(assembly.source), evaluate_tasks.executor_of
        ours, samples = asked(harness_model(scorer, text))
        _, together = asked(harness_model(scorer, text, executor_of(assembly, state, scorer)))
    for one, other in zip(samples["own_answers"], together["own_answers"], strict=True):
        assert one["resps"] == other["resps"], "the engine writes what the scorer does"
    wanted, wanted_samples = asked(theirs)
    assert "the start of their context is cut off" in caplog.text
    flags = []
    for name in names:
        for one, other in zip(samples[name], wanted_samples[name], strict=True):
            if name == "own_answers":
                assert one["resps"] == other["resps"]
                continue
            for mine, its in zip(one["resps"], other["resps"], strict=True):
                mine, its = (x[0] if isinstance(x, list) else x for x in (mine, its))
                if name == "own_whole":
                    assert mine == pytest.approx(its, abs=1e-3, rel=1e-6)
                    continue
                assert mine[0] == pytest.approx(its[0], abs=1e-4)
                assert mine[1] == its[1]
                flags.append(mine[1])
        numbers = {key: value for key, value in ours[name].items() if isinstance(value, float)}
        assert numbers and all(
            value == pytest.approx(wanted[name][key], rel=1e-4) for key, value in numbers.items()
        )
    assert flags

    more = ("--include", str(tasks), "--max_length", "48", "--to", str(tmp_path / "found.json"))
    source = place if has_begin else run
    command = ["--run.directory", source, "--tasks", "own_choices", *more]
    assert evaluate_tasks.main(command) == ExitCode.DONE
    assert "own_choices" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())["results"]["own_choices"]
    assert found["acc,none"] == ours["own_choices"]["acc,none"]
    # The exported directory itself, without a run.
    assert evaluate_tasks.main(["--run.directory", place, *command[2:]]) == ExitCode.DONE
    again = json.loads((tmp_path / "found.json").read_text())["results"]["own_choices"]
    assert again["acc,none"] == found["acc,none"]
    unknown = refused(capsys, evaluate_tasks.main, *command, "--tasks", "own_choicez")
    assert "the harness has no task own_choicez" in unknown


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the harness's own
def test_the_clients_of_the_harness_get_the_numbers_of_evaluate_tasks(tasks, tmp_path):
    """`local-completions` and `local-chat-completions`, unchanged, pointed at the endpoint.

    They count the token that a server writes behind a scored text, which leaves them one less of
    its length than a model in the process has.
    """
    pytest.importorskip("transformers", reason="not installed: extra hf")
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: extra lm-eval")
    from lm_eval.tasks import TaskManager

    run = new_run(tmp_path / "run", trained_vocabulary(tmp_path), model_of(300))
    place = str(tmp_path / "hf")
    given = ("--to_huggingface", "auto", "--exported.max_length", "50", "--to", place)
    assert checkpoint.main(["convert", "--run.directory", run, *given]) == ExitCode.DONE
    assembly, state, _ = load_run(run, None)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)

    def asked(model, tasks=("own_choices", "own_answers"), **options):
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=[*tasks],
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=True,
            **options,
        )
        return results["results"], results["samples"]

    with jax.set_mesh(assembly.mesh):
        scorer = Scorer(
            assembly.plan.model, state.params, max_length=48, execution=assembly.execution
        )
        executor = evaluate_tasks.executor_of(assembly, state, scorer)
        model = harness_model(scorer, text_tokens(assembly.source), executor)
        wanted, wanted_samples = asked(model)
    sizes = EngineSizesConfig(max_sequences=2, max_length=50, pieces=("1x16",), num_logprobs=1)
    served = open_served(ServedCheckpoint(path=place, name="model", template="plain"), sizes)
    options = {"model": "model", "max_length": 50, "num_concurrent": 2}
    with answering(Endpoint(served), served.engine) as address:
        url = f"{address}/v1/completions"
        ours, samples = asked(
            "local-completions",
            model_args=options | {"base_url": url, "tokenizer": place, "truncate": True},
        )
        url = f"{address}/v1/chat/completions"
        _, talks = asked(
            "local-chat-completions",
            ("own_answers",),
            model_args=options | {"base_url": url},
            apply_chat_template=True,
            limit=3,  # the others do not fit into the model, and this client cuts none
        )
        assert ours["own_choices"]["acc,none"] == wanted["own_choices"]["acc,none"]
        for one, other in zip(samples["own_choices"], wanted_samples["own_choices"], strict=True):
            for (mine, greedy), (its, its_greedy) in zip(
                one["filtered_resps"], other["filtered_resps"], strict=True
            ):
                assert mine == pytest.approx(its, abs=1e-4) and greedy == its_greedy
        pairs = zip(samples["own_answers"], wanted_samples["own_answers"], strict=True)
        whole = [one["resps"] == other["resps"] for one, other in pairs][:3]
        assert whole == [True] * 3, "contexts that no client cuts"
        assert len(talks["own_answers"]) == 3
        for sample in talks["own_answers"]:
            talk = [{"role": "user", "content": sample["doc"]["question"]}]
            prompt = httpx.post(f"{address}/tokenize", json={"messages": talk}).json()["tokens"]
            body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "stop": [" and "]}
            answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()
            assert sample["resps"] == [[answer["choices"][0]["text"]]]
