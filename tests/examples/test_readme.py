"""What the README and the page of operations show is what runs."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import onnx
import pytest

from cudnn_actor.operations import PointwiseMode

from ..forked_programs import run
from ..once import once
from ..onnx.small_models import image_model
from ..patience import PATIENCE_S
from ..whole import WHOLE

README = Path(__file__).parents[2] / "README.md"
PAGES = [README.parent / "docs" / name for name in ("operations.md", "graphs.md", "buffers.md")]


def programs(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


SHOWN = {
    "lines": r"c(pu|uda)/conv_fwd/\w{8}\S* \(1, 8, 222, 222\) \(1, 8, 111, 111\)",
    "server": r"^200 \['scores'\]\n(422 \['detail'\]\n){4}$",
    "batched": r"\(1, 5\) \d+\.\d+",
    "notebook": r"\(1, 4, 8, 8\) 27\.0",
    "script": r"\{'scores': \(1, 5\)\}",
    "messages": r"27\.0",
    "kill": r"\{1, 2\} 72\.0",
}
"""What each prints, in the README's order; the server, when it is asked by `CLIENT`."""
CLIENT = """
import asyncio
import httpx

JSON = {"Content-Type": "application/json"}

async def client():
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            with open("image.json") as image:
                right = image.read()
            unequal, narrow, misspelt, broken = "[[[[1], [1, 2]]]]", "[[[[1]]]]", '{"a": 1}', "[[[["
            for body in (right, unequal, narrow, misspelt, broken):
                answer = await http.post("/scores", content=body, headers=JSON)
                print(answer.status_code, list(answer.json()))

asyncio.run(client())
"""

OWN_HANDLER = """
from cudnn_actor import CudnnActorError

@app.exception_handler(CudnnActorError)
async def report(request: Request, error: CudnnActorError):
    return JSONResponse({"detail": str(error)}, status_code=500)
"""


@pytest.fixture(scope="module")
def served_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the README's commands have made what its server needs."""

    def write(folder: Path) -> None:
        (folder / "examples").symlink_to(README.parent / "examples")
        for line in commands("python "):
            in_shell(line, folder)

    return once(tmp_path_factory, "served-files", write)


@pytest.mark.parametrize(
    ("name", "program"), list(zip(SHOWN, programs(README), strict=True)), ids=list(SHOWN)
)
def test_the_readme_s_programs_run_as_they_stand(
    name: str, program: str, served_files: Path, tmp_path: Path
) -> None:
    if name in ("server", "batched", "script"):
        shutil.copytree(served_files, tmp_path, symlinks=True, dirs_exist_ok=True)
    if name == "server":
        program += CLIENT
    if name == "notebook":  # its cells run in an event loop
        program = (
            f"import asyncio\n\nasync def cell():\n{textwrap.indent(program, '    ')}\nasyncio.run(cell())"
        )
    assert re.search(SHOWN[name], printed(program, tmp_path, new=name == "lines"))


def test_bad_input_is_refused_by_the_readme_s_server_beside_a_handler_of_our_own_errors(
    served_files: Path, tmp_path: Path
) -> None:
    shutil.copytree(served_files, tmp_path, symlinks=True, dirs_exist_ok=True)
    server = dict(zip(SHOWN, programs(README), strict=True))["server"]
    assert re.search(SHOWN["server"], printed(server + OWN_HANDLER + CLIENT, tmp_path))


PROBE = """
import asyncio
import httpx

async def probe():
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            for path in ("/livez", "/readyz"):
                answer = await http.get(path)
                print(answer.status_code, answer.json())
        await app.state.gpu.aclose()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            print([(await http.get(path)).status_code for path in ("/livez", "/readyz")])

asyncio.run(probe())
"""


def test_the_probes_of_the_page_fit_the_readme_s_server(served_files: Path, tmp_path: Path) -> None:
    shutil.copytree(served_files, tmp_path, symlinks=True, dirs_exist_ok=True)
    page = (README.parent / "docs/web-servers.md").read_text(encoding="utf-8")
    probes, _ = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)  # the second is Flask's
    server = dict(zip(SHOWN, programs(README), strict=True))["server"]
    shown = printed(server + probes + PROBE, tmp_path)
    assert shown.splitlines() == ["200 {'alive': True}", "200 {'ready': True}", "[503, 503]"]


