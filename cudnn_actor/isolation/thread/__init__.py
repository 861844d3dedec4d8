"""Thread isolation: the actor and its engine run on a thread of the service's own process."""
