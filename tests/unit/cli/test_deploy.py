"""`outrider deploy`: what it writes is what the engines' own parsers read, and says what tune found; bad input is one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.demo import demo_paths
from outrider.lab.tune.launch_lines import next_best
from outrider.serve.observability.metrics_families import GAUGES
from tests.unit.lab.tune.test_export import DFLASH, result

REPOSITORY = Path(__file__).resolve().parents[3]
VLLM = Path(os.environ.get("OUTRIDER_VLLM_PYTHON", REPOSITORY / ".peers" / "vllm" / "bin" / "python"))
READ_BY_VLLM = """
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
args.model = args.model_tag
found = AsyncEngineArgs.from_cli_args(args).create_engine_config().speculative_config
print("FOUND", None if found is None else (found.method, found.num_speculative_tokens))
"""
ENGINES = ("vllm", "sglang", "ray", "compose", "k8s")
Run = Callable[..., Any]


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Path]:
    """Writes a settings file."""

    def write(target: str = "org/target", **options: Any) -> Path:
        path = tmp_path / "fast.json"
        path.write_text(json.dumps({"outrider_settings": 1, "target": target, "options": options, "why": "measured 1.9x"}))
        return path

    return write


def words(text: str) -> list[str]:
    """The command that a script ends in, without the words that the script hands on."""
    command = shlex.split(text.split("\nexec ")[1].replace("\\\n", " "))
    assert command[-1] == "$@"
    return command[:-1]


def after(option: str, command: list[str]) -> str:
    return command[command.index(option) + 1]


def documents(text: str) -> dict[str, Any]:
    """Kubernetes' objects by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


# ---------------------------------------------------------------- other engines


def test_vllm_speaks_tune_s_words(cli: Run, tmp_path: Path) -> None:
    """Guards against a second table of what others call things."""
    made = result(schedule=[(4, "draft-model k=3", 3), (16, "none", 0)])
    made.write(tmp_path / "tune.json")
    done = cli("deploy", "vllm", "--settings", str(tmp_path / "tune.json"), "--out", f"{tmp_path}/new/", "--port", "9001")
    assert (done.code, done.out) == (0, "")
    config = json.loads((tmp_path / "new" / "speculative_config.json").read_text())
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 3, 5], [4, 15, 3], [16, 4096, 0]]
    script = tmp_path / "new" / "vllm.sh"
    command = words(script.read_text())
    assert command[:3] == ["vllm", "serve", "org/target"]
    assert json.loads(after("--speculative-config", command)) == config
    assert (after("--port", command), after("--host", command)) == ("9001", "127.0.0.1")
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", str(script)], check=True)


def test_a_settings_file_states_its_table(cli: Run, settings: Run) -> None:
    file = settings(drafter="draft-model", draft="org/draft", num_draft_tokens="1:5,4:3,16:0")
    command = words(cli("deploy", "vllm", "--settings", str(file)).out)
    assert json.loads(after("--speculative-config", command)) == {
        "method": "draft_model", "num_speculative_tokens": 5, "model": "org/draft",
        "num_speculative_tokens_per_batch_size": [[1, 3, 5], [4, 15, 3], [16, 4096, 0]],
    }  # fmt: skip


def test_sampled_requests_are_drafted_for_otherwise(cli: Run, settings: Run) -> None:
    """What a settings file does not say, and vLLM must know."""
    file = str(settings(drafter="draft-model", draft="org/draft", num_draft_tokens=4))
    assert "draft_sample_method" not in cli("deploy", "vllm", "--settings", file).out
    assert "probabilistic" in cli("deploy", "vllm", "--settings", file, "--temperature", "0.7").out
    assert "--speculative-use-rejection-sampling" in cli("deploy", "sglang", "--settings", file, "--temperature", "1").out


def test_sglang_counts_the_pending_token(cli: Run, settings: Run) -> None:
    file = settings("a folder/with $HOME", drafter="draft-model", draft="org/draft", num_draft_tokens=4)
    command = words(cli("deploy", "sglang", "--settings", str(file)).out)
    assert after("--model-path", command) == "a folder/with $HOME"
    assert after("--speculative-num-draft-tokens", command) == "5"
    assert after("--speculative-algorithm", command) == "STANDALONE"


