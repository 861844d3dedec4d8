"""The parent's side of process isolation, in the service's own process."""
