"""How the tests are run: collected once, shared between forks, measured by processor time, held to a budget, rotated in CI."""
