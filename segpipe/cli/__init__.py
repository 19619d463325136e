"""The `segpipe` command: one module per subcommand, declared in `commands`."""
