"""The command line: a function for each command, in modules by purpose."""
