"""What every process of a job has: its configuration, the contract with the planner, and how it ends with a sentence."""
