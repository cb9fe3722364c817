"""Many runs: the ledger, the jobs, and the slots they run in."""
