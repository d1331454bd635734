"""What tests of several folders share: oracles, and worlds that they run in."""
