"""`cudnn-actor serve`: an inference server that owns the GPU, for clients of the Open Inference Protocol."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import sys
from pathlib import Path
from typing import Any

from cudnn_actor.attached.paths import socket_path
from cudnn_actor.cli.cpu_options import add_cpu_arguments, cpu_options
from cudnn_actor.cli.user_error import UserError, whole_number
from cudnn_actor.extras import install_command
from cudnn_actor.models import InvalidModel, UnsupportedModel
from cudnn_actor.protocol.errors import InvalidRequest, ServiceStopped

__all__ = ["add_arguments", "run"]

_NEEDED = ("starlette", "uvicorn", "grpc", "google.protobuf", "prometheus_client")
"""The modules that the extra `serve` installs."""
_LARGEST_PORT = 65535
_MOST_PROCESSES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "models",
        nargs="*",
        type=_model,
        metavar="[NAME=]MODEL.onnx",
        help="a model, served under its file's name unless another is given",
    )
    parser.add_argument("--repository", type=Path, metavar="DIR", help="a folder of NAME/VERSION/model.onnx")
    parser.add_argument("--device", default="auto", help='"cuda:0", "cpu" or "auto" (the default)')
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on; this machine's own unless given"
    )
    port = whole_number(most=_LARGEST_PORT)
    parser.add_argument(
        "--http", type=port, default=8000, metavar="PORT", help="8000 unless given; 0: any free one"
    )
    parser.add_argument("--grpc", type=port, default=8001, metavar="PORT", help="8001 unless given; 0: any")
    parser.add_argument(
        "--standby", type=int, choices=(0, 1), default=0, help="1 keeps a second worker ready"
    )
    parser.add_argument(
        "--max-restarts",
        type=whole_number(),
        default=3,
        metavar="N",
        help="workers that may be replaced within --period before the server ends; 3 unless given",
    )
    parser.add_argument("--period", type=float, default=60.0, metavar="SECONDS", help="60 unless given")
    parser.add_argument(
        "--batch",
        type=_batch,
        metavar="MAX[:DELAY_US]",
        help="put requests together where a model allows it: samples, and how long one waits for others",
    )
    parser.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="let other processes of this user attach to the service, too, by cudnn_actor.connect(PATH)",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="take requests with one of its tokens only"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE.pem", help="the certificate for TLS")
    parser.add_argument("--tls-key", type=Path, metavar="FILE.pem", help="its key")
    most = whole_number(least=1)
    parser.add_argument(
        "--most-body",
        type=most,
        default=256 << 20,
        metavar="BYTES",
        help="of a request; 256 MiB unless given",
    )
    parser.add_argument(
        "--most-running", type=most, default=1024, metavar="N", help="inferences under way; 1024 unless given"
    )
    parser.add_argument(
        "--processes",
        type=whole_number(least=1, most=_MOST_PROCESSES),
        default=1,
        metavar="N",
        help="how many processes serve HTTP and gRPC in front of the one that owns the GPU, as uvicorn's "
        "--workers; 1 unless given: that one does it itself",
    )
    parser.add_argument(
        "--spans",
        type=float,
        metavar="RATIO",
        help="make OpenTelemetry spans of the requests that clients trace, and of this share of the others, "
        "0 to 1; run by `opentelemetry-instrument`, which says where they go",
    )
    add_cpu_arguments(parser)


def _model(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    return (name, Path(path)) if equals and name else (Path(text).stem, Path(text))


def _batch(text: str) -> tuple[int, float]:
    most, colon, delay = text.partition(":")
    whole = whole_number(least=1, most=1 << 20)(most)
    return whole, float(whole_number()(delay)) if colon else 2000.0


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, then answer the requests that have begun. The exit status is 0.

    It is 1 if the service has given up, because its workers died more often than they may be replaced.
    """
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"serve needs {name}: {install_command('serve')}") from error
    if not args.models and args.repository is None and args.socket is None:
        raise UserError("there is nothing to serve; give models, --repository DIR, or --socket PATH")
    if len(dict(args.models)) < len(args.models):
        raise UserError("two models have the same name; give NAME=MODEL.onnx")
    if (args.tls_cert is None) != (args.tls_key is None):
        raise UserError("TLS needs a certificate and its key; give both --tls-cert and --tls-key")
    from cudnn_actor.serving.failures import Refused  # noqa: PLC0415 - needs the extra

    try:
        return asyncio.run(_run(args))
    except ServiceStopped as error:
        print(
            f"cudnn-actor: the server has ended, because its service has: {error.reason}; the log says why "
            "its workers died, and --max-restarts and --period how often they may be replaced",
            file=sys.stderr,
        )
        return 1
    except (InvalidModel, UnsupportedModel, InvalidRequest, Refused, ImportError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(
            f"cannot serve there: {error}; give another --host, --http, --grpc or --tls-cert"
        ) from error


async def _run(args: argparse.Namespace) -> int:
    from cudnn_actor.serving.model_settings import Batching  # noqa: PLC0415
    from cudnn_actor.serving.server import ServerOptions, serve, told_to_end  # noqa: PLC0415 - needs the extra

    service: dict[str, Any] = {
        "device": args.device,
        "standby": args.standby,
        "max_restarts": args.max_restarts,
        "period_s": args.period,
        "isolation": "process",
    }
    options = ServerOptions(
        models=dict(args.models),
        repository=args.repository,
        host=args.host,
        http=args.http,
        grpc=args.grpc,
        batch=None if args.batch is None else Batching(max=args.batch[0], max_delay_us=args.batch[1]),
        token_file=args.token_file,
        certificate=args.tls_cert,
        key=args.tls_key,
        most_body=args.most_body,
        most_running=args.most_running,
        socket=args.socket,
        processes=args.processes,
        spans=args.spans,
        service=service | cpu_options(args),
    )
    # The handlers come first: a program that reads that the server serves may end it at once.
    with told_to_end() as told:
        async with serve(options) as server:
            _spare_collector()
            http, grpc = f"{args.host}:{server.http_port}", f"{args.host}:{server.grpc_port}"
            print(f"serving: HTTP on {http}, gRPC on {grpc}", flush=True)
            if args.socket is not None:
                print(f"attachable: unix:{socket_path(args.socket)}", flush=True)
            await told.wait()
    return 0


def _spare_collector() -> None:
    """Let the garbage collector ignore all objects that exist now: they live as long as this process.

    Otherwise each full collection would delay all requests by tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