def test_ray_carries_vllm_s_configuration(cli: Run, settings: Run) -> None:
    file = str(settings(drafter="ngram", num_draft_tokens=4, drafter_options={"max_ngram": 3}))
    content = yaml.safe_load(cli("deploy", "ray", "--settings", file, "--replicas", "2", "--served-model-name", "m").out)
    [model] = content["applications"][0]["args"]["llm_configs"]
    assert model["model_loading_config"] == {"model_id": "m", "model_source": "org/target"}
    assert model["engine_kwargs"]["speculative_config"] == {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }  # fmt: skip
    assert model["deployment_config"]["autoscaling_config"] == {"min_replicas": 2, "max_replicas": 4}


@pytest.mark.parametrize("engine", ENGINES[:3])
@pytest.mark.parametrize("form", ["settings", "result"])
def test_do_not_speculate_is_a_plain_launch_that_says_so(
    cli: Run, settings: Run, tmp_path: Path, engine: str, form: str
) -> None:
    """Nothing that drafts must slip in where tune found that nothing pays."""
    file = settings(drafter="none")
    if form == "result":
        made = result("none", speculate=False)
        made.recommendations[0].options["drafter"] = "none"
        made.write(file)
    done = cli("deploy", engine, "--settings", str(file), "--out", f"{tmp_path}/new/")
    assert done.code == 0, done.err
    [written] = (tmp_path / "new").iterdir()  # no speculative_config.json
    text = written.read_text()
    assert "plain decoding, no speculation" in text
    body = [line for line in text.splitlines() if not line.startswith("#")]
    assert not re.search("speculat", "\n".join(body))


@pytest.mark.parametrize("engine", ["compose", "k8s"])
def test_do_not_speculate_reaches_containers(cli: Run, settings: Run, engine: str) -> None:
    """`serve` reads it from the settings inside."""
    assert json.loads(_inner(cli("deploy", engine, "--settings", str(settings(drafter="none"))).out))["options"] == {
        "drafter": "none"
    }


def test_a_result_and_its_settings_give_the_second_best(cli: Run, settings: Run, tmp_path: Path) -> None:
    """What vLLM lacks: silence would deploy something that nobody asked for, and so would a file that names nothing else."""
    made = result("quantised k=2", {"quantised k=2": 2.0, "ngram k=4 max_ngram=3": 1.3})
    made.write(tmp_path / "tune.json")
    text = cli("deploy", "vllm", "--settings", str(tmp_path / "tune.json")).out
    assert "# Recommended is quantised k=2, which it does not have" in text
    assert '"method": "ngram"' in text
    made.recommendations[0].options.update(drafter="quantised", num_draft_tokens=2)
    made.next_best = next_best(made)
    made.settings_file().write(tmp_path / "fast.json")
    text = cli("deploy", "vllm", "--settings", str(tmp_path / "fast.json")).out
    assert "# Recommended is quantised k=2, which it does not have (quantised); this is ngram k=4 max_ngram=3" in text
    assert '"method": "ngram"' in text
    served = cli("deploy", "compose", "--settings", str(tmp_path / "fast.json"))
    assert served.code == 0
    assert '"next_best": []' in served.out, "it runs the first"
    refused = cli("deploy", "vllm", "--settings", str(settings(drafter="quantised", num_draft_tokens=2)))
    assert (refused.code, refused.out) == (2, "")
    assert "the settings say 'quantised k=2', which it does not have (quantised)" in refused.err


def test_a_draft_model_that_is_second_best_may_be_renamed(cli: Run, tmp_path: Path) -> None:
    made = result("quantised k=2", {"quantised k=2": 2.0, "draft-model k=4": 1.3})
    made.recommendations[0].options.update(drafter="quantised", num_draft_tokens=2)
    made.next_best = next_best(made)
    made.settings_file().write(tmp_path / "fast.json")
    text = cli("deploy", "vllm", "--settings", str(tmp_path / "fast.json"), "--draft", "org/other").out
    assert '"model": "org/other"' in text


