"""What puts a service to the test: the commands `chaos` and `bench`.

The service imports none of this. `CUDNN_ACTOR_MINIMAL=1 pip install .` leaves it out.
"""
