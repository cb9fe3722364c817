"""Many runs: the plan, the jobs, and the slots they run in."""
