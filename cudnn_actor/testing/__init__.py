"""What the fixtures of the pytest plugin do. The plugin is `pytest_cudnn_actor`, beside this package."""
