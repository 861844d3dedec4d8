"""The inference server: requests a second and times of 64 clients with one sample each, by every way in.

    python -m benchmarks.serving --out benchmarks/results
    python -m benchmarks.serving --device cuda:0 --network resnet50 --dtype bfloat16 --folder FOLDER

Without a folder, small networks that are made here; else files as of `benchmarks.models`.

In process, and attached to the service of `cudnn-actor serve`, `gpu.batched` puts the samples together. The
others are `tritonclient` against that server: HTTP with binary tensors, gRPC, and gRPC with the input in
shared memory; and the same client against a server of grpc.aio that computes nothing and answers with bytes
of the same size (`benchmarks.serving_side`). Where PyTorch is installed, and for networks of a folder, also
PyTorch's module behind uvicorn, which puts together what waits (`benchmarks.serving_torch`); its clients are
`aiohttp`, and send a picture's bytes.

All servers run from the beginning to the end. In each round each way is asked in turn; a row has the median
of the rounds. The clients of a way are in `--processes` processes, but those in process in one; they share
the machine's cores with the servers. `of_nothing` is the rate beside that of the server that computes
nothing, the median of the rounds; `server_us` what a request costs the server's process, without its worker.
With `--serving-processes N`, HTTP and gRPC are served by so many processes in front of that one, and
`serving_us` is what a request costs them together. Each process of clients has `--connections` of gRPC, which
the kernel divides among them: with one, all of its requests are served by the same process.
`samples_per_batch` is what the server says of its batches.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.table import Table

from cudnn_actor.serving.front import NAME as SERVING
from cudnn_actor.serving.grpc_schema import message_class
from cudnn_actor.trials.bench.record import versions
from tests.onnx.networks.recipes import read
from tests.serving.servers import descendants, name_of

from .gpu.setting import gpu_versions
from .recording import Row, attempted, keep
from .serving_clients import WAYS, Job

__all__ = ["main"]

ALONE = "in process"
NOTHING = "a no-op grpc.aio server"
_DTYPES = ("bfloat16", "float16", "float32")
_SETTINGS = (
    "device",
    "dtype",
    "clients",
    "processes",
    "serving_processes",
    "connections",
    "max_batch",
)
_PACKAGES = ("grpcio", "tritonclient", "uvicorn", "starlette", "uvloop", "aiohttp", "torch")


def network(blocks: int, width: int, image: int) -> onnx.ModelProto:
    """A residual network of 3x3 convolutions: pictures of (N, 3, image, image) to ten scores.

    Without `blocks` and `width`, ten scores of the means of the three colours.
    """
    rng = np.random.default_rng(0)
    nodes, tensors = [], []

    def convolved(source: str, name: str, channels: int) -> str:
        weights = rng.standard_normal((width, channels, 3, 3)) / np.sqrt(9 * channels)
        tensors.append(numpy_helper.from_array(weights.astype(np.float32), f"{name}_w"))
        nodes.append(helper.make_node("Conv", [source, f"{name}_w"], [name], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [name], [f"{name}_r"]))
        return f"{name}_r"

    last = convolved("image", "first", 3) if width else "image"
    for block in range(blocks):
        inner = convolved(convolved(last, f"a{block}", width), f"b{block}", width)
        nodes.append(helper.make_node("Add", [last, inner], [f"sum{block}"]))
        last = f"sum{block}"
    scores = rng.standard_normal((width or 3, 10)).astype(np.float32)
    tensors.append(numpy_helper.from_array(scores, "scores_w"))
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "scores_w"], ["scores"]),
    ]
    given = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, image, image])
    made = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])
    graph = helper.make_graph(nodes, "network", [given], [made], initializer=tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


NETWORKS = {"small": (1, 8, 16), "residual": (4, 32, 32), "means": (0, 0, 224)}
"""Blocks, width and image of the networks that are measured without a folder."""


@contextlib.contextmanager
def process(*words: str, given: str | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process of `python -m`; gives its first line, and itself. It is killed at the end.

    `given`: all of its standard input, if that is to end at once. Raises `RuntimeError` if it says nothing.
    """
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdin is not None
            assert started.stdout is not None
            if given is not None:
                started.stdin.write(given)
                started.stdin.close()
            line = started.stdout.readline()
            if not line:
                raise RuntimeError(f"{words[0]} has ended with status {started.wait()}")
            yield line.strip(), started
        finally:
            started.kill()


class Address(NamedTuple):
    """A server: what its clients connect to, its process id or None, its serving processes, and where it says
    what it has counted, or "" for nowhere.
    """

    at: str
    pid: int | None
    serving: tuple[int, ...] = ()
    counts: str = ""

    def counted(self) -> tuple[int, int]:
        """The samples, and the runs, that the server has counted so far; (0, 0) if it does not say."""
        if not self.counts:
            return 0, 0
        with urllib.request.urlopen(f"http://{self.counts}/v2/models/model/stats") as answer:
            (found,) = json.load(answer)["model_stats"]
        return found["inference_count"], found["execution_count"]