def test_our_own_look_ups_reach_every_engine(cli: Run, settings: Run) -> None:
    """Drafters that no engine has: as plug-ins, with their settings where each engine looks."""
    file = str(settings(drafter="composite", num_draft_tokens=5, drafter_options={"parts": "suffix,ngram"}))
    settings = {"outrider": {"drafter": "composite", "drafter_options": {"parts": "suffix,ngram"}}}
    command = words(cli("deploy", "vllm", "--settings", file).out)
    assert json.loads(after("--speculative-config", command))["method"] == "custom_class"
    assert json.loads(after("--additional-config", command)) == settings
    content = yaml.safe_load(cli("deploy", "ray", "--settings", file).out)
    assert content["applications"][0]["args"]["llm_configs"][0]["engine_kwargs"]["additional_config"] == settings
    command = words(cli("deploy", "sglang", "--settings", file).out)
    assert command[:2] == ["env", "OUTRIDER_DRAFTER=composite"]
    assert after("--speculative-algorithm", command) == "OUTRIDER"


def test_an_exported_head_is_put_in(cli: Run, tmp_path: Path) -> None:
    """Without --head the script says which command makes it."""
    label = f"block k=4 head={DFLASH.folder}"
    result(label, {label: 2.0}, heads=(DFLASH,)).write(tmp_path / "tune.json")
    for engine in ("vllm", "sglang"):
        asked = ("deploy", engine, "--settings", str(tmp_path / "tune.json"))
        assert "outrider export runs/block --target org/target" in cli(*asked).out
        given = cli(*asked, "--head", "/exported/block").out
        assert "/exported/block" in given
        assert "EXPORTED_HEAD" not in given


def test_the_demo_is_a_folder_for_others(cli: Run, settings: Run) -> None:
    command = words(cli("deploy", "vllm", "--settings", str(settings("demo", drafter="draft-model", num_draft_tokens=4))).out)
    assert command[2] == str(demo_paths().target)
    assert json.loads(after("--speculative-config", command))["model"] == str(demo_paths().draft)
    assert after("--served-model-name", command) == "demo"


# ---------------------------------------------------------------- ours, in containers


def _inner(text: str) -> str:
    """The settings that the container reads."""
    found = list(yaml.safe_load_all(text))
    if len(found) == 1:
        return str(found[0]["configs"]["settings"]["content"]).replace("$$", "$")
    return str(documents(text)["ConfigMap"]["data"]["settings.json"])


