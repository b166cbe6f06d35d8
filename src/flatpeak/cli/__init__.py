"""The command line: a function per command, in modules by purpose."""