class Clients:
    """The processes of one way's clients.

    Parameters
    ----------
    job
        What all of them do together.
    processes
        How many there are.
    server
        The server.
    """

    def __init__(self, job: Job, processes: int, server: Address, stack: contextlib.ExitStack) -> None:
        shares = [len(range(number, job.clients, processes)) for number in range(processes)]
        self._server = server
        self._started = []
        for share in shares:
            words = msgspec.json.encode(msgspec.structs.replace(job, clients=share)).decode()
            self._started.append(stack.enter_context(process("benchmarks.serving_clients", words))[1])
            stack.callback(self._started[-1].communicate)  # which ends it

    def measure(self, seconds: float) -> Found:
        """Ask for so many seconds. Blocks for longer."""
        server = self._server
        before = 0.0 if server.pid is None else _cpu_s(server.pid)
        serving_before = sum(map(_cpu_s, server.serving))
        samples_before, runs_before = server.counted()
        for each in self._started:
            assert each.stdin is not None
            each.stdin.write(f"{seconds}\n")
            each.stdin.flush()
        found = [json.loads(each.stdout.readline()) for each in self._started if each.stdout is not None]
        took = np.concatenate([np.array(each) for _, each in found])
        spent = None if server.pid is None else (_cpu_s(server.pid) - before) / len(took) * 1e6
        serving = (sum(map(_cpu_s, server.serving)) - serving_before) / len(took) * 1e6
        samples, runs = server.counted()
        batches = (samples - samples_before) / max(runs - runs_before, 1)
        return Found(
            sum(per_s for per_s, _ in found), took, spent, serving if server.serving else None, batches
        )


class Found(NamedTuple):
    """Requests a second, the milliseconds of each, and microseconds of the server's CPU for each.

    The server's process is meant, without its worker; None where there is none. `serving_us`: likewise, of
    its serving processes together.
    """

    per_s: float
    took_ms: np.ndarray
    server_us: float | None
    serving_us: float | None
    samples_per_batch: float


def _cpu_s(pid: int) -> float:
    """The CPU time that a process's threads have used."""
    stats = (task / "schedstat" for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int(each.read_text().split()[0]) for each in stats) / 1e9


def _addresses(path: Path, args: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Address]:
    """The address for each way whose server has started; the ways that lack one cannot be measured."""
    socket = path.with_name("socket")
    words = [f"model={path}", "--http", "0", "--grpc", "0", "--device", args.device, "--socket", str(socket)]
    words += ["--processes", str(args.serving_processes)]
    line, server = stack.enter_context(process("cudnn_actor.cli", "serve", *words))
    http, grpc = (part.rpartition(" ")[2] for part in line.split(", "))
    port, nothing = stack.enter_context(process("benchmarks.serving_side", given=_response(path).hex()))
    places = {"attached": str(socket), "HTTP, binary": http, "gRPC": grpc, "gRPC, shared memory": grpc}
    serving = tuple(each for each in descendants(server.pid) if name_of(each) == SERVING)
    found = {ALONE: Address("", None), "attached": Address(places.pop("attached"), server.pid)}
    found |= {way: Address(at, server.pid, serving, http) for way, at in places.items()}
    return found | {NOTHING: Address(f"127.0.0.1:{port}", nothing.pid)}


def _in_torch(name: str, how: str, args: argparse.Namespace, stack: contextlib.ExitStack) -> Address:
    """The address of a server in which PyTorch runs a network of a folder."""
    words = [name, how, "--device", args.device, "--max-batch", str(args.max_batch)]
    port, server = stack.enter_context(process("benchmarks.serving_torch", *words))
    return Address(f"127.0.0.1:{port}", server.pid)


def _response(path: Path) -> bytes:
    """An answer of the size of the model's, for one sample."""
    made = onnx.load(path, load_external_data=False).graph.output[0]
    kind = made.type.tensor_type
    shape = [1, *(dim.dim_value for dim in kind.shape.dim[1:])]
    make: Any = message_class("ModelInferResponse")
    response = make(model_name="model", model_version="1")
    response.outputs.add(name=made.name, datatype="FP32", shape=shape)
    nbytes = int(np.prod(shape)) * helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
    response.raw_output_contents.append(bytes(nbytes))
    encoded: bytes = response.SerializeToString()
    return encoded


def _settings(args: argparse.Namespace) -> str:
    """The model's `model.toml`."""
    dtype = "" if args.dtype is None else f'dtype = "{args.dtype}"\n'
    return f"{dtype}[batch]\nmax = {args.max_batch}\ndelay_us = {args.max_delay_us}\n"


