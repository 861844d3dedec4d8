"""From a graph to a plan that has been checked on the device."""