def test_the_program_of_the_page_of_models_runs_as_it_stands(tmp_path: Path) -> None:
    onnx.save(image_model(), tmp_path / "model.onnx")
    [program] = programs(README.parent / "docs" / "onnx.md")
    shown = printed_here(program, tmp_path)
    assert shown.startswith("<model: image: float32 (N, 3, 8, 8) -> scores: ")
    assert "scores (1, 5)" in shown


@pytest.mark.parametrize("program", [program for page in PAGES for program in programs(page)])
def test_the_programs_of_the_pages_print_what_the_page_says(program: str, tmp_path: Path) -> None:
    said = program.rstrip().rpartition("  # ")[2]
    assert printed_here(program, tmp_path) == f"{said}\n"


MODELS = README.parent / "docs" / "models.md"


@pytest.fixture(scope="module")
def files_of_the_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page's first program writes."""

    def write(folder: Path) -> None:
        assert printed_here(programs(MODELS)[0], folder) == ""

    return once(tmp_path_factory, "models-page", write)


@pytest.mark.parametrize("number", range(1, len(programs(MODELS))))
def test_the_programs_of_the_page_of_models_in_a_service_print_what_it_says(
    number: int, files_of_the_page: Path, tmp_path: Path
) -> None:
    shutil.copytree(files_of_the_page, tmp_path, dirs_exist_ok=True)
    program = programs(MODELS)[number]
    said = re.findall(r"^ *print\(.*\)  # (.*)$", program, flags=re.MULTILINE)
    assert said
    assert printed_here(program, tmp_path).splitlines() == said


def commands(start: str) -> list[str]:
    """The README's command lines for a model to try that start so."""
    section = README.read_text(encoding="utf-8").partition("## Serve a model")[2].partition("\n## ")[0]
    found = [
        line
        for block in re.findall(r"```sh\n(.*?)```", section, flags=re.DOTALL)
        for line in block.splitlines()
        if line.startswith(start)
    ]
    assert found
    return found


def in_shell(line: str, folder: Path) -> None:
    """Run a command line in `folder`, where `python` is this interpreter."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["sh", "-c", line], cwd=folder, env={**os.environ, "PATH": path}, timeout=PATIENCE_S, check=True
    )


def printed_here(program: str, folder: Path) -> str:
    """What a program prints that runs as `__main__` in this process, in `folder`. Warnings are errors, too.

    Its workers come from this process's forkserver, whose start is most of what a program takes in a process
    of its own; and what it leaves behind fails the test. `make test-all` runs it in a new interpreter.
    """
    if WHOLE:
        return printed(program, folder)
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    output = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output):
        runpy.run_path(str(path), run_name="__main__")
    return output.getvalue()


def printed(program: str, tmp_path: Path, *, new: bool = False) -> str:
    """What a program prints in a process of its own, in `tmp_path`.

    `new`: in a new interpreter, as all do in `make test-all`.
    """
    path = tmp_path / "program.py"
    path.write_text(program, encoding="utf-8")
    words = ["-W", "error", str(path)]
    if new or WHOLE:
        command = [sys.executable, *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=tmp_path
        )
    else:
        done = run(words, timeout=PATIENCE_S, cwd=tmp_path, spare=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_that_the_documents_link_to_is_there() -> None:
    for page in (README, *README.parent.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    ("page", "text"), [("README.md", "functions of each element"), ("docs/operations.md", "functions with")]
)
def test_the_pages_say_how_many_elementwise_functions_there_are(page: str, text: str) -> None:
    assert f" {len(PointwiseMode)} {text}" in (README.parent / page).read_text(encoding="utf-8")


def test_every_record_that_the_documents_name_is_there() -> None:
    """A name may leave out its beginning (`-chaos.json`) or a part (`chaos-…-standby.json`)."""
    records = [path.name for path in (README.parent / "benchmarks" / "results").glob("*.json")]
    for page in README.parent.glob("docs/*.md"):
        for name in re.findall(
            r"`(?:benchmarks/results/)?([\w.…-]+\.json)`", page.read_text(encoding="utf-8")
        ):
            if re.search(r"\d{8}", name) or name[0] in "-…":
                pattern = "*" * (name[0] == "-") + name.replace("…", "*")
                assert fnmatch.filter(records, pattern), f"{page.name} names {name}"
