"""The demo, `cudnn-actor demo`, from the photograph to the picture.

A filter bank runs on the photograph. Then a camera shake is simulated. From one patch, whose sharp original
is known, the demo learns the 5x5 filter that is equivalent to the shake, and uses it to restore another
patch. Half-way through the learning, the filter bank also runs on tiles of the photograph, many requests at
once, and in the middle of that the worker process is killed. Afterwards every tile, and the whole bank run
again from its original buffers, must give the same results as before, bit for bit.
"""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from cudnn_actor.cli.demo.filters import Filter, camera_shake, filter_bank
from cudnn_actor.cli.demo.findings import Findings, Kill, request_table, verdict
from cudnn_actor.cli.demo.fit import FilterFit, PhotoFit, convolve
from cudnn_actor.cli.demo.kills import MOST_KILLS, kill_at_work
from cudnn_actor.cli.demo.photograph import luminance, read_photograph
from cudnn_actor.cli.demo.picture import draw
from cudnn_actor.cli.demo.recorder import Recorder
from cudnn_actor.cli.demo.serving import CALLERS, PICTURE_SIDE, network, serve_through_a_kill
from cudnn_actor.protocol import BufferRef, ConvFwd, ConvSpec, Copy, Fill, Message
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.spawning import spawn

__all__ = ["tell"]

FILTER_STEPS = 160
PHOTO_STEPS = 150
_KILL_STEP = FILTER_STEPS // 2
_Tiles = list[tuple[ConvFwd, np.ndarray]]
"""Requests and their results."""
_TILES, _TILE_SIDE = 6, 48
"""Number of tiles, and the pixels along their sides. A filter takes some 50 microseconds per tile, so an
engine that answers in batches has several requests begun and not answered."""
_ROUNDS, _COPIES = 4, 4
"""How often all tiles are filtered around the kill, and how many large copies run in each round. The copies
ensure that work remains when the kill comes, however late that is."""
_COPY_BYTES_ON_CPU, _COPY_BYTES_ON_CUDA = 32 << 20, 256 << 20
_KNOWN_SIDE, _SHAKEN_SIDE = 128, 200
"""Pixels along the sides of the two patches, if the photograph is large enough."""
_RIM = 10
"""Pixels at a patch's border, which the shake mixed with pixels outside: neither shown nor evaluated."""


async def tell(image: Path | None, out: Path, seed: int) -> int:
    """Run the demo and write its picture; returns the exit status. Raises as `demo.run` says."""
    began = time.perf_counter()
    console = Console(highlight=False)
    rng = np.random.default_rng(seed)
    findings = Findings(photo=read_photograph(image), true_taps=camera_shake(rng))
    async with spawn(isolation="process", max_restarts=MOST_KILLS + 1) as gpu:
        await _Story(gpu, console, findings, rng).run()
    console.print()
    console.print(request_table(findings.all_samples))
    console.print(f"[bold]{verdict(findings)}[/]")
    draw(findings, out)
    console.print(f"wrote {out} after {time.perf_counter() - began:.1f} s", soft_wrap=True)
    return 0


