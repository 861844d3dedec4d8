"""The page at `/`: its markup, its script, and the paths that it asks for. No browser runs here."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest

import cudnn_actor.serving

from ..onnx.small_models import image_model
from ..patience import PATIENCE_S
from .servers import PLAIN, running

TEXT = (Path(cudnn_actor.serving.__file__).parent / "page.html").read_text()
SCRIPT = TEXT.partition("<script>")[2].partition("</script>")[0]
VOID = {"meta", "input"}
PROGRAM = """
const said = {};
const nothing = { addEventListener() {}, replaceChildren() {}, append() {} };
const element = (id) => said[id] ??= { value: "", files: [], options: [], ...nothing };
globalThis.document = { getElementById: element, createElement: () => element("made" + Math.random()) };
globalThis.setInterval = () => 0;
globalThis.Option = class {};
const base = process.argv[2], plain = globalThis.fetch;
globalThis.fetch = (path, options) => plain(base + path, options);
"""
ASK = """
;(async () => {
  await refresh();
  const values = planes(new Uint8Array(8 * 8 * 4).fill(255), 8, 8);
  const [whole, head] = body({ name: "image" }, values, 8, 8);
  const headers = { "Inference-Header-Content-Length": String(head) };
  const answer = await ask("/v2/models/image/infer", { method: "POST", body: whole, headers });
  console.log(at("state").textContent + "\\n" + best((await answer.json()).outputs[0]));
})();
"""


class Markup(HTMLParser):
    """Notes what is open, the ids, and what would be fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {given["id"] or ""} if "id" in given else set()
        self.fetched += [str(given[name]) for name in ("src", "href") if name in given]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_its_markup_is_whole_and_fetches_nothing() -> None:
    markup = Markup()
    markup.feed(TEXT)
    markup.close()
    assert not markup.open
    assert not markup.fetched
    assert set(re.findall(r'at\("(\w+)"\)', SCRIPT)) <= markup.ids
    assert "innerHTML" not in SCRIPT  # names of models are text


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run its script")
def test_its_script_asks_a_server_and_reads_the_answers(tmp_path: Path) -> None:
    path, program = tmp_path / "image.onnx", tmp_path / "page.js"
    onnx.save(image_model(), path)
    program.write_text(PROGRAM + SCRIPT + ASK)
    with running(str(path), "--http", "0", "--grpc", "0") as (_, ports):
        base = f"http://127.0.0.1:{ports['http']}"
        done = subprocess.run(
            ["node", str(program), base], capture_output=True, text=True, check=True, timeout=PATIENCE_S
        )
        with httpx.Client(base_url=base, **PLAIN) as http:
            assert "default-src 'none'" in http.get("/").headers["content-security-policy"]
            white = np.ones((1, 3, 8, 8), np.float32)
            asked = {
                "name": "image",
                "datatype": "FP32",
                "shape": white.shape,
                "data": white.ravel().tolist(),
            }
            answer = http.post("/v2/models/image/infer", json={"inputs": [asked]}).json()
    state, _, *scores = done.stdout.splitlines()
    assert state == "ready, worker replaced 0 times"
    wanted = sorted(answer["outputs"][0]["data"], reverse=True)
    assert [float(line.split()[1]) for line in scores] == pytest.approx(wanted)
