"""The commands `chaos` and `bench`, which put a service to the test.

The service imports none of this. `CUDNN_ACTOR_MINIMAL=1 pip install .` leaves it out.
"""
