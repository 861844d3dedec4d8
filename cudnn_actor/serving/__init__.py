"""The inference server: models of a service over HTTP and gRPC, by the Open Inference Protocol (KServe v2).

`cudnn-actor serve` starts it. Needs the extra `serve`. See `cudnn-actor docs serving`.
"""
