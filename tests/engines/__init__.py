"""One contract for every engine: `contract/` runs on each that this machine has, the rest on one."""
