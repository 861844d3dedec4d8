"""`deployment`: models behind Ray Serve, each replica with a service of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cudnn_actor.options import make_options
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.ray.deployed import forwarding, replica_of
from cudnn_actor.serving.model_settings import Batching
from cudnn_actor.serving.server import ServerOptions

__all__ = ["deployment"]


def deployment(
    models: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None = None,
    *,
    repository: str | os.PathLike[str] | None = None,
    name: str = "cudnn",
    max_batch: int | None = 32,
    max_delay_us: float = 2000.0,
    num_gpus: float = 1,
    num_cpus: float = 1,
    max_ongoing_requests: int | None = None,
    autoscaling_config: Mapping[str, Any] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A deployment of Ray Serve that answers for models: `serve.run(deployment("resnet50.onnx").bind())`.

    Over HTTP, each replica speaks the Open Inference Protocol as `cudnn-actor serve` does: with
    `route_prefix="/"`, a model is at `/v2/models/NAME/infer`. From Python code,
    `await handle.infer.remote({"image": array})` runs the only model, and `model="NAME"` another one. A
    replica puts requests into batches. It is healthy while its service lives. If the service gives up, the
    replica's process ends, and Serve replaces it. Serve itself sends no request again.

    Parameters
    ----------
    models
        The path of an ONNX file, which is served under the file's name without its suffix; or paths by name.
        Each replica reads the files, so they must be on storage that all nodes share.
    repository
        A folder of models and their versions, on shared storage, too. Changes in it are served without a
        restart; see `cudnn-actor docs serving`.
    name
        The deployment's name, and that of its replicas' services.
    max_batch, max_delay_us
        The most samples in a batch, and the most microseconds that a request waits for other requests, unless
        as many batches run as may run at a time. With `max_batch` None, each request runs by itself; so does
        each request for a model that cannot be batched.
    num_gpus, num_cpus, runtime_env
        The resources of a node that a replica takes, and Ray's environment for it. With `num_gpus=0` it runs
        on the CPU.
    max_ongoing_requests
        How many requests Serve sends to a replica at a time; None for four batches.
    autoscaling_config
        Serve's own options for adding and removing replicas; None for one replica. `.options(num_replicas=3)`
        of the deployment sets a fixed number.
    options
        Other options of `spawn`, as plain data.

    Returns
    -------
    ray.serve.Deployment
        Its method `.options(...)` sets Serve's other options. Bound, as above, it is an application.

    Raises
    ------
    InvalidRequest
        An option is out of its range, or there is neither a model nor a repository. Errors of a model are
        only found when a replica starts.
    """
    from ray import serve  # noqa: PLC0415 - it takes a second, and warns of what its own code uses

    if models is None and repository is None:
        raise InvalidRequest(
            field="models", value=None, problem="is all that there is", fix="give a path, or a repository"
        )
    if not isinstance(models, Mapping):
        models = {} if models is None else {Path(models).stem: models}
    device = "cuda:0" if num_gpus else "cpu"
    service = {"device": device, "name": name, "on_give_up": "exit", **options}
    make_options(service)  # raises if an option is out of its range
    server = ServerOptions(
        models={each: Path(path) for each, path in models.items()},
        repository=None if repository is None else Path(repository),
        host="0.0.0.0",  # so that no client's shared memory is offered: it listens nowhere itself
        http=None,
        grpc=None,
        batch=None if max_batch is None else Batching(max=max_batch, max_delay_us=max_delay_us),
        service=service,
    )
    actor: dict[str, Any] = {"num_gpus": num_gpus, "num_cpus": num_cpus}
    if runtime_env is not None:
        actor["runtime_env"] = dict(runtime_env)
    given: dict[str, Any] = {"autoscaling_config": dict(autoscaling_config)} if autoscaling_config else {}
    configured = serve.deployment(
        name=name,
        ray_actor_options=actor,
        max_ongoing_requests=max_ongoing_requests or 4 * (max_batch or 16),
        **given,
    )
    return configured(serve.ingress(forwarding())(replica_of(server)))
