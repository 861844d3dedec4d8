"""The code behind the fixtures of the pytest plugin, which is `pytest_cudnn_actor`, beside this package."""