@pytest.fixture
def local(tmp_path: Path, settings: Run) -> Path:
    """Settings whose models and corpus are files of this machine; two folders have the same name."""
    for name in ("a/model", "b/model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "corpus.txt").write_text("x")
    parts = {"parts": "draft-model,retrieval", "options": f"retrieval.corpus={tmp_path}/corpus.txt;retrieval.max_match=8"}
    return settings(
        f"{tmp_path}/a/model", drafter="composite", draft=f"{tmp_path}/b/model", num_draft_tokens=7, drafter_options=parts,
        verifier="traversal",
    )  # fmt: skip


def test_files_of_this_machine_get_paths_in_the_container(cli: Run, local: Path, tmp_path: Path) -> None:
    """A path that is not mounted would be found missing after the start; two folders of one name must stay two."""
    text = cli("deploy", "compose", "--settings", str(local)).out
    [service] = yaml.safe_load(text)["services"].values()
    targets = {one["source"]: one["target"] for one in service["volumes"] if one["type"] == "bind"}
    assert targets == {
        f"{tmp_path}/a/model": "/models/model", f"{tmp_path}/b/model": "/models/model-2",
        f"{tmp_path}/corpus.txt": "/models/corpus.txt",
    }  # fmt: skip
    inside = json.loads(_inner(text))
    assert (inside["target"], inside["options"]["draft"]) == ("/models/model", "/models/model-2")
    assert inside["options"]["drafter_options"]["options"] == "retrieval.corpus=/models/corpus.txt;retrieval.max_match=8"
    assert service["command"][0] == "/models/model"
    kubernetes = cli("deploy", "k8s", "--settings", str(local), "--set", "models_claim=weights").out
    volumes = documents(kubernetes)["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}} in volumes
    assert f"# {tmp_path}/b/model as /model-2\n" in kubernetes


def test_a_draft_service_s_certificates_are_in_the_container(cli: Run, settings: Run, tmp_path: Path) -> None:
    """So is the folder that a local service drafts with; names of look-ups and hub ids stay."""
    for name in ("ca.pem", "our.pem", "our.key"):
        (tmp_path / name).write_text("x")
    options = {"ca": f"{tmp_path}/ca.pem", "cert": f"{tmp_path}/our.pem", "key": f"{tmp_path}/our.key"}
    file = settings("org/x", drafter="remote", drafter_options={"endpoint": "grpcs://drafts:50051", **options})
    inside = json.loads(_inner(cli("deploy", "compose", "--settings", str(file)).out))["options"]["drafter_options"]
    assert inside == {
        "endpoint": "grpcs://drafts:50051", "ca": "/models/ca.pem", "cert": "/models/our.pem", "key": "/models/our.key",
    }  # fmt: skip
    for draft, there in ((f"{tmp_path}/small", "/models/small"), ("suffix", "suffix"), ("org/small", "org/small")):
        file = settings("org/x", drafter="remote", drafter_options={"endpoint": "local", "draft": draft})
        inside = json.loads(_inner(cli("deploy", "compose", "--settings", str(file)).out))["options"]["drafter_options"]
        assert inside == {"endpoint": "local", "draft": there}


@pytest.mark.parametrize(
    ("options", "token"),
    [
        ({"endpoint": "grpc://drafts:50051"}, "OUTRIDER_SERVICE_TOKEN"),
        ({"endpoint": "grpc://drafts:50051", "token_env": "DRAFT_TOKEN"}, "DRAFT_TOKEN"), ({"endpoint": "local"}, None),
    ],
)  # fmt: skip
def test_a_draft_service_s_token_reaches_the_container(
    cli: Run, settings: Run, options: dict[str, str], token: str | None
) -> None:
    """Without it the service lets nobody in; the file and the command line have its name alone."""
    file = str(settings("org/x", drafter="remote", drafter_options=options))
    wanted = ["OUTRIDER_API_KEY", *([] if token is None else [token])]
    [service] = yaml.safe_load(cli("deploy", "compose", "--settings", file).out)["services"].values()
    assert service["environment"] == wanted
    pod = documents(cli("deploy", "k8s", "--settings", file, "--name", "drafted").out)["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert [one["name"] for one in container["env"]] == wanted
    keys = [one["valueFrom"]["secretKeyRef"] for one in container["env"]]
    assert keys == [
        {"name": "drafted", "key": key, "optional": True} for key in ("api-key", "service-token")[: len(wanted)]
    ]  # fmt: skip


def test_a_token_that_only_a_part_of_the_traffic_needs(cli: Run, settings: Run) -> None:
    file = settings("org/x", drafter="ngram")
    other = {"drafter": "remote", "drafter_options": {"endpoint": "grpc://drafts:50051"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"for_batch_sizes": {"8": other}}))
    [service] = yaml.safe_load(cli("deploy", "compose", "--settings", str(file)).out)["services"].values()
    assert service["environment"] == ["OUTRIDER_API_KEY", "OUTRIDER_SERVICE_TOKEN"]


@pytest.mark.parametrize("engine", ["compose", "k8s"])
def test_a_draft_service_that_only_this_machine_knows_is_refused(
    cli: Run, settings: Run, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """DRAFT_ENDPOINT is of the shell that deploys, and the container would end at its start."""
    monkeypatch.setenv("DRAFT_ENDPOINT", "grpc://drafts:50051")
    done = cli("deploy", engine, "--settings", str(settings("org/x", drafter="remote")))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "do not say where the draft service is" in done.err


def test_an_ipv6_address_in_a_compose_file(cli: Run, settings: Run) -> None:
    """Without brackets its colons would part ports."""
    for host in ("::1", "[::1]"):
        text = cli("deploy", "compose", "--settings", str(settings("org/x", drafter="suffix")), "--host", host).out
        [service] = yaml.safe_load(text)["services"].values()
        assert service["ports"] == ["[::1]:8000:8000"]


def test_nothing_in_a_compose_file_is_replaced(cli: Run, settings: Run) -> None:
    """`$WORD` in a settings file would become an environment variable."""
    file = settings("org/x", drafter="suffix")
    content = json.loads(file.read_text()) | {"why": "cost $HOME and ${PATH}"}
    file.write_text(json.dumps(content))
    text = cli("deploy", "compose", "--settings", str(file)).out
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    assert not re.search(r"(?<!\$)\$(?!\$)", body)
    assert json.loads(_inner(text))["why"] == "cost $HOME and ${PATH}"


@pytest.mark.parametrize("engine", ["compose", "k8s"])
def test_serve_takes_the_command_and_the_settings(
    cli: Run, settings: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """The container's own command line, read by `serve`."""
    file = settings(drafter="draft-model", draft="org/draft", num_draft_tokens="1:5,4:0")
    text = cli("deploy", engine, "--settings", str(file), "--port", "9000", "--cpus", "2").out
    inside = tmp_path / "settings.json"
    inside.write_text(_inner(text))
    if engine == "compose":
        [service] = yaml.safe_load(text)["services"].values()
        command = [*service["entrypoint"], *service["command"]]
    else:
        [container] = documents(text)["Deployment"]["spec"]["template"]["spec"]["containers"]
        command = [*container["command"], *container["args"]]
    assert command[:3] == ["outrider", "serve", "org/target"]
    asked = [str(inside) if word == "/etc/outrider/settings.json" else word for word in command[1:]]
    seen: list[Any] = []
    monkeypatch.setattr("outrider.serve.run.run_server", lambda settings, status: seen.append(settings))
    assert cli(*asked).code == 0
    [model] = seen[0].models
    assert (model.name, seen[0].host, seen[0].port) == ("org/target", "0.0.0.0", 9000)
    options = model.options
    assert (options.draft, options.num_draft_tokens, options.threads) == ("org/draft", "1:5,4:0", 2)


def test_kubernetes_probes_limits_and_scaling(cli: Run, settings: Run, tmp_path: Path) -> None:
    done = cli(
        "deploy", "k8s", "--settings", str(settings(drafter="ngram")), "--out", f"{tmp_path}/new/", "--memory", "2GiB",
        "--gpus", "1", "--set", "queue=3", "--set", "namespace=ai", "--max-replicas", "6",
    )  # fmt: skip
    assert done.code == 0, done.err
    found = documents((tmp_path / "new" / "outrider.yaml").read_text())
    assert {one["metadata"]["namespace"] for one in found.values()} == {"ai"}
    spec = found["Deployment"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "2048Mi", "nvidia.com/gpu": 1}
    assert container["image"] == "outrider:cuda"
    assert "replicas" not in spec, "the autoscaler's number would be reset by every apply"
    assert found["Service"]["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    scaler = found["HorizontalPodAutoscaler"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (1, 6)
    [metric] = scaler["metrics"]
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "3"}
    [rule] = yaml.safe_load((tmp_path / "new" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    assert rule["seriesQuery"].partition("{")[0].removeprefix("outrider:") in GAUGES, "a metric that the server has"


def test_no_scaler_for_a_fixed_number(cli: Run, settings: Run) -> None:
    found = documents(cli("deploy", "k8s", "--settings", str(settings(drafter="ngram")), "--max-replicas", "1").out)
    assert found["Deployment"]["spec"]["replicas"] == 1
    assert "HorizontalPodAutoscaler" not in found


def test_other_settings_make_other_pods(cli: Run, settings: Run) -> None:
    """Else a changed ConfigMap would be read at the next crash."""
    marks = set()
    for size in (3, 4, 4):
        text = cli("deploy", "k8s", "--settings", str(settings(drafter="ngram", num_draft_tokens=size))).out
        marks.add(documents(text)["Deployment"]["spec"]["template"]["metadata"]["annotations"]["outrider/settings"])
    assert len(marks) == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_no_registry_is_named(cli: Run, settings: Run, engine: str) -> None:
    assert not re.search(r"image: \S*\.\S*/", cli("deploy", engine, "--settings", str(settings(drafter="ngram"))).out)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"), ("{", "'outrider tune --settings-out FILE' writes one"), ("[]", "neither a settings file"),
        ('{"drafter": "ngram"}', "neither a settings file"),
        ('{"outrider_settings": 9, "options": {}}', "must have \"outrider_settings\": 1. 'outrider tune"),
        ('{"outrider_settings": 1, "target": "x", "options": {"drafter": "ngrm"}}', "Did you mean 'ngram'?"),
        ('{"outrider_settings": 1, "target": "x", "options": {"draftr": "ngram"}}', "Did you mean 'drafter'?"),
        ('{"outrider_settings": 1, "target": "x", "options": {"drafter": ["ngram"]}}', "'drafter' and 'draft' are names"),
        ('{"outrider_settings": 1, "target": "x", "options": {"drafter": "ngram", "drafter_options": 3}}', "options are not"),
        ('{"outrider_settings": 1, "target": "x", "options": {"drafter": "ngram", "num_draft_tokens": 900}}', "between 1 and 64"),
        ('{"outrider_settings": 1, "options": {"drafter": "ngram"}}', "name it with --target"),
        ('{"kind": "tune", "schema_version": 3}', "is damaged"), ('{"kind": "tune"}', "schema version"),
        ('{"outrider_settings": 1, "target": "x", "options": {"drafter": "ngram", "verifier": "typical"}}', "is lossy"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("engine", ["vllm", "k8s"])
def test_a_bad_file_is_one_line(cli: Run, tmp_path: Path, engine: str, content: str | None, says: str) -> None:
    file = tmp_path / "bad.json"
    if content is not None:
        file.write_text(content)
    done = cli("deploy", engine, "--settings", str(file))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert says in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["vlm"], "Did you mean 'vllm'?"), (["vllm", "--cpus", "3"], "--cpus means nothing for vllm"),
        (["k8s", "--host", "0.0.0.0", "--head", "x"], "--head, --host mean nothing for k8s"),
        (["compose", "--memory", "lots"], "--memory takes bytes"), (["compose", "--memory", "1"], "at least 256MiB"),
        (["k8s", "--name", "My Model"], "--name takes small letters"),
        (["k8s", "--replicas", "3", "--max-replicas", "2"], "--max-replicas must be at least"),
        (["vllm", "--port", "99999"], "--port must be between"), (["compose", "--image", "a b"], "--image takes"),
        (["vllm", "--draft", "x"], "--draft means nothing here"), (["vllm", "--out", "no/such/file"], "does not exist"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(cli: Run, settings: Run, arguments: list[str], says: str) -> None:
    engine, *more = arguments
    done = cli("deploy", engine, "--settings", str(settings(drafter="ngram")), *more)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
    assert says in done.err


def test_a_temperature_beside_a_result_is_refused(cli: Run, tmp_path: Path) -> None:
    result().write(tmp_path / "tune.json")
    done = cli("deploy", "vllm", "--settings", str(tmp_path / "tune.json"), "--temperature", "1")
    assert done.code == 2
    assert "tune sampled at 0" in done.err


# ---------------------------------------------------------------- the engines' own parsers, where they are installed


@pytest.mark.slow
@pytest.mark.skipif(not VLLM.exists(), reason="no vLLM here (OUTRIDER_VLLM_PYTHON, benchmarks/setup_peers.sh)")
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"drafter": "none"}, "None"), ({"drafter": "ngram", "num_draft_tokens": 4}, "('ngram', 4)"),
        ({"drafter": "draft-model", "num_draft_tokens": "1:5,4:0"}, "('draft_model', 5)"),
    ],
)  # fmt: skip
def test_vllm_s_own_parser(cli: Run, settings: Run, options: dict[str, Any], found: str) -> None:
    command = words(cli("deploy", "vllm", "--settings", str(settings("demo", **options))).out)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(VLLM), "-c", READ_BY_VLLM, *command[2:]], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert f"FOUND {found}" in done.stdout, done.stderr[-2000:]


def test_kubernetes_own_schemas(cli: Run, settings: Run) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    text = cli("deploy", "k8s", "--settings", str(settings(drafter="ngram")), "--gpus", "1", "--set", "namespace=ai").out
    for one in yaml.safe_load_all(text):
        validate.validate(one, validate.latest_version(), strict=True)


def test_ray_s_own_schemas(cli: Run, settings: Run) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    content = yaml.safe_load(cli("deploy", "ray", "--settings", str(settings(drafter="ngram", num_draft_tokens=4))).out)
    schema.ServeDeploySchema.model_validate(content)


def test_help_names_the_engines(cli: Run) -> None:
    out = cli("deploy", "--help").out
    assert all(engine in out for engine in ENGINES)
