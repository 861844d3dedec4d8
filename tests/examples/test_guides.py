"""The programs of the guides run as they stand, and the Dockerfiles keep what is said of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .test_readme import printed, programs

ROOT = Path(__file__).parents[2]
FLASK = """
client = app.test_client()
print(client.post("/scores", json=[[1, 1, 1, 1]]).json)
print(client.post("/scores", json=[[1]]).status_code)
print([client.get(path).status_code for path in ("/livez", "/readyz")])
"""


def test_the_programs_of_the_guides_print_what_they_say(tmp_path: Path) -> None:
    model, run = programs(ROOT / "docs/tutorial.md")
    assert printed(model, tmp_path) == "classifier.onnx\n"
    assert printed(run, tmp_path) == "[[16.5 19.5]]\n"
    [server] = programs(ROOT / "docs/web-servers.md")
    assert printed(server + FLASK, tmp_path).splitlines() == ["[[16.5, 19.5]]", "422", "[200, 200]"]


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
