"""The repair of one container: state machine, runner, peers, ports."""
