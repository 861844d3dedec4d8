"""Compiles graphs into plans and checks the plans on the device."""
