"""The command line: one thin module a command. Parses, calls the package, reports."""
