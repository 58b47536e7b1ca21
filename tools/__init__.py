"""What makes files of the repository from the code: `make man`, `make dashboard`."""
