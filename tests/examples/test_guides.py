"""The programs of the guides run as they stand, and the Dockerfiles keep what is said of them."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from cudnn_actor.cli import serve
from cudnn_actor.serving.http_face import make_app
from cudnn_actor.serving.server import ServerOptions

from ..forked_programs import Program
from .test_readme import printed, printed_here, programs

ROOT = Path(__file__).parents[2]
FLASK = """
client = app.test_client()
print(client.post("/scores", json=[[1, 1, 1, 1]]).json)
print(client.post("/scores", json=[[1]]).status_code)
print([client.get(path).status_code for path in ("/livez", "/readyz")])
"""


def in_batches(server: str) -> str:
    """Flask's program with the lines that the page gives for batches."""
    page = (ROOT / "docs/web-servers.md").read_text()
    _, lines = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)  # the first is FastAPI's
    for old, new in (
        ("import atexit\n", "import atexit\nimport contextlib\n"),
        ('gpu = spawn(device="auto", on_give_up="exit")\n', lines),
        ("atexit.register(gpu.close)\n", ""),
        ('model = gpu.load("classifier.onnx", dims={"N": 1})\n', ""),
        ("gpu.run(model, x=x, timeout=20)", "endpoint(x=x, timeout=20)"),
    ):
        assert server.count(old) == 1, old
        server = server.replace(old, new)
    return server


def test_the_programs_of_the_guides_print_what_they_say(tmp_path: Path) -> None:
    model, run = programs(ROOT / "docs/tutorial.md")
    assert printed_here(model, tmp_path) == "classifier.onnx\n"
    assert printed_here(run, tmp_path) == "[[16.5 19.5]]\n"
    [server] = programs(ROOT / "docs/web-servers.md")
    # This service ends with its process, and so does the one below.
    for each in (server, in_batches(server)):
        assert printed(each + FLASK, tmp_path).splitlines() == ["[[16.5, 19.5]]", "422", "[200, 200]"]
    for program in programs(ROOT / "docs/observability.md"):
        assert printed_here(program, tmp_path) == program.rstrip().rpartition("  # ")[2] + "\n"
    [actor] = programs(ROOT / "docs/pykka.md")
    assert printed_here(actor, tmp_path).splitlines() == said(actor)
    [video] = programs(ROOT / "docs/frames.md")
    assert printed_here(video, tmp_path).splitlines() == said(video)
    _, ray = programs(ROOT / "docs/ray.md")  # tests/ray runs both on a cluster
    alone, _ = ray.replace("import ray\n", "").split("\n\nif __name__ ==")
    asked = "print(Classifier('classifier.onnx').scores(np.ones((1, 4), 'float32')))"
    assert printed(f"{alone}\n{asked}", tmp_path).splitlines() == said(ray)


def test_the_two_programs_of_the_page_of_processes_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    printed_here(programs(ROOT / "docs/tutorial.md")[0], tmp_path)
    owners_and_clients = iter(programs(ROOT / "docs/processes.md"))
    for owner, client in zip(owners_and_clients, owners_and_clients, strict=True):  # a model's file, a model
        words = ["-W", "error", "-c", owner]
        with Program(words, stdout=subprocess.PIPE, cwd=tmp_path, spare=True) as process:
            try:
                assert process.stdout.readline() == "serving\n"
                assert printed_here(client, tmp_path).splitlines() == said(client)
            finally:
                process.kill()


def said(program: str) -> list[str]:
    """What the comments behind a program's prints say that it prints."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", program, flags=re.MULTILINE)


def test_the_unit_of_systemd_is_one_and_its_command_is_understood(tmp_path: Path) -> None:
    [text] = blocks("ini")
    [command] = re.findall(r"^ExecStart=/opt/venv/bin/cudnn-actor serve (.*)$", text, flags=re.MULTILINE)
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    parser.parse_args(shlex.split(command))
    [limit_s] = re.findall(r"^TimeoutStopSec=(\d+)$", text, flags=re.MULTILINE)
    assert int(limit_s) > ServerOptions.drain_s
    if (verify := shutil.which("systemd-analyze")) is not None:
        unit = tmp_path / "inference.service"
        unit.write_text(text.replace("/opt/venv/bin/cudnn-actor", "/bin/true"))
        done = subprocess.run(
            [verify, "verify", "--man=no", unit], capture_output=True, text=True, check=False
        )
        assert "inference.service" not in done.stderr, done.stderr


def test_the_probes_of_kubernetes_ask_what_the_server_answers() -> None:
    [text] = blocks("yaml")
    probes = dict(re.findall(r"(\w+)Probe:\n +httpGet: {path: (\S+), port: 8000}", text))
    assert list(probes) == ["startup", "liveness", "readiness"]
    no_host: Any = None  # nothing is asked
    served = make_app(no_host, None, most_body=1)
    assert set(probes.values()) <= {route.path for route in served.routes if isinstance(route, Route)}
    [limit_s] = re.findall(r"terminationGracePeriodSeconds: (\d+)", text)
    assert int(limit_s) > ServerOptions.drain_s


def blocks(language: str) -> list[str]:
    """The blocks of the page about deploying in one language."""
    page = (ROOT / "docs/deploying.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


@pytest.mark.parametrize("name", ["cpu", "cuda13"])
def test_an_image_has_two_stages_a_user_and_a_health_check(name: str) -> None:
    text = (ROOT / f"docker/{name}.Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] != "#"]
    assert {word for word, _ in steps} <= {
        "FROM",
        "COPY",
        "RUN",
        "USER",
        "ENV",
        "EXPOSE",
        "HEALTHCHECK",
        "CMD",
    }
    last = steps[[word for word, _ in steps].index("FROM", 1) :]
    assert next(rest for word, rest in steps if word == "FROM").endswith(" AS build")
    assert [rest for word, rest in last if word == "COPY"] == ["--from=build /opt/venv /opt/venv"]
    [user] = [rest for word, rest in last if word == "USER"]
    assert int(user) > 0
    [health] = [rest for word, rest in last if word == "HEALTHCHECK"]
    assert json.loads(re.sub(r".*?CMD ", "", health, count=1))[0] == "/opt/venv/bin/python"
    assert last[-1][0] == "CMD"
    assert json.loads(last[-1][1])[:2] == ["/opt/venv/bin/cudnn-actor", "serve"]
