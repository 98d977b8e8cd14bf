"""The tests, one folder a room, and the simulated device they run on."""