def _measured(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of a network, one for each way."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / "model.onnx"
        onnx.save(_network(name, args), path)
        path.with_name("model.toml").write_text(_settings(args))
        addresses = _addresses(path, args, stack)
        offered = args.folder is not None and importlib.util.find_spec("torch") is not None
        for how in args.torch if offered else ():
            start = functools.partial(_in_torch, name, how, args, stack)
            for found in attempted(f"{name}, {how}", lambda start=start: [{"at": start()}]):  # type: ignore[misc]
                if "error" in found:
                    yield found
                else:
                    addresses[f"PyTorch and uvicorn, {how}"] = found["at"]
        ways = {
            way: Clients(
                _job(way, server.at, path, args), 1 if way == ALONE else args.processes, server, stack
            )
            for way, server in addresses.items()
            if way in args.ways
        }
        for each in ways.values():
            each.measure(args.seconds / 4)  # connections are made, and caches filled
        found_by = [
            {way: each.measure(args.seconds) for way, each in ways.items()} for _ in range(args.rounds)
        ]
    for way in ways:
        yield {"model": name, "way": way, **_summary(way, found_by)}


def _network(name: str, args: argparse.Namespace) -> onnx.ModelProto:
    if args.folder is None:
        return network(*NETWORKS[name])
    return read(args.folder / f"{name}.{args.opset}.onnx")


def _job(way: str, address: str, path: Path, args: argparse.Namespace) -> Job:
    return Job(
        way=way,
        address=address,
        path=str(path),
        clients=args.clients,
        device=args.device,
        dtype=args.dtype,
        max_batch=args.max_batch,
        max_delay_us=args.max_delay_us,
        connections=args.connections,
    )


def _summary(way: str, rounds: Sequence[dict[str, Found]]) -> Row:
    """The columns of a way: the median of the rounds."""
    rates = [found[way].per_s for found in rounds]
    times = np.array([np.percentile(found[way].took_ms, (50, 99)) for found in rounds])
    p50, p99 = np.median(times, axis=0)
    row: Row = {
        "requests_per_s": round(statistics.median(rates), 1),
        "p50_ms": round(float(p50), 3),
        "p99_ms": round(float(p99), 3),
        "rounds_per_s": [round(rate, 1) for rate in rates],
    }
    spent = [found[way].server_us for found in rounds]
    if spent[0] is not None:
        row["server_us"] = round(float(np.median(spent)), 1)  # type: ignore[arg-type]
    serving = [found[way].serving_us for found in rounds]
    if serving[0] is not None:
        row["serving_us"] = round(float(np.median(serving)), 1)  # type: ignore[arg-type]
    if batches := statistics.median(found[way].samples_per_batch for found in rounds):
        row["samples_per_batch"] = round(batches, 2)
    if way != NOTHING and NOTHING in rounds[0]:
        of = [rate / found[NOTHING].per_s for rate, found in zip(rates, rounds, strict=True)]
        row["of_nothing"] = round(statistics.median(of), 3)
    return row


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each network and way."""
    for name in args.network:
        yield from attempted(name, functools.partial(_measured, name, args))


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    table = Table(title="requests of one sample, by every way in")
    for name in (
        "model",
        "way",
        "requests a second",
        "p50, ms",
        "p99, ms",
        "server's CPU, us",
        "of a no-op server",
    ):
        table.add_column(name, justify="right")
    for row in found:
        numbers = (f"{row[name]:,.2f}" for name in ("p50_ms", "p99_ms"))
        cpu = f"{row['server_us']:,.0f}" if "server_us" in row else ""
        of = f"{row['of_nothing']:.2f}" if "of_nothing" in row else ""
        table.add_row(row["model"], row["way"], f"{row['requests_per_s']:,.0f}", *numbers, cpu, of)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="with NETWORK.OPSET.onnx, whose input is one picture")
    parser.add_argument("--network", nargs="+", default=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--opset", type=int, default=23)
    parser.add_argument("--dtype", help="what it computes in", choices=_DTYPES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--torch", nargs="*", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=1, help="of the clients of a way")
    parser.add_argument("--serving-processes", type=int, default=1, help="in front of the service")
    parser.add_argument("--connections", type=int, default=1, help="of gRPC, for each process of clients")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--max-delay-us", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="for how long, each way in a round")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    args = parser.parse_args()
    if args.folder is None and not set(args.network) <= NETWORKS.keys():
        parser.error(f"without --folder, networks are {', '.join(NETWORKS)}")
    known = versions(_PACKAGES) | ({} if args.device == "cpu" else gpu_versions())
    about = {name: getattr(args, name) for name in _SETTINGS}
    keep(
        rows(args),
        sheet,
        args.out,
        "serving",
        versions=known,
        cores=os.cpu_count(),
        load=os.getloadavg(),
        **about,
    )


if __name__ == "__main__":
    main()
