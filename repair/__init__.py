"""One container's repair, whoever runs it: state machine, runner, peers, ports."""