class _Story:
    """The part of the demo that talks to the service.

    Parameters
    ----------
    gpu
        The service.
    console
        The console that shows the progress.
    findings
        The results, filled in during the run.
    rng
        Random numbers for the fit.
    """

    def __init__(self, gpu: CudnnRef, console: Console, findings: Findings, rng: np.random.Generator) -> None:
        self._gpu = gpu
        self._recorder = Recorder(gpu)
        self._bank: list[ConvFwd] = []
        self._findings = findings
        self._rng = rng
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<19}"),
            BarColumn(bar_width=28),
            TextColumn("{task.completed:>3}/{task.total}"),
            TextColumn("[cyan]{task.fields[note]:<14}"),
            TimeElapsedColumn(),
            console=console,
        )

    async def run(self) -> None:
        """Run all stages, in order."""
        self._say(f"[bold]cudnn-actor demo[/] on {self._gpu.device}")
        with self._progress:
            await self._run_bank()
            await self._run_fit()
            await self._serve()
        await self._conclude()

    def _say(self, text: str) -> None:
        self._progress.console.print(text, soft_wrap=True)

    # The filter bank.

    async def _run_bank(self) -> None:
        self._recorder.stage = "filter bank"
        bank = filter_bank()
        task = self._progress.add_task("filter bank", total=len(bank), note="")
        colour = await self._recorder.put(self._findings.photo[None])
        grey = await self._recorder.put(luminance(self._findings.photo)[None, None])
        for each in bank:
            response = await self._respond(each, colour if each.colour else grey)
            self._findings.responses.append((each, response))
            self._progress.update(task, advance=1, note=each.name)
        self._progress.update(task, note="done")

    async def _respond(self, each: Filter, x: BufferRef) -> np.ndarray:
        """The filtered photograph at its original size; the border, which zero padding affects, is cut
        off."""
        recorder, channels, size = self._recorder, x.spec.dims[1], len(each.taps)
        w = await recorder.put(np.tile(each.taps, (channels, 1, 1, 1)))
        y = await recorder.room(x.spec.dims)
        bias = await recorder.put(np.full(channels, each.bias, np.float32)) if each.bias else None
        conv = ConvSpec.symmetric(2, pad=size // 2, groups=channels)
        message = ConvFwd(x=x, w=w, y=y, conv=conv, bias=bias)
        self._bank.append(message)
        await recorder.ask(message)
        return await self._response(each, message, recorder)

    async def _response(self, each: Filter, message: ConvFwd, recorder: Recorder) -> np.ndarray:
        response = _inside((await recorder.get(message.y))[0], 2)
        return response if each.colour else response[0]

    # The kill.

    async def _kill(self, recorder: Recorder, tiles: _Tiles, copy: Copy) -> None:
        """Kill the worker while it runs many requests; check that the results are the same as before."""
        findings = self._findings
        # so that an old result cannot pass as new
        await asyncio.gather(*(recorder.ask(Fill(dst=message.y, value=math.nan)) for message, _ in tiles))
        work: list[Message] = [message for message, _ in tiles]
        for place in range(0, len(work), len(work) // _COPIES):
            work.insert(place, copy)
        findings.kill = await kill_at_work(self._gpu, recorder, _ROUNDS * work, self._say, step=_KILL_STEP)
        for message, before in tiles:
            self._compare(before, await recorder.get(message.y))
        for (each, response), message in zip(findings.responses, self._bank, strict=True):
            await recorder.ask(Fill(dst=message.y, value=math.nan))
            await recorder.ask(message)
            self._compare(response, await self._response(each, message, recorder))
        self._tell_of(findings.kill)

    async def _copy(self, recorder: Recorder) -> Copy:
        """A copy between two large buffers, which occupies the worker for some milliseconds."""
        nbytes = _COPY_BYTES_ON_CPU if self._gpu.device == "cpu" else _COPY_BYTES_ON_CUDA
        src, dst = [await recorder.room((1, 1, 1024, nbytes // 4096)) for _ in range(2)]
        await recorder.ask(Fill(dst=src, value=1.0))
        return Copy(src=src, dst=dst)

    async def _tiles(self, recorder: Recorder) -> _Tiles:
        """The requests that run each filter on each of some tiles of the photograph, with their results."""
        tiles = []
        grey = luminance(self._findings.photo)[None]
        for place in np.linspace(0, 1, _TILES):
            patch = _patch(grey, _TILE_SIDE, top=place, left=place)
            x = await recorder.put(np.ascontiguousarray(patch)[None])
            for each in filter_bank():
                w = await recorder.put(each.taps[None, None])
                y = await recorder.room(x.spec.dims)
                message = ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2, pad=len(each.taps) // 2))
                await recorder.ask(message)
                tiles.append((message, await recorder.get(y)))
        return tiles

    def _compare(self, before: np.ndarray, after: np.ndarray) -> None:
        self._findings.compared += 1
        self._findings.changed += not np.array_equal(before, after)

    def _tell_of(self, kill: Kill) -> None:
        changed, compared = self._findings.changed, self._findings.compared
        ms, mib = kill.answered_s * 1e3, kill.nbytes / 2**20
        self._say(f"    {ms:.0f} ms from the kill to the next answer")
        self._say(f"    requests interrupted, and run again: {kill.run_again}")
        self._say(f"    {kill.buffers} buffers are still there, {mib:.1f} MiB; nothing was uploaded again")
        if changed:
            self._say(
                f"    {changed} of {compared} responses of the filter bank are not, bit for bit, "
                "what they were before"
            )
        else:
            self._say(f"    the filter bank gives what it gave before, bit for bit, all {compared} times")

    # The camera shake.

    async def _run_fit(self) -> None:
        sharp = _patch(self._findings.photo, _SHAKEN_SIDE, top=0.15, left=0.5)
        self._findings.sharp = _inside(sharp, _RIM)
        self._recorder.stage = "learn the shake"
        await self._learn(luminance(_patch(self._findings.photo, _KNOWN_SIDE, top=1.0, left=1.0)))
        self._recorder.stage = "undo the shake"
        await self._undo(sharp)

    async def _learn(self, known: np.ndarray) -> None:
        """Recover the filter from a patch whose sharp original is known."""
        x = await self._recorder.put(np.ascontiguousarray(known)[None, None])
        y = await convolve(self._recorder, x, self._findings.true_taps)
        beside = self._recorder.beside("the kill")
        tiles, copy = await self._tiles(beside), await self._copy(beside)
        fit, losses = FilterFit(self._recorder, self._rng), self._findings.filter_losses
        task = self._progress.add_task("learn the 5x5 shake", total=FILTER_STEPS, note="")
        async for loss in fit.run(x, y, FILTER_STEPS):
            losses.append(loss)
            self._advance(task, losses, FILTER_STEPS)
            if len(losses) == _KILL_STEP:
                kill = asyncio.create_task(self._kill(beside, tiles, copy))
        await kill
        self._findings.found_taps = fit.taps

    async def _undo(self, sharp: np.ndarray) -> None:
        """Shake a patch, then restore it; its colours are a batch of three."""
        x = await self._recorder.put(np.ascontiguousarray(sharp)[:, None])
        shaken = await self._recorder.get(await convolve(self._recorder, x, self._findings.true_taps))
        self._findings.shaken = _inside(shaken[:, 0], _RIM - 2)
        fit = PhotoFit(self._recorder, self._findings.found_taps)
        task = self._progress.add_task("undo it", total=PHOTO_STEPS, note="")
        async for loss in fit.run(shaken, PHOTO_STEPS):
            self._findings.photo_losses.append(loss)
            self._advance(task, self._findings.photo_losses, PHOTO_STEPS)
        self._findings.restored = _inside(fit.photo[:, 0], _RIM)

    def _advance(self, task: TaskID, losses: list[float], total: int) -> None:
        self._progress.update(task, advance=1, note=f"loss {losses[-1]:.1e}")
        done = len(losses)
        if done in (1, total // 2, total):  # without a terminal no bars are shown, so print lines
            self._say(f"  step {done:>3}  loss {losses[-1]:.2e}")

    # The model.

    async def _serve(self) -> None:
        photo = self._findings.photo
        places = np.linspace(0, 1, CALLERS)
        patches = [_patch(photo, PICTURE_SIDE, top=place, left=7 * place % 1) for place in places]
        pictures = [np.ascontiguousarray(patch)[None] for patch in patches]
        self._say(f"a model, batched, for {CALLERS} callers")
        served = await serve_through_a_kill(
            self._gpu, self._recorder, network(self._rng), pictures, self._say
        )
        self._findings.served = served
        self._say(f"    {served.answered_s * 1e3:.0f} ms from the kill to the next answer")
        self._say(f"    {len(served.samples):,} requests answered, {served.wrong} of them wrongly")

    async def _conclude(self) -> None:
        findings, statistics = self._findings, await self._gpu.statistics()
        findings.samples, findings.errors = self._recorder.samples, self._recorder.errors
        findings.restarts, findings.replayed = statistics.restarts, statistics.replayed
        findings.device = self._gpu.device
        before, after = findings.quality_db(findings.shaken), findings.quality_db(findings.restored)
        self._say(f"the filter was recovered to within {findings.filter_error:.0e} a tap")
        self._say(f"the photograph went from {before:.1f} dB to {after:.1f} dB")


def _patch(photo: np.ndarray, side: int, *, top: float, left: float) -> np.ndarray:
    """A square patch; `top` and `left` place it, from 0 to 1."""
    _, height, width = photo.shape
    side = min(side, height, width)
    y, x = int((height - side) * top), int((width - side) * left)
    return photo[:, y : y + side, x : x + side]


def _inside(image: np.ndarray, rim: int) -> np.ndarray:
    return image[..., rim:-rim, rim:-rim]
