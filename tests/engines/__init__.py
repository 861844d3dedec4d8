"""One contract for every engine: `test_contract_*` runs on each that this machine has, the rest on one."""
