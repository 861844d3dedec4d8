"""The demo: a picture, a table, one kill that no caller sees, and one line for whatever is wrong."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cudnn_actor.cli.demo.serving import CALLERS
from cudnn_actor.cli.user_error import UserError

from ..forked_programs import Program
from ..once import once
from ..patience import PATIENCE_S
from .terminal import CLONE, cudnn_actor, cudnn_actor_here, forked

WITHOUT_MATPLOTLIB = """
import importlib.abc, sys

class NotInstalled(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("matplotlib", "PIL"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
from cudnn_actor.cli import main
sys.exit(main(sys.argv[1:]))
"""

INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs begin without it
from cudnn_actor.cli import main
sys.exit(main(sys.argv[1:]))
"""


def scene(height: int = 96, width: int = 120) -> np.ndarray:
    """Boxes of random colours: edges everywhere, as in a photograph."""
    rng = np.random.default_rng(3)
    image = np.full((height, width, 3), 128, dtype=np.uint8)
    for _ in range(150):
        y, x = rng.integers(0, height), rng.integers(0, width)
        image[y : y + rng.integers(2, 14), x : x + rng.integers(2, 14)] = rng.integers(0, 256, 3)
    return image


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a demo prints, and its picture."""

    def make(folder: Path) -> None:
        Image.fromarray(scene()).save(folder / "photo.png")
        done = cudnn_actor(
            "demo", str(folder / "photo.png"), "--out", str(folder / "picture.png"), spare=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        (folder / "printed").write_text(done.stdout)

    folder = once(tmp_path_factory, "demo", make)
    return (folder / "printed").read_text(), folder / "picture.png"


@pytest.fixture
def told(shown: tuple[str, Path]) -> str:
    return shown[0]


KILLED = re.compile(
    r"kill -9 (\d+): the worker process, with (\d+) requests in flight\s+"
    r"✗ generation (\d+) is lost: worker \1 was killed by SIGKILL\s+"
    r"✓ generation (\d+) serves \d+ ms later, by (\d+)\n"
)
"""One kill. There are more where one came between two requests and had nothing run again."""


def test_the_demo_kills_its_worker_and_nobody_sees_an_error(told: str) -> None:
    kills = [[int(number) for number in kill.groups()] for kill in KILLED.finditer(told)]
    assert kills, told
    for killed, in_flight, lost, next_one, successor in kills:
        assert killed != successor
        assert in_flight > 0
        assert next_one == lost + 1
    assert f"restarts: {len(kills) + 1}   requests run again: " in told  # and one for the model
    assert "errors seen by callers: 0" in told
    for kind in ("ConvFwd", "ConvBwdFilter", "ConvBwdData", "BatchedRun"):
        assert kind in told


def test_requests_that_had_begun_run_again_and_are_counted(told: str) -> None:
    again = re.search(r"requests interrupted, and run again: (\d+)\n", told)
    assert again is not None
    assert int(again[1]) > 0
    assert f"   requests run again: {again[1]}   " in told


def test_a_model_is_killed_amid_batched_requests_and_each_is_answered_rightly(told: str) -> None:
    assert re.search(r"kill -9 \d+: the worker process, amid the batches of \d+ callers", told), told
    served = re.search(r"    ([\d,]+) requests answered, 0 of them wrongly\n", told)
    assert served is not None, told
    assert int(served[1].replace(",", "")) > CALLERS


def test_the_picture_is_a_page_of_many_colours(shown: tuple[str, Path]) -> None:
    with Image.open(shown[1]) as picture:
        assert picture.size == (1920, 1440)
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 1000


def test_what_was_uploaded_before_the_kill_still_gives_the_same(told: str) -> None:
    assert "buffers are still there" in told
    assert "the filter bank gives what it gave before, bit for bit" in told


def test_the_fit_goes_on_after_the_kill(told: str) -> None:
    words = ("step   1", "step  80", "kill -9", "step 160")
    first, before, kill, after = map(told.index, words)
    assert first < before < kill < after
    losses = [float(loss) for loss in re.findall(r"step +\d+ +loss (\S+)", told)]
    learn, undo = losses[:3], losses[3:]
    assert learn[2] < learn[1] < learn[0]
    assert learn[2] < 1e-3 * learn[0]
    assert undo[2] < 1e-3 * undo[0]


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "I;16", "CMYK"])
def test_photographs_of_every_kind_are_read(mode: str, tmp_path: Path) -> None:
    from cudnn_actor.cli.demo.photograph import read_photograph

    path = tmp_path / ("photo.tiff" if mode == "CMYK" else "photo.png")
    grey = scene()[:, :, 0]
    if mode == "I;16":
        Image.fromarray(grey.astype(np.uint16) * 257).save(path)
    else:
        Image.fromarray(scene()).convert(mode).save(path)
    photo = read_photograph(path)
    assert photo.shape == (3, 96, 120)
    assert photo.dtype == np.float32
    assert photo.min() >= 0
    assert 0.5 < photo.max() <= 1


def test_a_photograph_is_turned_the_way_the_camera_was_held(tmp_path: Path) -> None:
    from cudnn_actor.cli.demo.photograph import read_photograph

    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by a quarter
    Image.fromarray(scene()).save(tmp_path / "phone.jpg", exif=exif)
    assert read_photograph(tmp_path / "phone.jpg").shape == (3, 120, 96)


def blank(path: Path) -> Path:
    Image.new("RGB", (64, 64), "grey").save(path)
    return path


def text(path: Path) -> Path:
    path.write_text("no image", encoding="utf-8")
    return path


def cut_off(path: Path) -> Path:
    Image.fromarray(scene()).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    return path


def tiny(path: Path) -> Path:
    Image.fromarray(scene(20, 100)).save(path)
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path, "there is no image"),
        (text, "is not an image that Pillow can read"),
        (cut_off, "cannot be read"),
        (tiny, "whose sides are both 48 pixels or more"),
        (lambda path: path.parent, "cannot be read: Is a directory"),
    ],
)
def test_an_image_that_cannot_be_used_is_told_with_why(
    make: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    from cudnn_actor.cli.demo.photograph import read_photograph

    with pytest.raises(UserError, match=words) as caught:
        read_photograph(make(tmp_path / "image.png"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("make", "words"), [(text, "Pillow can read"), (blank, "no detail to learn from")])
def test_a_bad_image_is_one_line(make: Callable[[Path], Path], words: str, tmp_path: Path) -> None:
    done = cudnn_actor(
        "demo", str(make(tmp_path / "image.png")), "--out", str(tmp_path / "out.png"), spare=True
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize(
    ("out", "words"),
    [("nowhere/demo.png", "there is no directory"), ("demo.gif", "ends in .png"), ("dir.png", "a directory")],
)
def test_a_picture_that_cannot_be_written_is_one_line(out: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "dir.png").mkdir()
    done = cudnn_actor_here("demo", "--out", str(tmp_path / out))
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_matplotlib_the_demo_says_what_to_install() -> None:
    done = forked("-c", WITHOUT_MATPLOTLIB, "demo")
    assert (done.returncode, done.stdout) == (2, "")
    assert f'pip install -e "{CLONE}[demo]"' in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [("demo", "--help"), ("doctor",)])
def test_the_rest_needs_no_matplotlib(words: tuple[str, ...]) -> None:
    assert forked("-c", WITHOUT_MATPLOTLIB, *words, spare=True).returncode == 0


def test_an_interrupt_ends_the_demo_quietly(tmp_path: Path) -> None:
    program = ["-u", "-c", INTERRUPTIBLE, "demo", "--out", str(tmp_path / "out.png")]
    with Program(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, spare=True) as demo:
        assert demo.stdout is not None
        assert demo.stdout.readline().startswith("cudnn-actor demo")
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=PATIENCE_S)
    assert (demo.returncode, errors) == (130, "")
